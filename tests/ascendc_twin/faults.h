// SPDX-License-Identifier: Apache-2.0
//
// Kernels that do one thing wrong each, by name.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <type_traits>

#include "tile.h"

namespace twin {

using vllm_ascend_pd::npu::Bytes;
using vllm_ascend_pd::npu::read;
using vllm_ascend_pd::npu::Tile;
using vllm_ascend_pd::npu::TileQueue;
using vllm_ascend_pd::npu::write;
using Params = AscendC::DataCopyExtParams;

// A core with 1 KiB of global memory and a queue of two tiles of 512 bytes.
struct Core {
  alignas(32) std::array<uint8_t, 1024> memory{};
  Bytes global;
  AscendC::TPipe pipe;
  TileQueue queue;
  AscendC::TBuf<AscendC::TPosition::VECIN> buffer;
  AscendC::TBuf<AscendC::TPosition::VECCALC> calculated;

  Core() {
    global.SetGlobalBuffer(memory.data(), memory.size());
    pipe.InitBuffer(queue, 2, 512);
    pipe.InitBuffer(buffer, 64);
    pipe.InitBuffer(calculated, 64);
  }
  Tile alloc() { return queue.AllocTensor<uint8_t>(); }
  Tile through_queue(const Tile& tile) {
    queue.EnQue(tile);
    return queue.DeQue<uint8_t>();
  }
  // Reads a number, doubles it in the scalar unit, and writes it: with all flags, or without one.
  void twice(std::optional<AscendC::HardEvent> without) {
    const auto order = [&](auto event) {
      if (without == event.value) return;
      AscendC::SetFlag<event.value>(0);
      AscendC::WaitFlag<event.value>(0);
    };
    using Event = AscendC::HardEvent;
    const Tile tile = buffer.Get<uint8_t>();
    for (int time = 0; time < 2; ++time) {
      read(tile, global, {1, 32, 0, 0, 0});
      order(std::integral_constant<Event, Event::MTE2_S>());
      tile.SetValue(0, static_cast<uint8_t>(2 * tile.GetValue(0)));
      order(std::integral_constant<Event, Event::S_MTE3>());
      write(global, tile, {1, 32, 0, 0, 0});
      order(std::integral_constant<Event, Event::MTE3_S>());
      tile.SetValue(0, 0);
      order(std::integral_constant<Event, Event::S_MTE2>());
    }
  }
  void copy(const Bytes& from, const Bytes& to, const Params& params) {
    Tile tile = alloc();
    read(tile, from, params);
    tile = through_queue(tile);
    write(to, tile, params);
    queue.FreeTensor(tile);
  }
};

inline const std::map<std::string, std::function<void(Core&)>>& faults() {
  static const std::map<std::string, std::function<void(Core&)>> table{
      {"none", [](Core& c) { c.copy(c.global, c.global[512], {1, 512, 0, 0, 0}); }},
      {"read past the end", [](Core& c) { c.copy(c.global[1000], c.global, {1, 25, 0, 0, 0}); }},
      {"read before the start", [](Core& c) { c.copy(c.global[-1], c.global, {1, 32, 0, 0, 0}); }},
      {"write past the end", [](Core& c) { c.copy(c.global, c.global[1000], {1, 25, 0, 0, 0}); }},
      {"second block past the end", [](Core& c) { c.copy(c.global, c.global, {2, 32, 961, 0, 0}); }},
      {"value past the end", [](Core& c) { c.global.GetValue(1024); }},
      {"tile too long", [](Core& c) { c.copy(c.global, c.global, {1, 513, 0, 0, 0}); }},
      {"padded blocks past the tile", [](Core& c) { c.copy(c.global, c.global, {17, 1, 0, 0, 0}); }},
      {"unaligned tile", [](Core& c) { read(c.alloc()[16], c.global, {1, 32, 0, 0, 0}); }},
      {"no blocks", [](Core& c) { c.copy(c.global, c.global, {0, 32, 0, 0, 0}); }},
      {"too many blocks", [](Core& c) { c.copy(c.global, c.global, {4096, 1, 0, 0, 0}); }},
      {"no bytes", [](Core& c) { c.copy(c.global, c.global, {1, 0, 0, 0, 0}); }},
      {"too many bytes", [](Core& c) { c.copy(c.global, c.global, {1, 2097152, 0, 0, 0}); }},
      {"tile gap too long", [](Core& c) { c.copy(c.global, c.global, {1, 32, 0, 65536, 0}); }},
      {"unified buffer used up",
       [](Core& c) {
         TileQueue more;
         c.pipe.InitBuffer(more, 2, 96 * 1024);
       }},
      {"alloc without free", [](Core& c) { c.alloc(), c.alloc(), c.alloc(); }},
      {"dequeue of nothing", [](Core& c) { c.queue.DeQue<uint8_t>(); }},
      {"enqueued twice",
       [](Core& c) {
         const Tile tile = c.alloc();
         c.queue.EnQue(tile);
         c.queue.EnQue(tile);
       }},
      {"enqueued in part", [](Core& c) { c.queue.EnQue(c.alloc()[32]); }},
      {"freed before dequeued", [](Core& c) { c.queue.FreeTensor(c.alloc()); }},
      {"read after enqueued",
       [](Core& c) {
         const Tile tile = c.alloc();
         c.queue.EnQue(tile);
         read(tile, c.global, {1, 32, 0, 0, 0});
       }},
      {"written before dequeued",
       [](Core& c) {
         const Tile tile = c.alloc();
         read(tile, c.global, {1, 32, 0, 0, 0});
         write(c.global, tile, {1, 32, 0, 0, 0});
       }},
      {"written after freed",
       [](Core& c) {
         const Tile tile = c.through_queue(c.alloc());
         c.queue.FreeTensor(tile);
         write(c.global, tile, {1, 32, 0, 0, 0});
       }},
      {"no missing flag", [](Core& c) { c.twice(std::nullopt); }},
      {"scalar unit before reading has ended", [](Core& c) { c.twice(AscendC::HardEvent::MTE2_S); }},
      {"writing before the scalar unit is done", [](Core& c) { c.twice(AscendC::HardEvent::S_MTE3); }},
      {"scalar unit before writing has ended", [](Core& c) { c.twice(AscendC::HardEvent::MTE3_S); }},
      {"reading before the scalar unit is done", [](Core& c) { c.twice(AscendC::HardEvent::S_MTE2); }},
      {"waits for no flag", [](Core&) { AscendC::WaitFlag<AscendC::HardEvent::MTE2_S>(0); }},
      {"value past the tile", [](Core& c) { c.buffer.Get<uint8_t>().GetValue(64); }},
      {"read into VECCALC", [](Core& c) { read(c.calculated.Get<uint8_t>(), c.global, {1, 32, 0, 0, 0}); }},
      {"written from VECCALC", [](Core& c) { write(c.global, c.calculated.Get<uint8_t>(), {1, 32, 0, 0, 0}); }},
      {"never freed", [](Core& c) { c.through_queue(c.alloc()); }},
  };
  return table;
}

inline void run_fault(const std::string& name) {
  AscendC::twin::launch(
      1,
      [](const std::function<void(Core&)>& fault) {
        Core core;
        fault(core);
      },
      faults().at(name));
}

}  // namespace twin
