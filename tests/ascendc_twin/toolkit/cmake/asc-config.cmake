# SPDX-License-Identifier: Apache-2.0
#
# find_package(ASC): makes AscendC a language for project().
if(NOT EXISTS "$ENV{ASCEND_HOME_PATH}")
  message(FATAL_ERROR "ASCEND_HOME_PATH is \"$ENV{ASCEND_HOME_PATH}\" in the environment")
endif()
set(asc_modules "$ENV{ASCEND_HOME_PATH}/compiler/tikcpp/ascendc_kernel_cmake")
include("${asc_modules}/fwk_modules/config.cmake")
list(APPEND CMAKE_MODULE_PATH "${asc_modules}/asc_modules")
