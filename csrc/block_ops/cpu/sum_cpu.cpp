// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "../sum.h"

namespace vllm_ascend_pd {
namespace {

// Words and weights count modulo 2^64, so that signs do not matter beyond the extension of a word.
template <class Word>
uint64_t dot(const std::byte* row, const int64_t* weights, int64_t words) {
  uint64_t sum = 0;
  for (int64_t w = 0; w < words; ++w) {
    Word word;
    std::memcpy(&word, row + w * sizeof(Word), sizeof(Word));
    sum += static_cast<uint64_t>(static_cast<int64_t>(word)) * static_cast<uint64_t>(weights[w]);
  }
  return sum;
}

template <class Word>
void sum_units_of(const Sum& job, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const std::byte* row = job.cache.data + job.unit_offsets[n];
    int64_t* out = job.out + n * job.heads;
    std::fill(out, out + job.heads, 0);
    for (int64_t e = 0; e < job.entries; ++e) {
      const auto weight = static_cast<uint64_t>(job.entry_weights[n * job.entries + e]);
      for (int64_t h = 0; h < job.heads; ++h, row += job.row_bytes())
        out[h] = static_cast<int64_t>(static_cast<uint64_t>(out[h]) +
                                      dot<Word>(row, job.place_weights, job.words) * weight);
    }
  }
}

}  // namespace

void sum_steps(const Sum& job, int64_t begin, int64_t end) {
  if (job.word_bytes == 4) return sum_units_of<int32_t>(job, begin, end);
  if (job.word_bytes == 2) return sum_units_of<int16_t>(job, begin, end);
  sum_units_of<uint8_t>(job, begin, end);
}

void sum_steps(const Sum32& job, int64_t begin, int64_t end) {
  const int64_t padded = job.padded_words();
  const auto* places = reinterpret_cast<const uint32_t*>(job.place_weights);
  for (int64_t n = begin; n < end; ++n) {
    const std::byte* row = job.cache.data + job.unit_offsets[n];
    auto* out = reinterpret_cast<uint32_t*>(job.out) + 2 * n * job.heads;
    std::fill(out, out + 2 * job.heads, 0);
    for (int64_t e = 0; e < job.entries; ++e) {
      const auto* weights = reinterpret_cast<const uint32_t*>(job.entry_weights) + 2 * (n * job.entries + e);
      for (int64_t h = 0; h < job.heads; ++h, row += job.row_bytes()) {
        uint32_t sums[2] = {0, 0};
        for (int64_t w = 0; w < job.words; ++w) {
          uint32_t word;
          std::memcpy(&word, row + 4 * w, sizeof word);
          for (int k = 0; k < 2; ++k)
            sums[k] += (word & 0xffff) * places[2 * k * padded + w] + (word >> 16) * places[(2 * k + 1) * padded + w];
        }
        for (int k = 0; k < 2; ++k) out[2 * h + k] += sums[k] * weights[k];
      }
    }
  }
}

}  // namespace vllm_ascend_pd
