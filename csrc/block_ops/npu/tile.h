// SPDX-License-Identifier: Apache-2.0
//
// What the kernels have in common: the walk over tiles, and tiles in the unified buffer.
//
// A tile of whole tokens lies there as [tokens, parts, padded_row]. Rows that are not a multiple of 32 bytes
// are padded: DataCopyPad fills up each row that it reads and leaves out the filling where it writes.
#pragma once

#include "kernel_operator.h"
#include "tiling.h"

// What makes a kernel one for vector cores. asc-devkit 9.1 finds no type by itself for several kernels in one unit or
// for scalar ones, and takes it from the declaration. ascendc_library, of CANN before it, takes it from the body.
#ifdef VLLM_ASCEND_PD_ASC
#define VECTOR_KERNEL __vector__
#define VECTOR_KERNEL_BODY
#else
#define VECTOR_KERNEL
#define VECTOR_KERNEL_BODY KERNEL_TASK_TYPE_DEFAULT(KERNEL_TYPE_AIV_ONLY);
#endif

namespace vllm_ascend_pd::npu {

using Bytes = AscendC::GlobalTensor<uint8_t>;
using Tile = AscendC::LocalTensor<uint8_t>;
using Words = AscendC::GlobalTensor<int64_t>;

// EnQue and DeQue of a bound queue order the reading of a tile before its writing, and FreeTensor and
// AllocTensor its writing before the next reading.
using TileQueue = AscendC::TQueBind<AscendC::TPosition::VECIN, AscendC::TPosition::VECOUT, kBuffers>;

// Waits in the second pipe for what the first one has been given so far.
template <AscendC::HardEvent event>
__aicore__ inline void order(AscendC::TPipe& pipe) {
  const auto id = pipe.FetchEventID(event);
  AscendC::SetFlag<event>(id);
  AscendC::WaitFlag<event>(id);
}

// Tokens [token, token + tokens) of a unit, or, with no tokens, `bytes` of the row of one token and part.
struct Place {
  int64_t token;
  int64_t tokens;
  int64_t part;
  int64_t offset;
  int64_t bytes;
};

__aicore__ inline Place place_of(const Tiles& tiles, int64_t tile) {
  if (tiles.tile_tokens > 0) {
    const int64_t token = tile * tiles.tile_tokens;
    const int64_t left = tiles.tokens - token;
    return {token, left < tiles.tile_tokens ? left : tiles.tile_tokens, 0, 0, 0};
  }
  const int64_t row = tile / tiles.pieces;
  const int64_t offset = tile % tiles.pieces * tiles.piece_bytes;
  const int64_t left = tiles.row_bytes - offset;
  return {row / tiles.parts, 0, row % tiles.parts, offset, left < tiles.piece_bytes ? left : tiles.piece_bytes};
}

// Global memory -> unified buffer; a stride is a gap, in bytes in global memory and in units of 32 bytes in
// the unified buffer.
__aicore__ inline void read(const Tile& tile, const Bytes& from, const AscendC::DataCopyExtParams& params) {
  AscendC::DataCopyPad(tile, from, params, AscendC::DataCopyPadExtParams<uint8_t>{false, 0, 0, 0});
}

__aicore__ inline void write(const Bytes& to, const Tile& tile, const AscendC::DataCopyExtParams& params) {
  AscendC::DataCopyPad(to, tile, params);
}

// All rows of some tokens: without gaps in global memory, and in the unified buffer with padding only.
__aicore__ inline AscendC::DataCopyExtParams all_rows(const Tiles& tiles, int64_t tokens) {
  const int64_t rows = tokens * tiles.parts;
  if (tiles.row_bytes == tiles.padded_row)
    return {1, static_cast<uint32_t>(rows * tiles.row_bytes), 0, 0, 0};
  return {static_cast<uint16_t>(rows), static_cast<uint32_t>(tiles.row_bytes), 0, 0, 0};
}

// From one row of a part to that part's next one in the unified buffer.
__aicore__ inline uint32_t part_gap(const Tiles& tiles) {
  return static_cast<uint32_t>((tiles.parts - 1) * tiles.padded_row / kAlignment);
}

__aicore__ inline void copy_piece(TileQueue& queue, const Bytes& to, const Bytes& from, int64_t bytes) {
  const AscendC::DataCopyExtParams params{1, static_cast<uint32_t>(bytes), 0, 0, 0};
  Tile tile = queue.AllocTensor<uint8_t>();
  read(tile, from, params);
  queue.EnQue(tile);
  tile = queue.DeQue<uint8_t>();
  write(to, tile, params);
  queue.FreeTensor(tile);
}

}  // namespace vllm_ascend_pd::npu
