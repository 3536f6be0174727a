// SPDX-License-Identifier: Apache-2.0
//
// As ascendc_library generates it for the kernel vllm_ascend_pd_interleave.
#pragma once

#include <cstdint>

#ifndef ACLRT_LAUNCH_KERNEL
#define ACLRT_LAUNCH_KERNEL(kernel) aclrtlaunch_##kernel
#endif

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_interleave(uint32_t cores, void* stream, void* a, void* b,
                                                  vllm_ascend_pd::npu::InterleaveTiling* tiling);
