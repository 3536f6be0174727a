// SPDX-License-Identifier: Apache-2.0
#include "launch.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "../runtime/runtime.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"

namespace cann_on_host {
namespace {

size_t extent_in_bytes(const at::Tensor& tensor) {
  int64_t elements = 1;
  for (int64_t i = 0; i < tensor.dim(); i++) elements += (tensor.size(i) - 1) * tensor.stride(i);
  return static_cast<size_t>(elements) * tensor.element_size();
}

}  // namespace

bool is_npu(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kNpu; }

at::Tensor on_cpu(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (!tensor.numel() || !tensor.data_ptr()) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  require_device(tensor.data_ptr(), extent_in_bytes(tensor), "a tensor on the NPU");
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

void launch(c10::Device device, const std::string& name, const std::vector<at::Tensor>& outputs,
            std::function<void()> work) {
  uint64_t bytes = 0;
  for (const at::Tensor& output : outputs) bytes += output.numel() * output.element_size();
  count_launch(name, bytes);
  const auto stream = c10_npu::getCurrentNPUStream(device.index()).stream(false);
  CANN_ON_HOST_LOG("%s on stream %p", name.c_str(), stream);
  enqueue(stream, TaskKind::kKernel, name, [work = std::move(work)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    work();
  });
}

void wait_for_current_stream(c10::Device device) {
  c10::impl::VirtualGuardImpl guard(kNpu);
  guard.synchronizeStream(guard.getStream(device));
}

}  // namespace cann_on_host
