// SPDX-License-Identifier: Apache-2.0
//
// From checked jobs to tilings, on the host and without torch or CANN.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "../regroup.h"
#include "../sum.h"
#include "tiling.h"

namespace vllm_ascend_pd::npu {

struct Chip {
  int64_t vector_cores;
  int64_t unified_buffer_bytes;  // of each
};

template <class Tiling>
struct Launch {
  uint32_t cores;
  Tiling tiling;
};

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int64_t align_up(int64_t bytes) { return ceil_div(bytes, kAlignment) * kAlignment; }

// Below this a copy's fixed cost outweighs another core's help.
constexpr int64_t kMinTileBytes = 8 * 1024;

// Two tiles for each core where there is enough work, so that both buffers are in use, and as large as they
// may be where there is more.
inline Tiles plan_tiles(const Chip& chip, int64_t units, int64_t tokens, int64_t parts, int64_t row_bytes) {
  const int64_t buffer = std::min(kMaxTileBytes, chip.unified_buffer_bytes / kBuffers / kAlignment * kAlignment);
  const int64_t share = ceil_div(units * tokens * parts * row_bytes, chip.vector_cores * kBuffers);
  const int64_t target = std::min(buffer, std::max(kMinTileBytes, align_up(share)));

  Tiles tiles{};
  tiles.parts = parts;
  tiles.tokens = tokens;
  tiles.row_bytes = row_bytes;
  tiles.padded_row = align_up(row_bytes);
  tiles.buffer_bytes = buffer;
  tiles.tile_tokens = std::min(tokens, target / parts / tiles.padded_row);
  tiles.piece_bytes = std::min(row_bytes, target);
  tiles.pieces = ceil_div(row_bytes, tiles.piece_bytes);
  tiles.tiles_per_unit =
      tiles.tile_tokens > 0 ? ceil_div(tokens, tiles.tile_tokens) : tokens * parts * tiles.pieces;
  return tiles;
}

inline uint32_t cores_for(const Chip& chip, int64_t tiles) {
  return static_cast<uint32_t>(std::min(chip.vector_cores, tiles));
}

// The launch for the caches from `first` on, kMaxCaches of them at most.
inline Launch<SplitTiling> plan_split(const Chip& chip, const Split& job, int64_t first) {
  SplitTiling tiling{};
  tiling.num_caches = std::min(kMaxCaches, job.num_caches() - first);
  for (int64_t c = 0; c < tiling.num_caches; ++c) {
    tiling.caches[c] = reinterpret_cast<uint64_t>(job.caches[first + c].data);
    tiling.cache_bytes[c] = job.caches[first + c].bytes;
  }
  tiling.units = job.units;
  tiling.section_units = job.section_units;
  tiling.out_bytes = job.out_bytes;
  tiling.out_offset = job.out_offset + first * job.out_cache_stride;
  tiling.out_cache_stride = job.out_cache_stride;
  tiling.out_section_stride = job.out_section_stride;
  tiling.tiles = plan_tiles(chip, tiling.num_caches * job.units, job.tokens, job.splits, job.row_bytes);
  return {cores_for(chip, tiling.num_caches * job.units * tiling.tiles.tiles_per_unit), tiling};
}

inline Launch<InterleaveTiling> plan_interleave(const Chip& chip, const Interleave& job) {
  InterleaveTiling tiling{};
  tiling.src_bytes = job.src_bytes;
  tiling.src_offset = job.src_offset;
  tiling.src_rank_stride = job.src_rank_stride;
  tiling.out_bytes = job.out_bytes;
  tiling.out_offset = job.out_offset;
  tiling.tiles = plan_tiles(chip, /*units=*/1, job.tokens, job.ranks, job.row_bytes);
  return {cores_for(chip, tiling.tiles.tiles_per_unit), tiling};
}

// The launch for the jobs from `first` on, kMaxCaches of them at most. Their checksums follow each other.
inline Launch<SumTiling> plan_sum(const Chip& chip, const std::vector<Sum>& jobs, size_t first) {
  SumTiling tiling{};
  int64_t pairs = 0;
  for (size_t c = first; c < jobs.size() && tiling.num_caches < kMaxCaches; ++c) {
    const Sum& job = jobs[c];
    const int64_t tile_words = std::min(job.words, kSumTileBytes / job.word_bytes);
    const int64_t tile_row = align_up(tile_words * job.word_bytes);
    const int64_t tile_entries = tile_words < job.words ? 1 : std::min(job.entries, kSumTileBytes / tile_row);
    tiling.caches[tiling.num_caches++] = {reinterpret_cast<uint64_t>(job.cache.data),
                                          reinterpret_cast<uint64_t>(job.unit_offsets),
                                          reinterpret_cast<uint64_t>(job.entry_weights),
                                          reinterpret_cast<uint64_t>(job.place_weights),
                                          job.cache.bytes,
                                          job.units,
                                          job.entries,
                                          job.heads,
                                          job.words,
                                          job.word_bytes,
                                          tile_words,
                                          tile_entries,
                                          tile_row};
    pairs += job.units * job.heads;
  }
  tiling.out_bytes = pairs * static_cast<int64_t>(sizeof(int64_t));
  return {cores_for(chip, pairs), tiling};
}

// Twelve rows of accumulators, products and weights, and a tile with its upper halves, share the unified buffer.
inline Launch<Sum32Tiling> plan_sum(const Chip& chip, const std::vector<Sum32>& jobs, size_t first) {
  constexpr int64_t kRows = 12, kMaxPieceWords = 2048, kMaxTile = 16 * 1024, kLane = sizeof(int32_t);
  Sum32Tiling tiling{};
  tiling.piece_words = 8;
  while (2 * tiling.piece_words <= kMaxPieceWords && 4 * kRows * kLane * tiling.piece_words <= chip.unified_buffer_bytes)
    tiling.piece_words *= 2;
  const int64_t left = chip.unified_buffer_bytes - kRows * kLane * tiling.piece_words - kAlignment;
  tiling.tile_bytes = std::min(kMaxTile, left / 2 / kAlignment * kAlignment);
  int64_t pairs = 0;
  for (size_t c = first; c < jobs.size() && tiling.num_caches < kMaxCaches; ++c) {
    const Sum32& job = jobs[c];
    const int64_t tile_row = align_up(std::min(job.words, tiling.piece_words) * kLane);
    tiling.caches[tiling.num_caches++] = {reinterpret_cast<uint64_t>(job.cache.data),
                                          reinterpret_cast<uint64_t>(job.unit_offsets),
                                          reinterpret_cast<uint64_t>(job.entry_weights),
                                          reinterpret_cast<uint64_t>(job.place_weights),
                                          job.cache.bytes,
                                          job.units,
                                          job.entries,
                                          job.heads,
                                          job.words,
                                          std::min(job.entries, tiling.tile_bytes / tile_row)};
    pairs += job.units * job.heads;
  }
  tiling.out_bytes = pairs * 2 * kLane;
  return {cores_for(chip, pairs), tiling};
}

}  // namespace vllm_ascend_pd::npu
