// SPDX-License-Identifier: Apache-2.0
//
// launch.h where kernels are built by CANN's ascendc_library, which generates a host function and a header for
// each; a struct that a kernel takes by value is passed to it by pointer and copied.
#include "launch.h"

#include "aclrtlaunch_vllm_ascend_pd_interleave.h"
#include "aclrtlaunch_vllm_ascend_pd_split.h"
#include "aclrtlaunch_vllm_ascend_pd_sum.h"
#include "aclrtlaunch_vllm_ascend_pd_sum32.h"

namespace vllm_ascend_pd::npu {

int launch(uint32_t cores, void* stream, const int64_t* unit_offsets, std::byte* out, const SplitTiling& tiling) {
  return static_cast<int>(ACLRT_LAUNCH_KERNEL(vllm_ascend_pd_split)(
      cores, stream, const_cast<int64_t*>(unit_offsets), out, const_cast<SplitTiling*>(&tiling)));
}

int launch(uint32_t cores, void* stream, const std::byte* src, std::byte* out, const InterleaveTiling& tiling) {
  return static_cast<int>(ACLRT_LAUNCH_KERNEL(vllm_ascend_pd_interleave)(
      cores, stream, const_cast<std::byte*>(src), out, const_cast<InterleaveTiling*>(&tiling)));
}

int launch(uint32_t cores, void* stream, int64_t* out, const SumTiling& tiling) {
  return static_cast<int>(
      ACLRT_LAUNCH_KERNEL(vllm_ascend_pd_sum)(cores, stream, out, const_cast<SumTiling*>(&tiling)));
}

int launch(uint32_t cores, void* stream, int32_t* out, const Sum32Tiling& tiling) {
  return static_cast<int>(
      ACLRT_LAUNCH_KERNEL(vllm_ascend_pd_sum32)(cores, stream, out, const_cast<Sum32Tiling*>(&tiling)));
}

}  // namespace vllm_ascend_pd::npu
