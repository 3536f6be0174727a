// SPDX-License-Identifier: Apache-2.0
// torch.ops.cann_on_host.*: what tests/cann_on_host/operators.py builds torch_npu's fused operators from.
#include <torch/library.h>

#include "boxed.h"
#include "fused.h"
#include "launch.h"

using namespace cann_on_host;

TORCH_LIBRARY(cann_on_host, m) {
  m.def("replace_aten_kernels(str[] kept) -> int", &replace_aten_kernels);
  m.def("add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float epsilon) -> (Tensor, Tensor, Tensor)",
        &add_rms_norm);
  m.def("swiglu(Tensor x, int dim) -> Tensor", &swiglu);
  m.def(
      "rotary_embedding(Tensor positions, Tensor q, Tensor k, int head_size, Tensor cos_sin, bool neox) -> ()",
      &rotary_embedding);
  m.def("reshape_and_cache(Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor slots) -> ()",
        &reshape_and_cache);
  m.def(
      "slot_mapping(int requests, int tokens, int max_tokens, Tensor query_starts, Tensor positions, "
      "Tensor block_table, int block_size, Tensor slots, int padding) -> ()",
      &slot_mapping);
  m.def(
      "attention(Tensor q, Tensor k, Tensor v, Tensor? block_table, int[] query_ends, int[] key_lengths, int heads, "
      "int kv_heads, float scale, int block_size, int sparse_mode, int pre_tokens) -> (Tensor, Tensor)",
      &attention);
}
