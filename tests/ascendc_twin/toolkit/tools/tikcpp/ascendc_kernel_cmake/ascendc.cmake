# SPDX-License-Identifier: Apache-2.0
#
# What CANN's file of this name does, with the twin in place of CANN: ascendc_library(name SHARED kernel...)
# compiles the kernels and the host functions that launch them.
get_filename_component(toolkit "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

# Of the process that loads the library.
add_library(ascendcl INTERFACE)

function(ascendc_library name type)
  find_package(Threads REQUIRED)
  add_library(${name} ${type} ${ARGN} "${toolkit}/launch.cpp")
  # launch.cpp needs the kernels' own folder for their tilings, and ACL for streams.
  target_include_directories(${name} PRIVATE "${toolkit}/.." "${CMAKE_CURRENT_SOURCE_DIR}")
  target_include_directories(${name} SYSTEM PRIVATE "${TORCH_NPU_PATH}/include/third_party/acl/inc")
  target_include_directories(${name} PUBLIC "${toolkit}/include")
  target_link_libraries(${name} PRIVATE Threads::Threads)
endfunction()
