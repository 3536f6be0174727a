// SPDX-License-Identifier: Apache-2.0
//
// The launch functions that ascendc_library would generate.
#include "twin_launch.h"

#include "aclrtlaunch_vllm_ascend_pd_interleave.h"
#include "aclrtlaunch_vllm_ascend_pd_split.h"
#include "aclrtlaunch_vllm_ascend_pd_sum.h"
#include "aclrtlaunch_vllm_ascend_pd_sum32.h"

namespace npu = vllm_ascend_pd::npu;

extern "C" void vllm_ascend_pd_split(GM_ADDR unit_offsets, GM_ADDR out, npu::SplitTiling tiling);
extern "C" void vllm_ascend_pd_interleave(GM_ADDR src, GM_ADDR out, npu::InterleaveTiling tiling);
extern "C" void vllm_ascend_pd_sum(GM_ADDR out, npu::SumTiling tiling);
extern "C" void vllm_ascend_pd_sum32(GM_ADDR out, npu::Sum32Tiling tiling);

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_split(uint32_t cores, void* stream, void* a, void* b,
                                                     npu::SplitTiling* tiling) {
  return ascendc_twin::launch("vllm_ascend_pd_split", vllm_ascend_pd_split, cores, stream, a, b, *tiling);
}

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_interleave(uint32_t cores, void* stream, void* a, void* b,
                                                          npu::InterleaveTiling* tiling) {
  return ascendc_twin::launch("vllm_ascend_pd_interleave", vllm_ascend_pd_interleave, cores, stream, a, b, *tiling);
}

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_sum(uint32_t cores, void* stream, void* out, npu::SumTiling* tiling) {
  return ascendc_twin::launch("vllm_ascend_pd_sum", vllm_ascend_pd_sum, cores, stream, out, *tiling);
}

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_sum32(uint32_t cores, void* stream, void* out,
                                                     npu::Sum32Tiling* tiling) {
  return ascendc_twin::launch("vllm_ascend_pd_sum32", vllm_ascend_pd_sum32, cores, stream, out, *tiling);
}
