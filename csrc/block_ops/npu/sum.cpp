// SPDX-License-Identifier: Apache-2.0
//
// Sum (sum.h) on vector cores: every core takes each n-th pair of a unit and a head. The vector unit has no products of
// 64 bits, so that the scalar unit adds up: a tile takes far longer to add up than to read, and is not read ahead.
#include "tile.h"

namespace vllm_ascend_pd::npu {
namespace {

class SumKernel {
 public:
  __aicore__ inline SumKernel(GM_ADDR out, const SumTiling& tiling, AscendC::TPipe& pipe)
      : tiling_(tiling), pipe_(pipe) {
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(out), tiling.out_bytes);
    pipe.InitBuffer(tile_, kSumTileBytes);
    pipe.InitBuffer(result_, kAlignment);
  }

  __aicore__ inline void run() {
    int64_t first = 0;  // pair of this cache, among all
    for (int64_t c = 0; c < tiling_.num_caches; ++c) {
      const SumOfCache& job = tiling_.caches[c];
      const int64_t cores = AscendC::GetBlockNum();
      const int64_t turn = (AscendC::GetBlockIdx() + cores - first % cores) % cores;
      for (int64_t pair = turn; pair < job.units * job.heads; pair += cores) {
        write(first + pair, sum(job, pair / job.heads, pair % job.heads));
      }
      first += job.units * job.heads;
    }
  }

 private:
  __aicore__ inline uint64_t sum(const SumOfCache& job, int64_t unit, int64_t head) {
    Bytes cache;
    cache.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(job.cache), job.cache_bytes);
    const Words offsets = words(job.unit_offsets, job.units);
    const Words weights = words(job.entry_weights, job.units * job.entries);
    const Words places = words(job.place_weights, job.words);
    const int64_t row_bytes = job.words * job.word_bytes;
    const int64_t begin = offsets.GetValue(unit) + head * row_bytes;
    uint64_t total = 0;
    for (int64_t entry = 0; entry < job.entries; entry += job.tile_entries) {
      const int64_t left = job.entries - entry;
      const int64_t entries = left < job.tile_entries ? left : job.tile_entries;
      for (int64_t word = 0; word < job.words; word += job.tile_words) {
        const int64_t more = job.words - word;
        const int64_t count = more < job.tile_words ? more : job.tile_words;
        const int64_t from = begin + entry * job.heads * row_bytes + word * job.word_bytes;
        const Tile tile = read_tile(cache[from], job, entries, count * job.word_bytes);
        for (int64_t e = 0; e < entries; ++e) {
          const auto weight = static_cast<uint64_t>(weights.GetValue(unit * job.entries + entry + e));
          const Tile row = tile[static_cast<uint32_t>(e * job.tile_row)];
          const Words at = places[word];
          if (job.word_bytes == 4)
            total += weight * dot(row.ReinterpretCast<int32_t>(), at, count);
          else if (job.word_bytes == 2)
            total += weight * dot(row.ReinterpretCast<int16_t>(), at, count);
          else
            total += weight * dot(row, at, count);
        }
      }
    }
    return total;
  }

  // One head's bytes of some entries, each from a multiple of tile_row on.
  __aicore__ inline Tile read_tile(const Bytes& from, const SumOfCache& job, int64_t entries, int64_t bytes) {
    const Tile tile = tile_.Get<uint8_t>();
    const int64_t gap = job.heads * job.words * job.word_bytes - bytes;
    order<AscendC::HardEvent::S_MTE2>(pipe_);
    read(tile, from,
         {static_cast<uint16_t>(entries), static_cast<uint32_t>(bytes), static_cast<uint32_t>(entries > 1 ? gap : 0), 0,
          0});
    order<AscendC::HardEvent::MTE2_S>(pipe_);
    return tile;
  }

  template <class Word>
  __aicore__ inline uint64_t dot(const AscendC::LocalTensor<Word>& row, const Words& places, int64_t count) {
    uint64_t sum = 0;
    for (int64_t w = 0; w < count; ++w)
      sum += static_cast<uint64_t>(static_cast<int64_t>(row.GetValue(static_cast<uint32_t>(w)))) *
             static_cast<uint64_t>(places.GetValue(w));
    return sum;
  }

  // By a copy of 8 bytes: stores of the scalar unit would write back whole lines of its cache, and with them other
  // cores' checksums.
  __aicore__ inline void write(int64_t pair, uint64_t sum) {
    const Tile tile = result_.Get<uint8_t>();
    order<AscendC::HardEvent::MTE3_S>(pipe_);
    tile.ReinterpretCast<uint64_t>().SetValue(0, sum);
    order<AscendC::HardEvent::S_MTE3>(pipe_);
    npu::write(out_[pair * sizeof(uint64_t)], tile, {1, sizeof(uint64_t), 0, 0, 0});
  }

  __aicore__ static inline Words words(uint64_t address, int64_t count) {
    Words tensor;
    tensor.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(address), count);
    return tensor;
  }

  const SumTiling& tiling_;
  AscendC::TPipe& pipe_;
  // DataCopyPad is documented for these positions on A2 and A3, and for VECCALC only on later chips.
  AscendC::TBuf<AscendC::TPosition::VECIN> tile_;
  AscendC::TBuf<AscendC::TPosition::VECOUT> result_;
  Bytes out_;
};

}  // namespace
}  // namespace vllm_ascend_pd::npu

extern "C" __global__ VECTOR_KERNEL __aicore__ void vllm_ascend_pd_sum(GM_ADDR out, vllm_ascend_pd::npu::SumTiling tiling) {
  VECTOR_KERNEL_BODY
  AscendC::TPipe pipe;
  vllm_ascend_pd::npu::SumKernel(out, tiling, pipe).run();
}
