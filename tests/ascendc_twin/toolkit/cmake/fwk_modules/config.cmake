# SPDX-License-Identifier: Apache-2.0
#
# What the package ASC does to its user's settings.
set(CMAKE_CXX_FLAGS_DEBUG "")
set(CMAKE_CXX_FLAGS_RELEASE "")
file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/autogen")
