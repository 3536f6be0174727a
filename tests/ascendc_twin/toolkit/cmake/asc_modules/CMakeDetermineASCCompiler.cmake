# SPDX-License-Identifier: Apache-2.0
find_program(CMAKE_ASC_COMPILER NAMES bisheng NO_DEFAULT_PATH
  PATHS "$ENV{ASCEND_HOME_PATH}/${CMAKE_SYSTEM_PROCESSOR}-linux/ccec_compiler/bin")
if(NOT CMAKE_ASC_COMPILER)
  message(FATAL_ERROR "CANN in $ENV{ASCEND_HOME_PATH} has no compiler for kernels")
endif()
set(CMAKE_ASC_SOURCE_FILE_EXTENSIONS asc)
set(CMAKE_ASC_COMPILER_ENV_VAR ASC)
configure_file("${CMAKE_CURRENT_LIST_DIR}/CMakeASCCompiler.cmake.in"
  "${CMAKE_PLATFORM_INFO_DIR}/CMakeASCCompiler.cmake" @ONLY)
