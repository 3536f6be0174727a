// SPDX-License-Identifier: Apache-2.0
#include "objects.h"

#include <algorithm>

#include "acl/acl.h"

namespace cann_on_host {

at::ScalarType scalar_type(int acl_type) {
  switch (acl_type) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_INT16:
      return at::kShort;
    case ACL_INT32:
      return at::kInt;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT8:
      return at::kByte;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    case ACL_FLOAT8_E5M2:
      return at::kFloat8_e5m2;
    case ACL_FLOAT8_E4M3FN:
      return at::kFloat8_e4m3fn;
    default:
      fatal("acl data type %d is not emulated", acl_type);
  }
}

}  // namespace cann_on_host

using namespace cann_on_host;

extern "C" {

aclTensor* aclCreateTensor(const int64_t* shape, uint64_t dims, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat, const int64_t*, uint64_t, void* storage) {
  const auto options = at::TensorOptions().dtype(scalar_type(type));
  const at::IntArrayRef sizes(shape, dims);
  if (!storage) return new aclTensor{at::empty(sizes, options), sizes.vec()};
  const auto element = static_cast<int64_t>(c10::elementSize(scalar_type(type)));
  char* first = static_cast<char*>(storage) + offset * element;
  int64_t elements = 1;
  for (uint64_t i = 0; i < dims; i++) elements += (shape[i] - 1) * strides[i];
  const bool empty = std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size == 0; });
  if (!empty) require_device(first, static_cast<size_t>(elements * element), "a tensor of an aclnn operator");
  return new aclTensor{at::from_blob(first, sizes, at::IntArrayRef(strides, dims), options), sizes.vec()};
}

aclScalar* aclCreateScalar(void* value, aclDataType type) {
  return new aclScalar{at::from_blob(value, {}, at::TensorOptions().dtype(scalar_type(type))).item()};
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) {
  return new aclIntArray{{values, values + size}};
}

aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return new aclFloatArray{{values, values + size}};
}

aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) {
  return new aclBoolArray{{values, values + size}};
}

aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return new aclTensorList{{tensors, tensors + size}};
}

aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
  return new aclScalarList{{scalars, scalars + size}};
}

int aclGetViewShape(const aclTensor* tensor, int64_t** shape, uint64_t* dims) {
  *dims = tensor->view_shape.size();
  *shape = new int64_t[*dims];
  std::copy(tensor->view_shape.begin(), tensor->view_shape.end(), *shape);
  return ACL_SUCCESS;
}

int aclDestroyTensor(const aclTensor* tensor) {
  delete tensor;
  return ACL_SUCCESS;
}

int aclDestroyScalar(const aclScalar* scalar) {
  delete scalar;
  return ACL_SUCCESS;
}

int aclDestroyIntArray(const aclIntArray* array) {
  delete array;
  return ACL_SUCCESS;
}

int aclDestroyFloatArray(const aclFloatArray* array) {
  delete array;
  return ACL_SUCCESS;
}

int aclDestroyBoolArray(const aclBoolArray* array) {
  delete array;
  return ACL_SUCCESS;
}

int aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : list->tensors) delete tensor;
  delete list;
  return ACL_SUCCESS;
}

int aclDestroyScalarList(const aclScalarList* list) {
  for (const aclScalar* scalar : list->scalars) delete scalar;
  delete list;
  return ACL_SUCCESS;
}

}  // extern "C"
