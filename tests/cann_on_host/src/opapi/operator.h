// SPDX-License-Identifier: Apache-2.0
// How an aclnn operator is written:
//
//   ACLNN(Gather, Tensor self, int64_t dim, Tensor index, Tensor out) {
//     auto x = get(self), i = get(index), o = get(out);
//     PLAN(o, o.copy_(x.gather(dim, i)));
//   }
//
// The first part of an operator (aclnnGatherGetWorkspaceSize) takes its arguments and plans the work, the second
// (aclnnGather) queues it on a stream. Results are copied into `out`, so that its strides are respected.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>

#include <cstring>

#include "objects.h"

#define ACLNN(name, ...)                                                                          \
  extern "C" int aclnn##name(void*, uint64_t, aclOpExecutor* executor, aclrtStream stream) {      \
    return cann_on_host::launch(executor, stream);                                                \
  }                                                                                               \
  extern "C" int aclnn##name##GetWorkspaceSize(__VA_ARGS__, uint64_t* workspace_bytes, aclOpExecutor** executor)

#define PLAN(out, ...) \
  return cann_on_host::plan(__func__, workspace_bytes, executor, out, [=]() mutable { __VA_ARGS__; })

namespace cann_on_host {

using Tensor = const aclTensor*;
using Scalar = const aclScalar*;
using Tensors = const aclTensorList*;

inline at::Tensor get(Tensor tensor) { return tensor ? tensor->tensor : at::Tensor(); }

inline std::vector<at::Tensor> get(Tensors list) {
  std::vector<at::Tensor> tensors;
  for (Tensor tensor : list->tensors) tensors.push_back(get(tensor));
  return tensors;
}

inline int plan(const char* function, uint64_t* workspace_bytes, aclOpExecutor** executor, const at::Tensor& out,
                std::function<void()> work) {
  const std::string name(function, std::strlen(function) - std::strlen("GetWorkspaceSize"));
  *workspace_bytes = 0;
  *executor = new aclOpExecutor{name, static_cast<uint64_t>(out.numel() * out.element_size()), std::move(work)};
  return ACL_SUCCESS;
}

inline int launch(aclOpExecutor* executor, aclrtStream stream) {
  CANN_ON_HOST_LOG("%s on stream %p", executor->name.c_str(), stream);
  count_launch(executor->name, executor->bytes_written);
  enqueue(stream, TaskKind::kKernel, executor->name, [work = std::move(executor->work)] {
    at::AutoDispatchBelowADInplaceOrView guard;
    work();
  });
  delete executor;
  return ACL_SUCCESS;
}

}  // namespace cann_on_host
