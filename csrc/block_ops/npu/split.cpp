// SPDX-License-Identifier: Apache-2.0
//
// Split (regroup.h) on vector cores: every core takes each n-th tile. A tile of whole tokens is read in one
// run and written part by part.
#include "tile.h"

namespace vllm_ascend_pd::npu {
namespace {

class SplitKernel {
 public:
  __aicore__ inline SplitKernel(GM_ADDR unit_offsets, GM_ADDR out, const SplitTiling& tiling,
                                AscendC::TPipe& pipe)
      : tiling_(tiling) {
    unit_offsets_.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(unit_offsets), tiling.units);
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(out), tiling.out_bytes);
    pipe.InitBuffer(queue_, kBuffers, static_cast<uint32_t>(tiling.tiles.buffer_bytes));
  }

  __aicore__ inline void run() {
    const int64_t per_unit = tiling_.tiles.tiles_per_unit;
    const int64_t all = tiling_.num_caches * tiling_.units * per_unit;
    for (int64_t tile = AscendC::GetBlockIdx(); tile < all; tile += AscendC::GetBlockNum()) {
      const int64_t step = tile / per_unit;
      copy(step / tiling_.units, step % tiling_.units, place_of(tiling_.tiles, tile % per_unit));
    }
  }

 private:
  __aicore__ inline void copy(int64_t cache, int64_t unit, const Place& place) {
    const Tiles& tiles = tiling_.tiles;
    Bytes from;
    from.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(tiling_.caches[cache]), tiling_.cache_bytes[cache]);
    const int64_t first_row = place.token * tiles.parts + place.part;
    from = from[unit_offsets_.GetValue(unit) + first_row * tiles.row_bytes + place.offset];
    const int64_t section = tiling_.out_offset + cache * tiling_.out_cache_stride +
                            unit / tiling_.section_units * tiling_.out_section_stride;
    const int64_t row = (unit % tiling_.section_units * tiles.tokens + place.token) * tiles.row_bytes;
    if (place.tokens > 0)
      copy_tokens(section + row, from, place.tokens);
    else
      copy_piece(queue_, out_[section + place.part * tiling_.out_section_stride + row + place.offset], from,
                 place.bytes);
  }

  __aicore__ inline void copy_tokens(int64_t to, const Bytes& from, int64_t tokens) {
    const Tiles& tiles = tiling_.tiles;
    const AscendC::DataCopyExtParams one_part{static_cast<uint16_t>(tokens),
                                              static_cast<uint32_t>(tiles.row_bytes), part_gap(tiles), 0, 0};
    Tile tile = queue_.AllocTensor<uint8_t>();
    read(tile, from, all_rows(tiles, tokens));
    queue_.EnQue(tile);
    tile = queue_.DeQue<uint8_t>();
    for (int64_t part = 0; part < tiles.parts; ++part)
      write(out_[to + part * tiling_.out_section_stride], tile[part * tiles.padded_row], one_part);
    queue_.FreeTensor(tile);
  }

  const SplitTiling& tiling_;
  TileQueue queue_;
  AscendC::GlobalTensor<int64_t> unit_offsets_;
  Bytes out_;
};

}  // namespace
}  // namespace vllm_ascend_pd::npu

extern "C" __global__ VECTOR_KERNEL __aicore__ void vllm_ascend_pd_split(GM_ADDR unit_offsets, GM_ADDR out,
                                                           vllm_ascend_pd::npu::SplitTiling tiling) {
  VECTOR_KERNEL_BODY
  AscendC::TPipe pipe;
  vllm_ascend_pd::npu::SplitKernel(unit_offsets, out, tiling, pipe).run();
}
