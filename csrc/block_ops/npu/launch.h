// SPDX-License-Identifier: Apache-2.0
//
// Queueing a kernel on a stream. How a kernel is launched depends on CANN: one of launch.asc (CANN with the
// CMake package ASC) and launch_ascendc_library.cpp (older) implements this.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tiling.h"

namespace vllm_ascend_pd::npu {

// `stream` is an aclrtStream, the other pointers are device memory. Returns an aclError, 0 for success.
int launch(uint32_t cores, void* stream, const int64_t* unit_offsets, std::byte* out, const SplitTiling& tiling);
int launch(uint32_t cores, void* stream, const std::byte* src, std::byte* out, const InterleaveTiling& tiling);
int launch(uint32_t cores, void* stream, int64_t* out, const SumTiling& tiling);
int launch(uint32_t cores, void* stream, int32_t* out, const Sum32Tiling& tiling);

}  // namespace vllm_ascend_pd::npu
