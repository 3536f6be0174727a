# SPDX-License-Identifier: Apache-2.0
#
# What CANN asks for and sets where ascendc.cmake is included.
string(TOLOWER "${SOC_VERSION}" soc_version)
if(NOT soc_version MATCHES "^ascend(910b[1-4]|910_93[0-9]2|950(pr|dt)_)")
  message(FATAL_ERROR "SOC_VERSION is \"${SOC_VERSION}\"")
endif()
if(NOT RUN_MODE STREQUAL npu OR NOT EXISTS "${ASCEND_CANN_PACKAGE_PATH}")
  message(FATAL_ERROR "RUN_MODE is \"${RUN_MODE}\", ASCEND_CANN_PACKAGE_PATH \"${ASCEND_CANN_PACKAGE_PATH}\"")
endif()
if(NOT CMAKE_C_COMPILER_VERSION)
  message(FATAL_ERROR "the host code of kernels is compiled with options by the C compiler's version: enable C")
endif()

# No run path is written, whatever is set: neither for the kernels' library nor for those that use it.
set(CMAKE_SKIP_RPATH TRUE)

set(ASCEND_PYTHON_EXECUTABLE python3 CACHE STRING "")
