// SPDX-License-Identifier: Apache-2.0
// How operators of this library run on the emulated NPU.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

namespace cann_on_host {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

bool is_npu(const at::Tensor& tensor);

// The CPU tensor over the memory of an NPU tensor.
at::Tensor on_cpu(const at::Tensor& tensor);

// Queue `work` on the current NPU stream of `device`, as one kernel that writes `outputs`.
void launch(c10::Device device, const std::string& name, const std::vector<at::Tensor>& outputs,
            std::function<void()> work);

// Wait for the current NPU stream of `device`.
void wait_for_current_stream(c10::Device device);

}  // namespace cann_on_host
