// SPDX-License-Identifier: Apache-2.0
//
// The block ops as torch.ops.vllm_ascend_pd.*: schemas, and their CPU and Meta implementations. Another
// device adds a file with its own TORCH_LIBRARY_IMPL. torch releases the GIL around every op that Python
// calls.
#include <ATen/Parallel.h>
#include <Python.h>
#include <torch/library.h>

#include <algorithm>

#include "arguments.h"
#include "regroup.h"

namespace vllm_ascend_pd {
namespace {

// Fewer bytes than this are not worth waking another thread for.
constexpr int64_t kBytesPerThread = 256 * 1024;

template <class Job>
void run(const std::optional<Job>& job) {
  if (!job) return;
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / job->step_bytes());
  at::parallel_for(0, job->steps(), grain, [&](int64_t begin, int64_t end) { copy_steps(*job, begin, end); });
}

void gather_units(at::TensorList caches, const at::Tensor& unit_offsets, int64_t unit_bytes,
                  int64_t section_units, at::Tensor& out, int64_t out_offset, int64_t out_cache_stride,
                  int64_t out_section_stride) {
  run(checked_gather_units(caches, unit_offsets, unit_bytes, section_units, out, out_offset, out_cache_stride,
                           out_section_stride));
}

void split_heads(at::TensorList caches, const at::Tensor& unit_offsets, int64_t splits, int64_t tokens,
                 int64_t row_bytes, at::Tensor& out, int64_t out_offset, int64_t out_cache_stride,
                 int64_t out_section_stride) {
  run(checked_split_heads(caches, unit_offsets, splits, tokens, row_bytes, out, out_offset, out_cache_stride,
                          out_section_stride));
}

void interleave_heads(const at::Tensor& src, int64_t src_offset, int64_t src_rank_stride, at::Tensor& out,
                      int64_t out_offset, int64_t ranks, int64_t tokens, int64_t row_bytes) {
  run(checked_interleave(src, src_offset, src_rank_stride, out, out_offset, ranks, tokens, row_bytes));
}

void sum_units(at::TensorList caches, at::TensorList unit_offsets, at::TensorList entry_weights,
               at::TensorList place_weights, at::IntArrayRef heads, at::IntArrayRef word_bytes, at::Tensor& out) {
  for (const Sum& job : checked_sums(caches, unit_offsets, entry_weights, place_weights, heads, word_bytes, out)) {
    const int64_t grain = std::max<int64_t>(1, kBytesPerThread / job.unit_bytes());
    at::parallel_for(0, job.units, grain, [&](int64_t begin, int64_t end) { sum_steps(job, begin, end); });
  }
}

void sum_units_32(at::TensorList caches, at::TensorList unit_offsets, at::TensorList entry_weights,
                  at::TensorList place_weights, at::IntArrayRef heads, at::IntArrayRef words, at::Tensor& out) {
  for (const Sum32& job : checked_sums_32(caches, unit_offsets, entry_weights, place_weights, heads, words, out)) {
    const int64_t grain = std::max<int64_t>(1, kBytesPerThread / job.unit_bytes());
    at::parallel_for(0, job.units, grain, [&](int64_t begin, int64_t end) { sum_steps(job, begin, end); });
  }
}

// The checks alone, for implementations in Python: is there anything to copy?
bool check_gather(at::TensorList caches, const at::Tensor& unit_offsets, int64_t unit_bytes,
                  int64_t section_units, const at::Tensor& out, int64_t out_offset, int64_t out_cache_stride,
                  int64_t out_section_stride) {
  return checked_gather_units(caches, unit_offsets, unit_bytes, section_units, out, out_offset,
                              out_cache_stride, out_section_stride)
      .has_value();
}

bool check_split(at::TensorList caches, const at::Tensor& unit_offsets, int64_t splits, int64_t tokens,
                 int64_t row_bytes, const at::Tensor& out, int64_t out_offset, int64_t out_cache_stride,
                 int64_t out_section_stride) {
  return checked_split_heads(caches, unit_offsets, splits, tokens, row_bytes, out, out_offset,
                             out_cache_stride, out_section_stride)
      .has_value();
}

bool check_interleave(const at::Tensor& src, int64_t src_offset, int64_t src_rank_stride,
                      const at::Tensor& out, int64_t out_offset, int64_t ranks, int64_t tokens,
                      int64_t row_bytes) {
  return checked_interleave(src, src_offset, src_rank_stride, out, out_offset, ranks, tokens, row_bytes)
      .has_value();
}

void check_sums(at::TensorList caches, at::TensorList unit_offsets, at::TensorList entry_weights,
                at::TensorList place_weights, at::IntArrayRef heads, at::IntArrayRef word_bytes, const at::Tensor& out) {
  checked_sums(caches, unit_offsets, entry_weights, place_weights, heads, word_bytes, out);
}

void check_sums_32(at::TensorList caches, at::TensorList unit_offsets, at::TensorList entry_weights,
                at::TensorList place_weights, at::IntArrayRef heads, at::IntArrayRef words, const at::Tensor& out) {
  checked_sums_32(caches, unit_offsets, entry_weights, place_weights, heads, words, out);
}

// For tracing: the ops return nothing and change no shape.
template <class... Args>
auto no_op(void (*)(Args...)) {
  return +[](Args...) {};
}

TORCH_LIBRARY(vllm_ascend_pd, m) {
  m.def(
      "gather_units(Tensor[] caches, Tensor unit_offsets, int unit_bytes, int section_units, "
      "Tensor(a!) out, int out_offset, int out_cache_stride, int out_section_stride) -> ()");
  m.def(
      "split_heads(Tensor[] caches, Tensor unit_offsets, int splits, int tokens, int row_bytes, "
      "Tensor(a!) out, int out_offset, int out_cache_stride, int out_section_stride) -> ()");
  m.def(
      "interleave_heads(Tensor src, int src_offset, int src_rank_stride, Tensor(a!) out, int out_offset, "
      "int ranks, int tokens, int row_bytes) -> ()");
  m.def(
      "sum_units(Tensor[] caches, Tensor[] unit_offsets, Tensor[] entry_weights, Tensor[] place_weights, int[] heads, "
      "int[] word_bytes, Tensor(a!) out) -> ()");
  m.def(
      "sum_units_32(Tensor[] caches, Tensor[] unit_offsets, Tensor[] entry_weights, Tensor[] place_weights, "
      "int[] heads, int[] words, Tensor(a!) out) -> ()");
  m.def(
      "check_gather_units(Tensor[] caches, Tensor unit_offsets, int unit_bytes, int section_units, "
      "Tensor out, int out_offset, int out_cache_stride, int out_section_stride) -> bool");
  m.def(
      "check_split_heads(Tensor[] caches, Tensor unit_offsets, int splits, int tokens, int row_bytes, "
      "Tensor out, int out_offset, int out_cache_stride, int out_section_stride) -> bool");
  m.def(
      "check_interleave_heads(Tensor src, int src_offset, int src_rank_stride, Tensor out, int out_offset, "
      "int ranks, int tokens, int row_bytes) -> bool");
  m.def(
      "check_sum_units(Tensor[] caches, Tensor[] unit_offsets, Tensor[] entry_weights, Tensor[] place_weights, "
      "int[] heads, int[] word_bytes, Tensor out) -> ()");
  m.def(
      "check_sum_units_32(Tensor[] caches, Tensor[] unit_offsets, Tensor[] entry_weights, Tensor[] place_weights, "
      "int[] heads, int[] words, Tensor out) -> ()");
}

TORCH_LIBRARY_IMPL(vllm_ascend_pd, CPU, m) {
  m.impl("gather_units", gather_units);
  m.impl("split_heads", split_heads);
  m.impl("interleave_heads", interleave_heads);
  m.impl("sum_units", sum_units);
  m.impl("sum_units_32", sum_units_32);
}

TORCH_LIBRARY_IMPL(vllm_ascend_pd, Meta, m) {
  m.impl("gather_units", no_op(gather_units));
  m.impl("split_heads", no_op(split_heads));
  m.impl("interleave_heads", no_op(interleave_heads));
  m.impl("sum_units", no_op(sum_units));
  m.impl("sum_units_32", no_op(sum_units_32));
}

TORCH_LIBRARY_IMPL(vllm_ascend_pd, CompositeExplicitAutograd, m) {
  m.impl("check_gather_units", check_gather);
  m.impl("check_split_heads", check_split);
  m.impl("check_interleave_heads", check_interleave);
  m.impl("check_sum_units", check_sums);
  m.impl("check_sum_units_32", check_sums_32);
}

}  // namespace
}  // namespace vllm_ascend_pd

// `import vllm_ascend_pd._C` runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
