// SPDX-License-Identifier: Apache-2.0
//
// Checked and planned as by the NPU's ops, then run on the twin. All return the number of launches.
#pragma once

#include "interleave.cpp"
#include "plan.h"
#include "split.cpp"
#include "sum.cpp"
#include "sum32.cpp"

namespace twin {

using vllm_ascend_pd::Cache;
using vllm_ascend_pd::Interleave;
using vllm_ascend_pd::Split;
using vllm_ascend_pd::Sum;
using vllm_ascend_pd::Sum32;
using vllm_ascend_pd::npu::Chip;

inline uint8_t* bytes(const void* data) { return static_cast<uint8_t*>(const_cast<void*>(data)); }

inline int64_t run(const Chip& chip, const Split& job) {
  int64_t launches = 0;
  if (!vllm_ascend_pd::check("split", job)) return launches;
  for (int64_t first = 0; first < job.num_caches(); first += vllm_ascend_pd::npu::kMaxCaches) {
    const auto planned = vllm_ascend_pd::npu::plan_split(chip, job, first);
    AscendC::twin::launch(planned.cores, vllm_ascend_pd_split, bytes(job.unit_offsets), bytes(job.out),
                          planned.tiling);
    ++launches;
  }
  return launches;
}

inline int64_t run(const Chip& chip, const Interleave& job) {
  if (!vllm_ascend_pd::check("interleave", job)) return 0;
  const auto planned = vllm_ascend_pd::npu::plan_interleave(chip, job);
  AscendC::twin::launch(planned.cores, vllm_ascend_pd_interleave, bytes(job.src), bytes(job.out), planned.tiling);
  return 1;
}

inline int64_t run(const Chip& chip, const std::vector<Sum>& jobs) {
  int64_t launches = 0;
  for (const Sum& job : jobs) vllm_ascend_pd::check("sum", job);
  for (size_t first = 0; first < jobs.size(); first += vllm_ascend_pd::npu::kMaxCaches, ++launches) {
    const auto planned = vllm_ascend_pd::npu::plan_sum(chip, jobs, first);
    AscendC::twin::launch(planned.cores, vllm_ascend_pd_sum, bytes(jobs[first].out), planned.tiling);
  }
  return launches;
}

inline int64_t run(const Chip& chip, const std::vector<Sum32>& jobs) {
  int64_t launches = 0;
  for (const Sum32& job : jobs) vllm_ascend_pd::check("sum32", job);
  for (size_t first = 0; first < jobs.size(); first += vllm_ascend_pd::npu::kMaxCaches, ++launches) {
    const auto planned = vllm_ascend_pd::npu::plan_sum(chip, jobs, first);
    AscendC::twin::launch(planned.cores, vllm_ascend_pd_sum32, bytes(jobs[first].out), planned.tiling);
  }
  return launches;
}

}  // namespace twin
