// SPDX-License-Identifier: Apache-2.0
//
// Interleave (regroup.h) on vector cores: every core takes each n-th tile. A tile of whole tokens is read rank
// by rank and written in one run.
#include "tile.h"

namespace vllm_ascend_pd::npu {
namespace {

class InterleaveKernel {
 public:
  __aicore__ inline InterleaveKernel(GM_ADDR src, GM_ADDR out, const InterleaveTiling& tiling,
                                     AscendC::TPipe& pipe)
      : tiling_(tiling) {
    src_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(src), tiling.src_bytes);
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(out), tiling.out_bytes);
    pipe.InitBuffer(queue_, kBuffers, static_cast<uint32_t>(tiling.tiles.buffer_bytes));
  }

  __aicore__ inline void run() {
    const int64_t all = tiling_.tiles.tiles_per_unit;
    for (int64_t tile = AscendC::GetBlockIdx(); tile < all; tile += AscendC::GetBlockNum())
      copy(place_of(tiling_.tiles, tile));
  }

 private:
  __aicore__ inline void copy(const Place& place) {
    const Tiles& tiles = tiling_.tiles;
    const int64_t from = tiling_.src_offset + place.part * tiling_.src_rank_stride + place.token * tiles.row_bytes;
    const int64_t first_row = place.token * tiles.parts + place.part;
    const Bytes to = out_[tiling_.out_offset + first_row * tiles.row_bytes + place.offset];
    if (place.tokens > 0)
      copy_tokens(to, from, place.tokens);
    else
      copy_piece(queue_, to, src_[from + place.offset], place.bytes);
  }

  __aicore__ inline void copy_tokens(const Bytes& to, int64_t from, int64_t tokens) {
    const Tiles& tiles = tiling_.tiles;
    const AscendC::DataCopyExtParams one_part{static_cast<uint16_t>(tokens),
                                              static_cast<uint32_t>(tiles.row_bytes), 0, part_gap(tiles), 0};
    Tile tile = queue_.AllocTensor<uint8_t>();
    for (int64_t part = 0; part < tiles.parts; ++part)
      read(tile[part * tiles.padded_row], src_[from + part * tiling_.src_rank_stride], one_part);
    queue_.EnQue(tile);
    tile = queue_.DeQue<uint8_t>();
    write(to, tile, all_rows(tiles, tokens));
    queue_.FreeTensor(tile);
  }

  const InterleaveTiling& tiling_;
  TileQueue queue_;
  Bytes src_;
  Bytes out_;
};

}  // namespace
}  // namespace vllm_ascend_pd::npu

extern "C" __global__ VECTOR_KERNEL __aicore__ void vllm_ascend_pd_interleave(GM_ADDR src, GM_ADDR out,
                                                                vllm_ascend_pd::npu::InterleaveTiling tiling) {
  VECTOR_KERNEL_BODY
  AscendC::TPipe pipe;
  vllm_ascend_pd::npu::InterleaveKernel(src, out, tiling, pipe).run();
}
