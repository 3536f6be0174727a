// SPDX-License-Identifier: Apache-2.0
#include "data_types.h"

#include <algorithm>
#include <cstring>

namespace cann_on_host {
namespace {

struct Bfloat16 {
  uint16_t bits;

  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  Bfloat16& operator=(float value) {
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    bits = static_cast<uint16_t>((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to the nearest, ties to even
    return *this;
  }
};

template <class Element, class Accumulator>
bool reduce_as(void* into, const void* from, uint64_t elements, HcclReduceOp operation) {
  auto* left = static_cast<Element*>(into);
  auto* right = static_cast<const Element*>(from);
  for (uint64_t i = 0; i < elements; i++) {
    const Accumulator a = left[i], b = right[i];
    switch (operation) {
      case HCCL_REDUCE_SUM:
        left[i] = static_cast<Accumulator>(a + b);
        break;
      case HCCL_REDUCE_PROD:
        left[i] = static_cast<Accumulator>(a * b);
        break;
      case HCCL_REDUCE_MAX:
        left[i] = std::max(a, b);
        break;
      case HCCL_REDUCE_MIN:
        left[i] = std::min(a, b);
        break;
      default:
        return false;
    }
  }
  return true;
}

}  // namespace

uint64_t bytes_of(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8:
    case HCCL_DATA_TYPE_HIF8:
    case HCCL_DATA_TYPE_FP8E4M3:
    case HCCL_DATA_TYPE_FP8E5M2:
    case HCCL_DATA_TYPE_FP8E8M0:
      return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16:
      return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32:
      return 4;
    case HCCL_DATA_TYPE_INT128:
      return 16;
    default:
      return 8;
  }
}

// The types that HcclAllReduce takes on Atlas A2 and A3 (see README.md): int8, int16, int32, int64, float16, float32,
// bfloat16; products not of int16 and bfloat16.
bool reduce(void* into, const void* from, uint64_t elements, HcclDataType type, HcclReduceOp operation) {
  if (operation == HCCL_REDUCE_PROD && (type == HCCL_DATA_TYPE_INT16 || type == HCCL_DATA_TYPE_BFP16)) return false;
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
      return reduce_as<int8_t, int8_t>(into, from, elements, operation);
    case HCCL_DATA_TYPE_INT16:
      return reduce_as<int16_t, int16_t>(into, from, elements, operation);
    case HCCL_DATA_TYPE_INT32:
      return reduce_as<int32_t, int32_t>(into, from, elements, operation);
    case HCCL_DATA_TYPE_INT64:
      return reduce_as<int64_t, int64_t>(into, from, elements, operation);
    case HCCL_DATA_TYPE_FP16:
      return reduce_as<_Float16, float>(into, from, elements, operation);
    case HCCL_DATA_TYPE_BFP16:
      return reduce_as<Bfloat16, float>(into, from, elements, operation);
    case HCCL_DATA_TYPE_FP32:
      return reduce_as<float, float>(into, from, elements, operation);
    default:
      return false;
  }
}

}  // namespace cann_on_host
