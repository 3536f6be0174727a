// SPDX-License-Identifier: Apache-2.0
//
// Sum32 (sum.h) on vector units: every core takes each n-th pair of a unit and a head. Rows are added up word by word,
// each times its entry's weight, so that the weights of places are multiplied once for a pair. Whether `Mul` and `Muls`
// of int32 keep the low 32 bits of a product is not documented: `doctor --hardware` asks the chip.
#include "tile.h"

namespace vllm_ascend_pd::npu {
namespace sum32 {

using Lanes = AscendC::LocalTensor<int32_t>;
using Weights = AscendC::GlobalTensor<int32_t>;

// Two sums of two halves each.
constexpr int64_t kSums = 4;
// The fewest lanes that the vector unit adds to others: 32 bytes.
constexpr int64_t kLeast = 8;

// Lets the vector unit end what it has been given, before it uses the results.
__aicore__ inline void barrier() { AscendC::PipeBarrier<PIPE_V>(); }

class Sum32Kernel {
 public:
  __aicore__ inline Sum32Kernel(GM_ADDR out, const Sum32Tiling& tiling, AscendC::TPipe& pipe)
      : tiling_(tiling), pipe_(pipe) {
    out_.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(out), tiling.out_bytes);
    const auto row = static_cast<uint32_t>(tiling.piece_words * sizeof(int32_t));
    pipe.InitBuffer(tile_, static_cast<uint32_t>(tiling.tile_bytes));
    pipe.InitBuffer(upper_, static_cast<uint32_t>(tiling.tile_bytes));
    pipe.InitBuffer(sums_, kSums * row);
    pipe.InitBuffer(products_, kSums * row);
    pipe.InitBuffer(places_, kSums * row);
    pipe.InitBuffer(result_, kAlignment);
  }

  __aicore__ inline void run() {
    int64_t first = 0;  // pair of this cache, among all
    for (int64_t c = 0; c < tiling_.num_caches; ++c) {
      const Sum32OfCache& job = tiling_.caches[c];
      const int64_t cores = AscendC::GetBlockNum();
      const int64_t turn = (AscendC::GetBlockIdx() + cores - first % cores) % cores;
      for (int64_t pair = turn; pair < job.units * job.heads; pair += cores) {
        sum(job, pair / job.heads, pair % job.heads);
        write(first + pair);
      }
      first += job.units * job.heads;
    }
  }

 private:
  // Leaves the pair's two sums in total_.
  __aicore__ inline void sum(const Sum32OfCache& job, int64_t unit, int64_t head) {
    Words offsets;
    offsets.SetGlobalBuffer(reinterpret_cast<__gm__ int64_t*>(job.unit_offsets), job.units);
    const int64_t begin = offsets.GetValue(unit) + head * job.words * static_cast<int64_t>(sizeof(int32_t));
    total_[0] = total_[1] = 0;
    for (int64_t word = 0; word < job.words; word += tiling_.piece_words) {
      const int64_t left = job.words - word;
      sum_piece(job, unit, begin, word, left < tiling_.piece_words ? left : tiling_.piece_words);
    }
  }

  // `words` from `word` on of all of the unit's entries.
  __aicore__ inline void sum_piece(const Sum32OfCache& job, int64_t unit, int64_t begin, int64_t word, int64_t words) {
    const auto lanes = static_cast<int32_t>((words + kLeast - 1) / kLeast * kLeast);
    int64_t width = kLeast;  // a power of two, so that halves can be added
    while (width < lanes) width *= 2;
    Weights weights;
    weights.SetGlobalBuffer(reinterpret_cast<__gm__ int32_t*>(job.entry_weights), job.units * job.entries * 2);
    const int64_t row_bytes = job.words * static_cast<int64_t>(sizeof(int32_t));
    order<AscendC::HardEvent::S_V>(pipe_);  // the scalar unit has read the last piece's sums
    AscendC::Duplicate(row(sums_, 0), 0, static_cast<int32_t>(kSums * tiling_.piece_words));
    barrier();
    for (int64_t entry = 0; entry < job.entries; entry += job.tile_entries) {
      const int64_t left = job.entries - entry;
      const int64_t entries = left < job.tile_entries ? left : job.tile_entries;
      const int64_t from = begin + entry * job.heads * row_bytes + word * static_cast<int64_t>(sizeof(int32_t));
      read_tile(job, from, entries, words);
      for (int64_t e = 0; e < entries; ++e) {
        const int64_t at = 2 * (unit * job.entries + entry + e);
        add_row(e * lanes, lanes, weights.GetValue(at), weights.GetValue(at + 1));
      }
    }
    read_places(job, word, lanes);
    for (int64_t i = 0; i < kSums; ++i) AscendC::Mul(row(sums_, i), row(sums_, i), row(places_, i), lanes);
    barrier();
    for (int64_t k = 0; k < kSums; k += 2) AscendC::Add(row(sums_, k), row(sums_, k), row(sums_, k + 1), lanes);
    barrier();
    for (width /= 2; width >= kLeast; width /= 2) {
      for (int64_t k = 0; k < kSums; k += 2) {
        const Lanes sums = row(sums_, k);
        AscendC::Add(sums, sums, sums[static_cast<uint32_t>(width)], static_cast<int32_t>(width));
      }
      barrier();
    }
    order<AscendC::HardEvent::V_S>(pipe_);
    for (uint32_t lane = 0; lane < kLeast; ++lane)
      for (int64_t k = 0; k < 2; ++k) total_[k] += static_cast<uint32_t>(row(sums_, 2 * k).GetValue(lane));
  }

