// SPDX-License-Identifier: Apache-2.0
// The objects that aclnn operators take. A tensor is a torch CPU tensor over the (host) memory of the device.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <string>
#include <vector>

#include "../runtime/runtime.h"

struct aclTensor {
  at::Tensor tensor;
  mutable std::vector<int64_t> view_shape;  // set by operators whose output shape depends on data
};
struct aclScalar {
  at::Scalar scalar;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclFloatArray {
  std::vector<float> values;
};
struct aclBoolArray {
  std::vector<char> values;
};
struct aclTensorList {
  std::vector<const aclTensor*> tensors;
};
struct aclScalarList {
  std::vector<const aclScalar*> scalars;
};
struct aclOpExecutor {
  std::string name;
  uint64_t bytes_written;
  std::function<void()> work;
};

namespace cann_on_host {

// Ends the process when there is no such type in torch.
at::ScalarType scalar_type(int acl_type);

}  // namespace cann_on_host
