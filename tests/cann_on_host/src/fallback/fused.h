// SPDX-License-Identifier: Apache-2.0
// The fused operators of torch_npu that vllm-ascend's attention path calls, written on ATen.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>
#include <vector>

namespace cann_on_host {

// y = norm(x + residual) * weight; also 1 / rms and x + residual (undefined without a residual).
std::tuple<at::Tensor, at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x,
                                                            const std::optional<at::Tensor>& residual,
                                                            const at::Tensor& weight, double epsilon);

at::Tensor swiglu(const at::Tensor& x, int64_t dim);

// Turns q and k [tokens, heads * head_size] in place. cos_sin: [positions, 2 * head_size / 2].
void rotary_embedding(const at::Tensor& positions, const at::Tensor& q, const at::Tensor& k, int64_t head_size,
                      const at::Tensor& cos_sin, bool neox);

// Writes k and v [tokens, heads, head_size] to their slots of the caches [blocks, block_size, heads, head_size];
// negative slots are left out.
void reshape_and_cache(const at::Tensor& k, const at::Tensor& v, const at::Tensor& k_cache, const at::Tensor& v_cache,
                       const at::Tensor& slots);

// The slot of each token: block_table[request][position / block_size] * block_size + position % block_size.
void slot_mapping(int64_t requests, int64_t tokens, int64_t max_tokens, const at::Tensor& query_starts,
                  const at::Tensor& positions, const at::Tensor& block_table, int64_t block_size,
                  const at::Tensor& slots, int64_t padding);

// What a call of fused_infer_attention_score in TND layout does: q [tokens, heads, head_size]; `query_ends` and
// `key_lengths` per request (without a block table: ends in k and v). Returns the output and the log-sum-exp.
std::tuple<at::Tensor, at::Tensor> attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                             const std::optional<at::Tensor>& block_table,
                                             std::vector<int64_t> query_ends, std::vector<int64_t> key_lengths,
                                             int64_t heads, int64_t kv_heads, double scale, int64_t block_size,
                                             int64_t sparse_mode, int64_t pre_tokens);

}  // namespace cann_on_host