  // One head's words of some entries, as their lower and their upper halves.
  __aicore__ inline void read_tile(const Sum32OfCache& job, int64_t from, int64_t entries, int64_t words) {
    Bytes cache;
    cache.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(job.cache), job.cache_bytes);
    const int64_t bytes = words * static_cast<int64_t>(sizeof(int32_t));
    const int64_t gap = job.heads * job.words * static_cast<int64_t>(sizeof(int32_t)) - bytes;
    order<AscendC::HardEvent::V_MTE2>(pipe_);
    read(tile_.Get<uint8_t>(), cache[from],
         {static_cast<uint16_t>(entries), static_cast<uint32_t>(bytes), static_cast<uint32_t>(entries > 1 ? gap : 0), 0,
          0});
    order<AscendC::HardEvent::MTE2_V>(pipe_);
    const auto lanes = static_cast<int32_t>(entries * ((words + kLeast - 1) / kLeast * kLeast));
    const auto lower = tile_.Get<uint32_t>(), upper = upper_.Get<uint32_t>();
    AscendC::ShiftRight(upper, lower, 16u, lanes);
    barrier();
    AscendC::ShiftLeft(lower, lower, 16u, lanes);
    barrier();
    AscendC::ShiftRight(lower, lower, 16u, lanes);
    barrier();
  }

  __aicore__ inline void add_row(int64_t lane, int32_t lanes, int32_t first, int32_t second) {
    const Lanes lower = tile_.Get<int32_t>()[static_cast<uint32_t>(lane)];
    const Lanes upper = upper_.Get<int32_t>()[static_cast<uint32_t>(lane)];
    AscendC::Muls(row(products_, 0), lower, first, lanes);
    AscendC::Muls(row(products_, 1), upper, first, lanes);
    AscendC::Muls(row(products_, 2), lower, second, lanes);
    AscendC::Muls(row(products_, 3), upper, second, lanes);
    barrier();
    for (int64_t i = 0; i < kSums; ++i) AscendC::Add(row(sums_, i), row(sums_, i), row(products_, i), lanes);
    barrier();
  }

  __aicore__ inline void read_places(const Sum32OfCache& job, int64_t word, int32_t lanes) {
    const int64_t padded = (job.words + kLeast - 1) / kLeast * kLeast;
    Bytes places;
    places.SetGlobalBuffer(reinterpret_cast<__gm__ uint8_t*>(job.place_weights),
                           kSums * padded * static_cast<int64_t>(sizeof(int32_t)));
    order<AscendC::HardEvent::V_MTE2>(pipe_);
    for (int64_t i = 0; i < kSums; ++i)
      read(places_.Get<uint8_t>()[static_cast<uint32_t>(i * tiling_.piece_words * sizeof(int32_t))],
           places[(i * padded + word) * static_cast<int64_t>(sizeof(int32_t))],
           {1, static_cast<uint32_t>(lanes * sizeof(int32_t)), 0, 0, 0});
    order<AscendC::HardEvent::MTE2_V>(pipe_);
  }

  template <class Buffer>
  __aicore__ inline Lanes row(Buffer& buffer, int64_t number) {
    return buffer.template Get<int32_t>()[static_cast<uint32_t>(number * tiling_.piece_words)];
  }

  // By a copy of 8 bytes: see sum.cpp.
  __aicore__ inline void write(int64_t pair) {
    const auto result = result_.Get<uint32_t>();
    order<AscendC::HardEvent::MTE3_S>(pipe_);
    result.SetValue(0, total_[0]);
    result.SetValue(1, total_[1]);
    order<AscendC::HardEvent::S_MTE3>(pipe_);
    npu::write(out_[pair * 2 * sizeof(uint32_t)], result_.Get<uint8_t>(), {1, 2 * sizeof(uint32_t), 0, 0, 0});
  }

  const Sum32Tiling& tiling_;
  AscendC::TPipe& pipe_;
  AscendC::TBuf<AscendC::TPosition::VECIN> tile_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> upper_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> sums_;
  AscendC::TBuf<AscendC::TPosition::VECCALC> products_;
  AscendC::TBuf<AscendC::TPosition::VECIN> places_;
  AscendC::TBuf<AscendC::TPosition::VECOUT> result_;
  Bytes out_;
  uint32_t total_[2];
};

}  // namespace sum32
}  // namespace vllm_ascend_pd::npu

extern "C" __global__ VECTOR_KERNEL __aicore__ void vllm_ascend_pd_sum32(GM_ADDR out,
                                                                         vllm_ascend_pd::npu::Sum32Tiling tiling) {
  VECTOR_KERNEL_BODY
  AscendC::TPipe pipe;
  vllm_ascend_pd::npu::sum32::Sum32Kernel(out, tiling, pipe).run();
}
