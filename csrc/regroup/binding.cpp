// SPDX-License-Identifier: Apache-2.0
//
// The regroup ops as torch.ops.vllm_ascend_pd.*: schemas, and their CPU and Meta implementations. Another
// device adds a file with its own TORCH_LIBRARY_IMPL. torch releases the GIL around every op that Python
// calls.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/library.h>

#include <algorithm>

#include "regroup.h"

namespace vllm_ascend_pd {
namespace {

// Fewer bytes than this are not worth waking another thread for.
constexpr int64_t kBytesPerThread = 256 * 1024;

template <class Job>
void run(const Job& job) {
  const int64_t grain = std::max<int64_t>(1, kBytesPerThread / job.step_bytes());
  at::parallel_for(0, job.steps(), grain, [&](int64_t begin, int64_t end) { copy_steps(job, begin, end); });
}

// From data_ptr to the end of the farthest element: more than nbytes() when blocks lie apart.
int64_t addressable_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * tensor.itemsize();
}

const std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<const std::byte*>(tensor.const_data_ptr());
}

void check_contiguous(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", argument, " has shape ", tensor.sizes(),
                    " and strides ", tensor.strides(), ", must be contiguous");
}

void run_split(const char* op, const at::Tensor& cache, const at::Tensor& unit_offsets, int64_t splits,
               int64_t tokens, int64_t row_bytes, at::Tensor& out, int64_t out_offset,
               int64_t out_split_stride) {
  TORCH_CHECK_VALUE(unit_offsets.scalar_type() == at::kLong && unit_offsets.dim() == 1, op,
                    ": unit_offsets is a ", unit_offsets.dim(), "-d tensor of ", unit_offsets.scalar_type(),
                    ", must be 1-d of Long");
  check_contiguous(op, "unit_offsets", unit_offsets);
  check_contiguous(op, "out", out);
  const Split job{bytes_of(cache),
                  addressable_bytes(cache),
                  unit_offsets.const_data_ptr<int64_t>(),
                  unit_offsets.numel(),
                  splits,
                  tokens,
                  row_bytes,
                  static_cast<std::byte*>(out.mutable_data_ptr()),
                  static_cast<int64_t>(out.nbytes()),
                  out_offset,
                  out_split_stride};
  if (!check(op, job)) return;
  check_disjoint(op, "unit_offsets", unit_offsets.const_data_ptr(), unit_offsets.nbytes(), job.out,
                 job.out_bytes);
  check_unit_offsets(op, job);
  run(job);
}

void gather_slices(const at::Tensor& cache, const at::Tensor& unit_offsets, int64_t splits,
                   int64_t slice_bytes, at::Tensor& out, int64_t out_offset, int64_t out_split_stride) {
  check_at_least("gather_slices", "slice_bytes", slice_bytes, 1);
  run_split("gather_slices", cache, unit_offsets, splits, /*tokens=*/1, slice_bytes, out, out_offset,
            out_split_stride);
}

void split_heads(const at::Tensor& cache, const at::Tensor& unit_offsets, int64_t splits, int64_t tokens,
                 int64_t row_bytes, at::Tensor& out, int64_t out_offset, int64_t out_split_stride) {
  run_split("split_heads", cache, unit_offsets, splits, tokens, row_bytes, out, out_offset, out_split_stride);
}

void interleave_heads(const at::Tensor& src, int64_t src_offset, int64_t src_rank_stride, at::Tensor& out,
                      int64_t out_offset, int64_t ranks, int64_t tokens, int64_t row_bytes) {
  const char* op = "interleave_heads";
  check_contiguous(op, "src", src);
  check_contiguous(op, "out", out);
  const Interleave job{bytes_of(src),
                       static_cast<int64_t>(src.nbytes()),
                       src_offset,
                       src_rank_stride,
                       ranks,
                       tokens,
                       row_bytes,
                       static_cast<std::byte*>(out.mutable_data_ptr()),
                       static_cast<int64_t>(out.nbytes()),
                       out_offset};
  if (check(op, job)) run(job);
}

// For tracing: the ops return nothing and change no shape.
template <class... Args>
auto no_op(void (*)(Args...)) {
  return +[](Args...) {};
}

TORCH_LIBRARY(vllm_ascend_pd, m) {
  m.def(
      "gather_slices(Tensor cache, Tensor unit_offsets, int splits, int slice_bytes, Tensor(a!) out, "
      "int out_offset, int out_split_stride) -> ()");
  m.def(
      "interleave_heads(Tensor src, int src_offset, int src_rank_stride, Tensor(a!) out, int out_offset, "
      "int ranks, int tokens, int row_bytes) -> ()");
  m.def(
      "split_heads(Tensor cache, Tensor unit_offsets, int splits, int tokens, int row_bytes, Tensor(a!) out, "
      "int out_offset, int out_split_stride) -> ()");
}

TORCH_LIBRARY_IMPL(vllm_ascend_pd, CPU, m) {
  m.impl("gather_slices", gather_slices);
  m.impl("interleave_heads", interleave_heads);
  m.impl("split_heads", split_heads);
}

TORCH_LIBRARY_IMPL(vllm_ascend_pd, Meta, m) {
  m.impl("gather_slices", no_op(gather_slices));
  m.impl("interleave_heads", no_op(interleave_heads));
  m.impl("split_heads", no_op(split_heads));
}

}  // namespace
}  // namespace vllm_ascend_pd

// `import vllm_ascend_pd._C` runs the registrations above; the module itself is empty.
PyMODINIT_FUNC PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
