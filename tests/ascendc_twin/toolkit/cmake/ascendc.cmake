# SPDX-License-Identifier: Apache-2.0
#
# ascendc_library(name SHARED kernel...): kernels for whoever links C++ with CMake.
set(ascendc_modules "${CMAKE_CURRENT_LIST_DIR}/legacy_modules")
include("${ascendc_modules}/host_config.cmake")
include("${ascendc_modules}/function.cmake")
