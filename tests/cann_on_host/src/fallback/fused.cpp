// SPDX-License-Identifier: Apache-2.0
#include "fused.h"

#include "../runtime/runtime.h"
#include "launch.h"

namespace cann_on_host {
namespace {

using at::Tensor;

Tensor rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, bool neox) {
  const Tensor a = neox ? x.chunk(2, -1)[0] : x.slice(-1, 0, std::nullopt, 2);
  const Tensor b = neox ? x.chunk(2, -1)[1] : x.slice(-1, 1, std::nullopt, 2);
  const Tensor p = a * cos - b * sin, q = b * cos + a * sin;
  return neox ? at::cat({p, q}, -1) : at::stack({p, q}, -1).flatten(-2);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> add_rms_norm(const Tensor& x, const std::optional<Tensor>& residual,
                                                const Tensor& weight, double epsilon) {
  auto shape = x.sizes().vec();
  shape.back() = 1;
  Tensor y = at::empty_like(x), rstd = at::empty(shape, x.options().dtype(at::kFloat));
  Tensor sum = residual ? at::empty_like(x) : Tensor();
  launch(x.device(), "npu_add_rms_norm", {y},
         [epsilon, a = on_cpu(x), b = residual ? on_cpu(*residual) : Tensor(), gamma = on_cpu(weight), y = on_cpu(y),
          rstd = on_cpu(rstd), sum = residual ? on_cpu(sum) : Tensor()]() mutable {
           Tensor total = a;
           if (b.defined()) {
             total = (a.to(at::kFloat) + b.to(at::kFloat)).to(a.scalar_type());
             sum.copy_(total);
           }
           const Tensor wide = total.to(at::kFloat);
           const Tensor scale = at::rsqrt(wide.pow(2).mean({-1}, true) + epsilon);
           rstd.copy_(scale);
           y.copy_(wide * scale * gamma.to(at::kFloat));
         });
  return {y, rstd, sum};
}

Tensor swiglu(const Tensor& x, int64_t dim) {
  auto shape = x.sizes().vec();
  shape[at::maybe_wrap_dim(dim, x.dim())] /= 2;
  Tensor y = at::empty(shape, x.options());
  launch(x.device(), "npu_swiglu", {y}, [dim, x = on_cpu(x), y = on_cpu(y)]() mutable {
    const auto halves = x.chunk(2, dim);
    y.copy_(at::silu(halves[0].to(at::kFloat)) * halves[1].to(at::kFloat));
  });
  return y;
}

void rotary_embedding(const Tensor& positions, const Tensor& q, const Tensor& k, int64_t head_size,
                      const Tensor& cos_sin, bool neox) {
  launch(q.device(), "npu_rotary_embedding", {q, k},
         [=, positions = on_cpu(positions), q = on_cpu(q), k = on_cpu(k), cos_sin = on_cpu(cos_sin)]() mutable {
           const auto rows = cos_sin.index_select(0, positions.to(at::kLong)).to(at::kFloat).chunk(2, -1);
           for (Tensor& tensor : std::vector<Tensor>{q, k}) {
             Tensor heads = tensor.view({tensor.size(0), -1, head_size});
             heads.copy_(rotate(heads.to(at::kFloat), rows[0].unsqueeze(1), rows[1].unsqueeze(1), neox));
           }
         });
}

void reshape_and_cache(const Tensor& k, const Tensor& v, const Tensor& k_cache, const Tensor& v_cache,
                       const Tensor& slots) {
  TORCH_CHECK(slots.numel() == k.size(0) && slots.scalar_type() == at::kInt,
              "reshape_and_cache takes one int32 slot per token");
  launch(k.device(), "npu_reshape_and_cache", {k, v},
         [k = on_cpu(k), v = on_cpu(v), k_cache = on_cpu(k_cache), v_cache = on_cpu(v_cache),
          slots = on_cpu(slots)]() mutable {
           const Tensor all = slots.to(at::kLong);
           const Tensor used = at::nonzero(all >= 0).squeeze(1);
           const Tensor chosen = all.index_select(0, used);
           const auto store = [&](const Tensor& tokens, Tensor& cache) {
             const Tensor rows = tokens.index_select(0, used).to(cache.scalar_type());
             // Not by a flat view: blocks of K and V may alternate in memory.
             const Tensor blocks = chosen.div(cache.size(1), "floor"), offsets = chosen.remainder(cache.size(1));
             cache.index_put_({blocks, offsets}, rows.reshape({-1, cache.size(2), cache.size(3)}));
           };
           store(k, k_cache);
           store(v, v_cache);
         });
}

void slot_mapping(int64_t requests, int64_t tokens, int64_t max_tokens, const Tensor& query_starts,
                  const Tensor& positions, const Tensor& block_table, int64_t block_size, const Tensor& slots,
                  int64_t padding) {
  launch(positions.device(), "slot_mapping", {slots},
         [=, starts = on_cpu(query_starts), positions = on_cpu(positions), table = on_cpu(block_table),
          slots = on_cpu(slots)]() mutable {
           slots.slice(0, tokens, max_tokens).fill_(padding);
           for (int64_t request = 0; request < requests; request++) {
             const auto begin = starts[request].item<int64_t>(), end = starts[request + 1].item<int64_t>();
             const Tensor at_positions = positions.slice(0, begin, end).to(at::kLong);
             const Tensor blocks = table[request].index_select(0, at_positions.div(block_size, "floor"));
             slots.slice(0, begin, end).copy_(blocks.to(at::kLong) * block_size + at_positions.remainder(block_size));
           }
         });
}

std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const std::optional<Tensor>& block_table, std::vector<int64_t> query_ends,
                                     std::vector<int64_t> key_lengths, int64_t heads, int64_t kv_heads, double scale,
                                     int64_t block_size, int64_t sparse_mode, int64_t pre_tokens) {
  const int64_t value_size = block_table ? v.size(-1) / kv_heads : v.size(-1);
  Tensor out = at::empty({q.size(0), heads, value_size}, q.options());
  Tensor lse = at::empty({q.size(0), heads, 1}, q.options().dtype(at::kFloat));
  launch(q.device(), "npu_fused_infer_attention_score", {out},
         [=, q = on_cpu(q), k = on_cpu(k), v = on_cpu(v), table = block_table ? on_cpu(*block_table) : Tensor(),
          out = on_cpu(out), lse = on_cpu(lse)]() mutable {
           out.zero_();
           lse.fill_(-INFINITY);
           int64_t query_begin = 0, key_begin = 0;
           for (size_t i = 0; i < query_ends.size(); i++) {
             const int64_t query_end = query_ends[i], queries = query_end - query_begin;
             int64_t keys;
             Tensor own_k, own_v;
             if (table.defined()) {
               keys = key_lengths[i];
               const Tensor blocks = table[i].slice(0, 0, (keys + block_size - 1) / block_size).to(at::kLong);
               const int64_t slots = blocks.numel() * block_size;
               own_k = k.index_select(0, blocks).reshape({slots, kv_heads, q.size(-1)}).slice(0, 0, keys);
               own_v = v.index_select(0, blocks).reshape({slots, kv_heads, value_size}).slice(0, 0, keys);
             } else {
               keys = key_lengths[i] - key_begin;
               own_k = k.slice(0, key_begin, key_lengths[i]).reshape({keys, kv_heads, q.size(-1)});
               own_v = v.slice(0, key_begin, key_lengths[i]).reshape({keys, kv_heads, value_size});
               key_begin = key_lengths[i];
             }
             if (queries > 0 && keys > 0) {
               const int64_t group = heads / kv_heads;
               own_k = own_k.to(at::kFloat).repeat_interleave(group, 1);
               own_v = own_v.to(at::kFloat).repeat_interleave(group, 1);
               const Tensor own_q = q.slice(0, query_begin, query_end).to(at::kFloat);
               Tensor scores = at::einsum("qhd,khd->hqk", {own_q, own_k}) * scale;
               // 2 to 4 are causal; 4 takes the last `pre_tokens` keys, vLLM's sliding window.
               if (sparse_mode >= 2 && sparse_mode <= 4) {
                 const Tensor row = at::arange(keys - queries, keys).unsqueeze(1);
                 const Tensor column = at::arange(keys).unsqueeze(0);
                 Tensor masked = column > row;
                 if (sparse_mode == 4) masked = masked | (column <= row - pre_tokens);
                 scores.masked_fill_(masked, -INFINITY);
               }
               lse.slice(0, query_begin, query_end).copy_(at::logsumexp(scores, {-1}).t().unsqueeze(-1));
               out.slice(0, query_begin, query_end).copy_(at::einsum("hqk,khd->qhd", {scores.softmax(-1), own_v}));
             }
             query_begin = query_end;
           }
         });
  return {out, lse};
}

}  // namespace cann_on_host
