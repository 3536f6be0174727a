// SPDX-License-Identifier: Apache-2.0
//
// From the ops' tensors to checked jobs in plain bytes, the same for every device. What is wrong with an
// argument is a ValueError in Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <optional>

#include "regroup.h"
#include "sum.h"

namespace vllm_ascend_pd {

// From data_ptr to the end of the farthest element: more than nbytes() when blocks lie apart.
inline int64_t addressable_bytes(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return (last + 1) * static_cast<int64_t>(tensor.itemsize());
}

inline void check_contiguous(const char* op, const char* argument, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_contiguous(), op, ": ", argument, " has shape ", tensor.sizes(),
                    " and strides ", tensor.strides(), ", must be contiguous");
}

inline void check_device(const char* op, const char* argument, const at::Tensor& tensor,
                         const at::Tensor& out) {
  TORCH_CHECK_VALUE(tensor.device() == out.device(), op, ": ", argument, " is on ", tensor.device(),
                    ", must be on ", out.device(), " as out is");
}

// The memory of a cache on the device of `out`.
inline Cache checked_cache(const char* op, const at::Tensor& cache, const at::Tensor& out) {
  check_device(op, "cache", cache, out);
  return {static_cast<const std::byte*>(cache.const_data_ptr()), addressable_bytes(cache)};
}

// A tensor of int64 on the device of `out`.
inline const int64_t* checked_words(const char* op, const char* argument, const at::Tensor& tensor, int64_t dimensions,
                                    const at::Tensor& out) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kLong && tensor.dim() == dimensions, op, ": ", argument, " is a ",
                    tensor.dim(), "-d tensor of ", tensor.scalar_type(), ", must be ", dimensions, "-d of Long");
  check_contiguous(op, argument, tensor);
  check_device(op, argument, tensor, out);
  return static_cast<const int64_t*>(tensor.const_data_ptr());
}

// Nothing: there is nothing to copy. Offsets in a device's memory are not looked at.
inline std::optional<Split> checked_split(const char* op, at::TensorList caches,
                                          const at::Tensor& unit_offsets, int64_t section_units,
                                          int64_t splits, int64_t tokens, int64_t row_bytes,
                                          const at::Tensor& out, int64_t out_offset,
                                          int64_t out_cache_stride, int64_t out_section_stride) {
  check_contiguous(op, "out", out);
  Split job{{},
            checked_words(op, "unit_offsets", unit_offsets, 1, out),
            unit_offsets.numel(),
            section_units,
            splits,
            tokens,
            row_bytes,
            static_cast<std::byte*>(out.mutable_data_ptr()),
            static_cast<int64_t>(out.nbytes()),
            out_offset,
            out_cache_stride,
            out_section_stride};
  for (const at::Tensor& cache : caches) job.caches.push_back(checked_cache(op, cache, out));
  if (!check(op, job)) return std::nullopt;
  check_disjoint(op, "unit_offsets", unit_offsets.const_data_ptr(), unit_offsets.nbytes(), job.out,
                 job.out_bytes);
  if (unit_offsets.is_cpu()) check_unit_offsets(op, job);
  return job;
}

inline std::optional<Split> checked_split_heads(at::TensorList caches, const at::Tensor& unit_offsets,
                                                int64_t splits, int64_t tokens, int64_t row_bytes,
                                                const at::Tensor& out, int64_t out_offset,
                                                int64_t out_cache_stride, int64_t out_section_stride) {
  return checked_split("split_heads", caches, unit_offsets, /*section_units=*/std::max<int64_t>(unit_offsets.numel(), 1),
                       splits, tokens, row_bytes, out, out_offset, out_cache_stride, out_section_stride);
}

inline std::optional<Split> checked_gather_units(at::TensorList caches, const at::Tensor& unit_offsets,
                                                 int64_t unit_bytes, int64_t section_units,
                                                 const at::Tensor& out, int64_t out_offset,
                                                 int64_t out_cache_stride, int64_t out_section_stride) {
  check_at_least("gather_units", "unit_bytes", unit_bytes, 1);
  return checked_split("gather_units", caches, unit_offsets, section_units, /*splits=*/1, /*tokens=*/1,
                       unit_bytes, out, out_offset, out_cache_stride, out_section_stride);
}

inline std::optional<Interleave> checked_interleave(const at::Tensor& src, int64_t src_offset,
                                                    int64_t src_rank_stride, const at::Tensor& out,
                                                    int64_t out_offset, int64_t ranks, int64_t tokens,
                                                    int64_t row_bytes) {
  const char* op = "interleave_heads";
  check_contiguous(op, "src", src);
  check_contiguous(op, "out", out);
  check_device(op, "src", src, out);
  const Interleave job{static_cast<const std::byte*>(src.const_data_ptr()),
                       static_cast<int64_t>(src.nbytes()),
                       src_offset,
                       src_rank_stride,
                       ranks,
                       tokens,
                       row_bytes,
                       static_cast<std::byte*>(out.mutable_data_ptr()),
                       static_cast<int64_t>(out.nbytes()),
                       out_offset};
  if (!check(op, job)) return std::nullopt;
  return job;
}

