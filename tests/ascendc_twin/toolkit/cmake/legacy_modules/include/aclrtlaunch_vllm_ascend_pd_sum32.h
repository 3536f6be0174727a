// SPDX-License-Identifier: Apache-2.0
//
// As ascendc_library generates it for the kernel vllm_ascend_pd_sum32.
#pragma once

#include <cstdint>

#ifndef ACLRT_LAUNCH_KERNEL
#define ACLRT_LAUNCH_KERNEL(kernel) aclrtlaunch_##kernel
#endif

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_sum32(uint32_t cores, void* stream, void* out,
                                                vllm_ascend_pd::npu::Sum32Tiling* tiling);
