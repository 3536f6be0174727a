// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

namespace cann_on_host {

// Replace the NPU kernels of ATen's operators, except those in `kept` (names with or without overload) and those
// that return views, by one that runs their CPU kernels. Returns how many.
int64_t replace_aten_kernels(const std::vector<std::string>& kept);

}  // namespace cann_on_host
