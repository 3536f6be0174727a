// SPDX-License-Identifier: Apache-2.0
//
// The twin for ctypes. Every function returns its error, or nullptr.
#include "faults.h"
#include "run.h"

namespace {

template <class Body>
const char* error_of(const Body& body) {
  thread_local std::string error;
  try {
    body();
    return nullptr;
  } catch (const std::exception& exception) {
    error = exception.what();
    return error.c_str();
  }
}

}  // namespace

extern "C" const char* twin_split(int64_t cores, int64_t unified_buffer_bytes, int64_t num_caches,
                                  const std::byte* const* caches, const int64_t* cache_bytes,
                                  const int64_t* unit_offsets, int64_t units, int64_t section_units,
                                  int64_t splits, int64_t tokens,
                                  int64_t row_bytes, std::byte* out, int64_t out_bytes, int64_t out_offset,
                                  int64_t out_cache_stride, int64_t out_section_stride, int64_t* launches) {
  return error_of([&] {
    twin::Split job{{},  unit_offsets, units,      section_units,    splits, tokens, row_bytes,
                    out, out_bytes,    out_offset, out_cache_stride, out_section_stride};
    for (int64_t c = 0; c < num_caches; ++c) job.caches.push_back({caches[c], cache_bytes[c]});
    *launches = twin::run({cores, unified_buffer_bytes}, job);
  });
}

extern "C" const char* twin_interleave(int64_t cores, int64_t unified_buffer_bytes, const std::byte* src,
                                       int64_t src_bytes, int64_t src_offset, int64_t src_rank_stride,
                                       int64_t ranks, int64_t tokens, int64_t row_bytes, std::byte* out,
                                       int64_t out_bytes, int64_t out_offset, int64_t* launches) {
  return error_of([&] {
    *launches = twin::run({cores, unified_buffer_bytes}, twin::Interleave{src, src_bytes, src_offset, src_rank_stride,
                                                                          ranks, tokens, row_bytes, out, out_bytes,
                                                                          out_offset});
  });
}

// `shapes`: units, entries, heads, words and the bytes of a word of each cache.
extern "C" const char* twin_sum(int64_t cores, int64_t unified_buffer_bytes, int64_t num_caches,
                                const std::byte* const* caches, const int64_t* cache_bytes,
                                const int64_t* const* unit_offsets, const int64_t* const* entry_weights,
                                const int64_t* const* place_weights, const int64_t* shapes, int64_t* out,
                                int64_t* launches) {
  return error_of([&] {
    std::vector<twin::Sum> jobs;
    for (int64_t c = 0; c < num_caches; ++c, shapes += 5) {
      jobs.push_back({{caches[c], cache_bytes[c]}, unit_offsets[c], entry_weights[c], place_weights[c], out, shapes[0],
                      shapes[1], shapes[2], shapes[3], shapes[4]});
      out += shapes[0] * shapes[2];
    }
    *launches = twin::run({cores, unified_buffer_bytes}, jobs);
  });
}

// `shapes`: units, entries, heads and words of each cache.
extern "C" const char* twin_sum32(int64_t cores, int64_t unified_buffer_bytes, int64_t num_caches,
                                  const std::byte* const* caches, const int64_t* cache_bytes,
                                  const int64_t* const* unit_offsets, const int32_t* const* entry_weights,
                                  const int32_t* const* place_weights, const int64_t* shapes, int32_t* out,
                                  int64_t* launches) {
  return error_of([&] {
    std::vector<twin::Sum32> jobs;
    for (int64_t c = 0; c < num_caches; ++c, shapes += 4) {
      jobs.push_back({{caches[c], cache_bytes[c]}, unit_offsets[c], entry_weights[c], place_weights[c], out, shapes[0],
                      shapes[1], shapes[2], shapes[3]});
      out += 2 * shapes[0] * shapes[2];
    }
    *launches = twin::run({cores, unified_buffer_bytes}, jobs);
  });
}

// Accesses of single values, vector instructions and their repeats since the last call.
extern "C" void twin_take_counts(int64_t* counts) {
  counts[0] = AscendC::twin::scalar_accesses.exchange(0);
  counts[1] = AscendC::twin::vector_instructions.exchange(0);
  counts[2] = AscendC::twin::vector_repeats.exchange(0);
}

extern "C" const char* twin_fault(const char* name) {
  return error_of([&] { twin::run_fault(name); });
}