inline std::vector<Sum> checked_sums(at::TensorList caches, at::TensorList unit_offsets, at::TensorList entry_weights,
                                     at::TensorList place_weights, at::IntArrayRef heads, at::IntArrayRef word_bytes,
                                     const at::Tensor& out) {
  const char* op = "sum_units";
  for (const size_t count : {unit_offsets.size(), entry_weights.size(), place_weights.size(), heads.size(),
                             word_bytes.size()})
    TORCH_CHECK_VALUE(count == caches.size(), op, ": there are ", caches.size(), " caches and ", count,
                      " of an argument that has one for each");
  checked_words(op, "out", out, 1, out);
  auto* to = static_cast<int64_t*>(out.mutable_data_ptr());
  int64_t left = out.numel();
  std::vector<Sum> jobs;
  for (size_t c = 0; c < caches.size(); ++c) {
    const Cache cache = checked_cache(op, caches[c], out);
    const int64_t* offsets = checked_words(op, "unit_offsets", unit_offsets[c], 1, out);
    const int64_t* entries = checked_words(op, "entry_weights", entry_weights[c], 2, out);
    const int64_t* places = checked_words(op, "place_weights", place_weights[c], 1, out);
    const int64_t units = unit_offsets[c].numel();
    TORCH_CHECK_VALUE(entry_weights[c].size(0) == units, op, ": entry_weights are of ", entry_weights[c].size(0),
                      " units, must be of ", units);
    const Sum job{cache,
                  offsets,
                  entries,
                  places,
                  to,
                  units,
                  entry_weights[c].size(1),
                  heads[c],
                  place_weights[c].numel(),
                  word_bytes[c]};
    check(op, job);
    if (unit_offsets[c].is_cpu()) check_unit_offsets(op, job);
    const int64_t sums = saturating_mul(units, job.heads);
    check_at_most(op, "the number of checksums", sums, left, "words that are left of out");
    check_disjoint(op, "cache", job.cache.data, job.cache.bytes, static_cast<std::byte*>(out.mutable_data_ptr()),
                   static_cast<int64_t>(out.nbytes()));
    to += sums;
    left -= sums;
    if (units > 0) jobs.push_back(job);
  }
  return jobs;
}

// A tensor of int32 of this shape on the device of `out`.
inline const int32_t* checked_lanes(const char* op, const char* argument, const at::Tensor& tensor,
                                    at::IntArrayRef shape, const at::Tensor& out) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kInt && tensor.sizes() == shape, op, ": ", argument, " is of ",
                    tensor.scalar_type(), " and shape ", tensor.sizes(), ", must be of Int and shape ", shape);
  check_contiguous(op, argument, tensor);
  check_device(op, argument, tensor, out);
  return static_cast<const int32_t*>(tensor.const_data_ptr());
}

inline std::vector<Sum32> checked_sums_32(at::TensorList caches, at::TensorList unit_offsets,
                                          at::TensorList entry_weights, at::TensorList place_weights,
                                          at::IntArrayRef heads, at::IntArrayRef words, const at::Tensor& out) {
  const char* op = "sum_units_32";
  for (const size_t count :
       {unit_offsets.size(), entry_weights.size(), place_weights.size(), heads.size(), words.size()})
    TORCH_CHECK_VALUE(count == caches.size(), op, ": there are ", caches.size(), " caches and ", count,
                      " of an argument that has one for each");
  checked_lanes(op, "out", out, {out.numel()}, out);
  auto* to = static_cast<int32_t*>(out.mutable_data_ptr());
  int64_t left = out.numel();
  std::vector<Sum32> jobs;
  for (size_t c = 0; c < caches.size(); ++c) {
    const int64_t units = unit_offsets[c].numel(), entries = entry_weights[c].dim() > 1 ? entry_weights[c].size(1) : 0;
    Sum32 job{checked_cache(op, caches[c], out),
              checked_words(op, "unit_offsets", unit_offsets[c], 1, out),
              nullptr,
              nullptr,
              to,
              units,
              entries,
              heads[c],
              words[c]};
    check(op, job);
    job.entry_weights = checked_lanes(op, "entry_weights", entry_weights[c], {units, entries, 2}, out);
    job.place_weights = checked_lanes(op, "place_weights", place_weights[c], {2, 2, job.padded_words()}, out);
    if (unit_offsets[c].is_cpu()) check_unit_offsets(op, job);
    const int64_t sums = saturating_mul(saturating_mul(units, job.heads), 2);
    check_at_most(op, "the number of checksums", sums, left, "numbers that are left of out");
    check_disjoint(op, "cache", job.cache.data, job.cache.bytes, reinterpret_cast<std::byte*>(out.mutable_data_ptr()),
                   static_cast<int64_t>(out.nbytes()));
    to += sums;
    left -= sums;
    if (units > 0) jobs.push_back(job);
  }
  return jobs;
}

}  // namespace vllm_ascend_pd
