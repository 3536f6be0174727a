// SPDX-License-Identifier: Apache-2.0
//
// The two copies behind the regroup ops and the checks of their arguments, in plain bytes: no torch here, so
// every device's implementation can share it. All offsets, strides and sizes are bytes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace vllm_ascend_pd {

// The memory of one cache tensor that units may lie in.
struct Cache {
  const std::byte* data;
  int64_t bytes;
};

// Paged caches -> sections of each, packed unit by unit, token by token. `split_heads` makes a section of each
// split of all units; `gather_units` is the same copy with one split and one "token", its row being the unit, and
// makes a section of every `section_units` units. For c < caches, k < splits, n < units, t < tokens:
//   out[out_offset + c * out_cache_stride + (k + n / section_units) * out_section_stride
//       + (n % section_units * tokens + t) * row_bytes :][:row_bytes]
//     = caches[c][unit_offsets[n] + (t * splits + k) * row_bytes :][:row_bytes]
struct Split {
  std::vector<Cache> caches;
  const int64_t* unit_offsets;
  int64_t units;
  int64_t section_units;  // all units, where there are several splits
  int64_t splits;
  int64_t tokens;
  int64_t row_bytes;
  std::byte* out;
  int64_t out_bytes;
  int64_t out_offset;
  int64_t out_cache_stride;
  int64_t out_section_stride;

  int64_t num_caches() const { return static_cast<int64_t>(caches.size()); }
  int64_t sections() const { return splits + (units - 1) / section_units; }

  // Independent pieces of work: one unit of one cache.
  int64_t steps() const { return num_caches() * units; }
  int64_t step_bytes() const { return splits * tokens * row_bytes; }
};

// Rank-major -> token-major (`interleave_heads`). For t < tokens, i < ranks:
//   out[out_offset + (t * ranks + i) * row_bytes :][:row_bytes]
//     = src[src_offset + i * src_rank_stride + t * row_bytes :][:row_bytes]
struct Interleave {
  const std::byte* src;
  int64_t src_bytes;
  int64_t src_offset;
  int64_t src_rank_stride;
  int64_t ranks;
  int64_t tokens;
  int64_t row_bytes;
  std::byte* out;
  int64_t out_bytes;
  int64_t out_offset;

  // Independent pieces of work: one token.
  int64_t steps() const { return tokens; }
  int64_t step_bytes() const { return ranks * row_bytes; }
};

// CPU: copies the steps [begin, end) of a checked job. Different steps may run on different threads.
void copy_steps(const Split& job, int64_t begin, int64_t end);
void copy_steps(const Interleave& job, int64_t begin, int64_t end);

// Checks. They throw std::invalid_argument (a ValueError in Python) that names op, argument, value and limit.

inline void check_at_least(const char* op, const std::string& argument, int64_t value, int64_t limit) {
  if (value < limit)
    throw std::invalid_argument(std::string(op) + ": " + argument + " is " + std::to_string(value) +
                                ", must be at least " + std::to_string(limit));
}

inline void check_at_most(const char* op, const std::string& argument, int64_t value, int64_t limit,
                          const char* limit_is) {
  if (value > limit)
    throw std::invalid_argument(std::string(op) + ": " + argument + " is " + std::to_string(value) +
                                ", must be at most " + std::to_string(limit) + " (" + limit_is + ")");
}

inline void check_disjoint(const char* op, const char* input, const void* data, int64_t bytes,
                           const std::byte* out, int64_t out_bytes) {
  const auto in_address = reinterpret_cast<uintptr_t>(data);
  const auto out_address = reinterpret_cast<uintptr_t>(out);
  if (in_address < out_address + out_bytes && out_address < in_address + bytes)
    throw std::invalid_argument(std::string(op) + ": out (" + std::to_string(out_bytes) +
                                " bytes) overlaps " + input + " (" + std::to_string(bytes) +
                                " bytes) in memory");
}

// Sum and product of non-negative sizes; a result that does not fit is larger than any limit.
inline int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

inline int64_t saturating_mul(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? std::numeric_limits<int64_t>::max() : product;
}

// The end of `count` sections that lie `stride` apart, the first one at `offset`.
inline int64_t sections_end(int64_t offset, int64_t count, int64_t stride, int64_t section) {
  return saturating_add(saturating_add(offset, saturating_mul(count - 1, stride)), section);
}

