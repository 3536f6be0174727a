# SPDX-License-Identifier: Apache-2.0
#
# What CANN's ascendc_library leaves in a build, with the twin for a device.
include(GNUInstallDirs)

function(ascendc_library name type)
  set(cann "${ASCEND_CANN_PACKAGE_PATH}")
  set(generated "${CMAKE_BINARY_DIR}/include/${name}")
  file(COPY "${ascendc_modules}/include/" DESTINATION "${generated}")

  add_library(${name} ${type} ${ARGN} "${ascendc_modules}/host_stub.cpp")
  target_include_directories(${name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}"
    PUBLIC "${generated}" "${cann}/include")
  target_compile_definitions(${name} PRIVATE ASCENDC_TWIN_LIBRARY)
  target_link_directories(${name} PUBLIC "${cann}/lib64")
  target_link_options(${name} PRIVATE -Wl,-z,relro -Wl,-z,now)
  # The kernels' library names only two of the libraries that it needs: who links it brings the others.
  target_link_libraries(${name}
    PRIVATE "${cann}/lib64/libascendc_runtime.a"
    INTERFACE ascendcl runtime tiling_api register platform error_manager profapi ge_common_base unified_dlog mmpa dl
    PUBLIC ascend_dump c_sec)
  set_target_properties(${name} PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")

  # Linked a second time, with CMake's command: that is where the generated host code comes in.
  add_custom_command(TARGET ${name} POST_BUILD
    COMMAND rm -f $<TARGET_FILE:${name}>
    COMMAND ${ASCEND_PYTHON_EXECUTABLE} "${ascendc_modules}/util/relink.py" "${CMAKE_CURRENT_BINARY_DIR}" ${name})

  install(TARGETS ${name} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(DIRECTORY "${CMAKE_BINARY_DIR}/include/" DESTINATION include)
endfunction()
