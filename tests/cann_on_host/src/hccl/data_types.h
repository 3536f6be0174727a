// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "hccl/hccl.h"

namespace cann_on_host {

uint64_t bytes_of(HcclDataType type);

// into[i] = operation(into[i], from[i]). False: HCCL does not reduce this type.
bool reduce(void* into, const void* from, uint64_t elements, HcclDataType type, HcclReduceOp operation);

}  // namespace cann_on_host
