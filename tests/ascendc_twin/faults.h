// SPDX-License-Identifier: Apache-2.0
//
// Kernels that do one thing wrong each, by name.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <string>

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

  Core() {
    global.SetGlobalBuffer(memory.data(), memory.size());
    pipe.InitBuffer(queue, 2, 512);
  }
  Tile alloc() { return queue.AllocTensor<uint8_t>(); }
  Tile through_queue(const Tile& tile) {
    queue.EnQue(tile);
    return queue.DeQue<uint8_t>();
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
