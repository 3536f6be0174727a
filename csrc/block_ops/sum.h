// SPDX-License-Identifier: Apache-2.0
//
// Checksums of units of KV and the checks of their arguments, in plain bytes, for every device. What they are for:
// vllm_ascend_pd/core/checksum.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "regroup.h"

namespace vllm_ascend_pd {

// Units of one cache. A unit is [entries, heads, words] without gaps, and begins at its unit_offsets[n].
// For n < units and h < heads, modulo 2^64:
//   out[n * heads + h] = sum over e < entries and w < words of
//     unit[e, h, w] * entry_weights[n * entries + e] * place_weights[w]
// Words of 4 and 2 bytes are signed, those of 1 byte are not.
struct Sum {
  Cache cache;
  const int64_t* unit_offsets;
  const int64_t* entry_weights;
  const int64_t* place_weights;
  int64_t* out;
  int64_t units;
  int64_t entries;
  int64_t heads;
  int64_t words;
  int64_t word_bytes;

  int64_t row_bytes() const { return words * word_bytes; }
  int64_t unit_bytes() const { return entries * heads * row_bytes(); }
};

// Checksums of 32 bits, two of them, for vector units that have no 64-bit products. A unit is [entries, heads, words] of
// 4 bytes, whose halves count apart: in a sum modulo 2^32 of whole words, changes of the highest bits of two words would
// cancel out. For n < units, h < heads and k < 2, modulo 2^32:
//   out[n * heads + h][k] = sum over e < entries, w < words and half < 2 of
//     half-th 16 bits of unit[e, h, w] * entry_weights[n * entries + e][k] * place_weights[k][half][w]
// place_weights is [2, 2, padded_words()], 0 behind `words`.
struct Sum32 {
  Cache cache;
  const int64_t* unit_offsets;
  const int32_t* entry_weights;
  const int32_t* place_weights;
  int32_t* out;
  int64_t units;
  int64_t entries;
  int64_t heads;
  int64_t words;

  int64_t row_bytes() const { return words * 4; }
  int64_t unit_bytes() const { return entries * heads * row_bytes(); }
  int64_t padded_words() const { return (words + 7) / 8 * 8; }
};

void sum_steps(const Sum32& job, int64_t begin, int64_t end);

// CPU: takes the checksums of units [begin, end) of a checked job. Different units may be taken on different threads.
void sum_steps(const Sum& job, int64_t begin, int64_t end);

inline void check(const char* op, const Sum& job) {
  check_at_least(op, "heads", job.heads, 1);
  check_at_least(op, "entries", job.entries, 1);
  check_at_least(op, "words", job.words, 1);
  if (job.word_bytes != 1 && job.word_bytes != 2 && job.word_bytes != 4)
    throw std::invalid_argument(std::string(op) + ": word_bytes is " + std::to_string(job.word_bytes) +
                                ", must be 1, 2 or 4");
  const int64_t row = saturating_mul(job.words, job.word_bytes);
  check_at_most(op, "a unit's size", saturating_mul(saturating_mul(job.entries, job.heads), row), job.cache.bytes,
                "addressable bytes of cache");
}

inline void check(const char* op, const Sum32& job) {
  check_at_least(op, "heads", job.heads, 1);
  check_at_least(op, "entries", job.entries, 1);
  check_at_least(op, "words", job.words, 1);
  check_at_most(op, "a unit's size", saturating_mul(saturating_mul(job.entries, job.heads), job.row_bytes()),
                job.cache.bytes, "addressable bytes of cache");
}

// Only where unit_offsets lies in host memory.
template <class Job>
void check_unit_offsets(const char* op, const Job& job) {
  check_unit_offsets(op, job.unit_offsets, job.units, job.cache.bytes - job.unit_bytes());
}

}  // namespace vllm_ascend_pd
