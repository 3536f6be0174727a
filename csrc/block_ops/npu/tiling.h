// SPDX-License-Identifier: Apache-2.0
//
// What the host tells a kernel: plain structs, passed by value. All offsets, strides and sizes are bytes.
#pragma once

#include <cstdint>

namespace vllm_ascend_pd::npu {

// One tile is read while the one before it is written.
constexpr uint32_t kBuffers = 2;

// The unified buffer's grain: rows in it begin at multiples of this.
constexpr int64_t kAlignment = 32;

// Longer copies are not faster, and shorter ones spread better over the cores. Also keeps a tile's rows below
// DataCopyPad's limit of 4095, since a row takes 32 bytes or more.
constexpr int64_t kMaxTileBytes = 64 * 1024;
static_assert(kMaxTileBytes / kAlignment <= 4095);

// More caches take more launches.
constexpr int64_t kMaxCaches = 8;

// How rows are cut into tiles. `parts` rows, one per split or rank, make a token; `tokens` make a unit (all
// tokens, where ranks are interleaved). A tile is `tile_tokens` whole tokens, or, where that is 0, up to
// `piece_bytes` of one row.
struct Tiles {
  int64_t parts;
  int64_t tokens;
  int64_t row_bytes;
  int64_t padded_row;  // what a row takes in the unified buffer
  int64_t tile_tokens;
  int64_t piece_bytes;
  int64_t pieces;  // of one row
  int64_t tiles_per_unit;
  int64_t buffer_bytes;  // of each of kBuffers
};

// See Split in regroup.h.
struct SplitTiling {
  uint64_t caches[kMaxCaches];  // addresses
  int64_t cache_bytes[kMaxCaches];
  int64_t num_caches;
  int64_t units;
  int64_t section_units;
  int64_t out_bytes;
  int64_t out_offset;
  int64_t out_cache_stride;
  int64_t out_section_stride;
  Tiles tiles;
};

// See Interleave in regroup.h.
struct InterleaveTiling {
  int64_t src_bytes;
  int64_t src_offset;
  int64_t src_rank_stride;
  int64_t out_bytes;
  int64_t out_offset;
  Tiles tiles;
};

// What a tile of checksums has at most. It is read at once and added up word by word.
constexpr int64_t kSumTileBytes = 32 * 1024;

// See Sum in sum.h: addresses, and how a unit is cut into tiles.
struct SumOfCache {
  uint64_t cache;
  uint64_t unit_offsets;
  uint64_t entry_weights;
  uint64_t place_weights;
  int64_t cache_bytes;
  int64_t units;
  int64_t entries;
  int64_t heads;
  int64_t words;
  int64_t word_bytes;
  int64_t tile_words;    // of one entry and head
  int64_t tile_entries;  // more than one where tile_words are all
  int64_t tile_row;      // what an entry takes in the unified buffer
};

struct SumTiling {
  SumOfCache caches[kMaxCaches];
  int64_t num_caches;
  int64_t out_bytes;
};

// See Sum32 in sum.h. Words and lanes are of 4 bytes.
struct Sum32OfCache {
  uint64_t cache;
  uint64_t unit_offsets;
  uint64_t entry_weights;
  uint64_t place_weights;
  int64_t cache_bytes;
  int64_t units;
  int64_t entries;
  int64_t heads;
  int64_t words;
  int64_t tile_entries;  // rows, or parts of rows of piece_words, that are read at once
};

struct Sum32Tiling {
  Sum32OfCache caches[kMaxCaches];
  int64_t num_caches;
  int64_t out_bytes;
  int64_t tile_bytes;
  int64_t piece_words;  // a power of two: words of a row that are summed together at most
};

}  // namespace vllm_ascend_pd::npu
