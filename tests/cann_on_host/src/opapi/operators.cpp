// SPDX-License-Identifier: Apache-2.0
// The aclnn operators: those that move, fill and choose elements, which is what a KV connector uses. torch_npu
// calls them for the operators listed in cann_on_host_operators.ACLNN; one that is missing raises with its name.
#include "operator.h"

using namespace cann_on_host;

namespace {

// CANN takes int32 and int64 indices only.
void check_index(const at::Tensor& index, const char* user) {
  if (index.scalar_type() != at::kInt && index.scalar_type() != at::kLong) {
    fatal("%s: indices are %s, must be int32 or int64", user, c10::toString(index.scalar_type()));
  }
}

}  // namespace

ACLNN(InplaceCopy, Tensor self, Tensor source) {
  auto x = get(self), y = get(source);
  PLAN(x, x.copy_(y));
}

ACLNN(Cast, Tensor self, int, Tensor out) {
  auto x = get(self), o = get(out);
  PLAN(o, o.copy_(x));
}

ACLNN(InplaceZero, Tensor self) {
  auto x = get(self);
  PLAN(x, x.zero_());
}

ACLNN(InplaceOne, Tensor self) {
  auto x = get(self);
  PLAN(x, x.fill_(1));
}

ACLNN(InplaceFillScalar, Tensor self, Scalar value) {
  auto x = get(self);
  auto v = value->scalar;
  PLAN(x, x.fill_(v));
}

ACLNN(Arange, Scalar start, Scalar end, Scalar step, Tensor out) {
  auto o = get(out);
  auto from = start->scalar, to = end->scalar, by = step->scalar;
  PLAN(o, o.copy_(at::arange(from, to, by, o.options())));
}

ACLNN(IndexSelect, Tensor self, int64_t dim, Tensor index, Tensor out) {
  auto x = get(self), i = get(index), o = get(out);
  check_index(i, "aclnnIndexSelect");
  PLAN(o, o.copy_(x.index_select(dim, i)));
}

ACLNN(Gather, Tensor self, int64_t dim, Tensor index, Tensor out) {
  auto x = get(self), i = get(index), o = get(out);
  check_index(i, "aclnnGather");
  PLAN(o, o.copy_(x.gather(dim, i)));
}

ACLNN(Cat, Tensors tensors, int64_t dim, Tensor out) {
  auto parts = get(tensors);
  auto o = get(out);
  PLAN(o, o.copy_(at::cat(parts, dim)));
}

// torch_npu pads what HCCL gathers.
ACLNN(ConstantPadNd, Tensor self, const aclIntArray* padding, Scalar value, Tensor out) {
  auto x = get(self), o = get(out);
  auto p = padding->values;
  auto v = value->scalar;
  PLAN(o, o.copy_(at::constant_pad_nd(x, p, v)));
}