// Sections of all caches, `section` bytes each: one stride must step over all that the other one covers.
inline void check_sections_apart(const char* op, const Split& job, int64_t section) {
  if (job.num_caches() > 1) check_at_least(op, "out_cache_stride", job.out_cache_stride, section);
  if (job.sections() > 1) check_at_least(op, "out_section_stride", job.out_section_stride, section);
  if (job.num_caches() == 1 || job.sections() == 1) return;
  if (job.out_cache_stride < job.out_section_stride)
    check_at_least(op, "out_section_stride", job.out_section_stride,
                   sections_end(0, job.num_caches(), job.out_cache_stride, section));
  else
    check_at_least(op, "out_cache_stride", job.out_cache_stride,
                   sections_end(0, job.sections(), job.out_section_stride, section));
}

// Checks all but the values in unit_offsets, which may lie in a device's memory. False: there is nothing to
// copy.
inline bool check(const char* op, const Split& job) {
  check_at_least(op, "the number of caches", job.num_caches(), 1);
  check_at_least(op, "splits", job.splits, 1);
  check_at_least(op, "section_units", job.section_units, 1);
  check_at_least(op, "tokens", job.tokens, 0);
  check_at_least(op, "row_bytes", job.row_bytes, 1);
  check_at_least(op, "out_offset", job.out_offset, 0);
  check_at_least(op, "out_cache_stride", job.out_cache_stride, 0);
  check_at_least(op, "out_section_stride", job.out_section_stride, 0);
  if (job.units == 0 || job.tokens == 0) return false;

  // The last section may have fewer units; there is room for as many.
  const int64_t section_units = std::min(job.section_units, job.units);
  const int64_t section = saturating_mul(saturating_mul(section_units, job.tokens), job.row_bytes);
  check_sections_apart(op, job, section);
  const int64_t one_cache = sections_end(0, job.sections(), job.out_section_stride, section);
  check_at_most(op, "the end of the last section in out",
                sections_end(job.out_offset, job.num_caches(), job.out_cache_stride, one_cache), job.out_bytes,
                "bytes of out");
  const int64_t unit = job.step_bytes();
  for (const Cache& cache : job.caches) {
    check_at_most(op, "a unit's size", unit, cache.bytes, "addressable bytes of cache");
    check_disjoint(op, "cache", cache.data, cache.bytes, job.out, job.out_bytes);
  }
  return true;
}

// Only where unit_offsets lies in host memory. `last`: the largest that is allowed.
inline void check_unit_offsets(const char* op, const int64_t* unit_offsets, int64_t units, int64_t last) {
  for (int64_t n = 0; n < units; ++n) {
    const int64_t offset = unit_offsets[n];
    if (offset >= 0 && offset <= last) continue;
    const std::string argument = "unit_offsets[" + std::to_string(n) + "]";
    check_at_least(op, argument, offset, 0);
    check_at_most(op, argument, offset, last, "addressable bytes of cache less one unit");
  }
}

inline void check_unit_offsets(const char* op, const Split& job) {
  int64_t last = std::numeric_limits<int64_t>::max();
  for (const Cache& cache : job.caches) last = std::min(last, cache.bytes - job.step_bytes());
  check_unit_offsets(op, job.unit_offsets, job.units, last);
}

inline bool check(const char* op, const Interleave& job) {
  check_at_least(op, "src_offset", job.src_offset, 0);
  check_at_least(op, "src_rank_stride", job.src_rank_stride, 0);
  check_at_least(op, "out_offset", job.out_offset, 0);
  check_at_least(op, "ranks", job.ranks, 1);
  check_at_least(op, "tokens", job.tokens, 0);
  check_at_least(op, "row_bytes", job.row_bytes, 1);
  if (job.tokens == 0) return false;

  const int64_t section = saturating_mul(job.tokens, job.row_bytes);
  if (job.ranks > 1) check_at_least(op, "src_rank_stride", job.src_rank_stride, section);
  check_at_most(op, "the end of the last rank in src",
                sections_end(job.src_offset, job.ranks, job.src_rank_stride, section), job.src_bytes,
                "bytes of src");
  check_at_most(op, "the end of the last token in out",
                saturating_add(job.out_offset, saturating_mul(job.ranks, section)), job.out_bytes,
                "bytes of out");
  check_disjoint(op, "src", job.src, job.src_bytes, job.out, job.out_bytes);
  return true;
}

}  // namespace vllm_ascend_pd
