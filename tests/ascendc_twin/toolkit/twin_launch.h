// SPDX-License-Identifier: Apache-2.0
//
// A launch: the kernel runs on the twin when the stream gets there.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "kernel_operator.h"
#include "tiling.h"

// In libascendc_runtime.a (runtime.cpp). Returns an aclError.
extern "C" uint32_t ascendc_twin_queue(const char* kernel, uint64_t bytes_written, void* stream, void (*run)(void*),
                                       void* task);

namespace ascendc_twin {

namespace npu = vllm_ascend_pd::npu;

inline int64_t bytes_written(const npu::SplitTiling& tiling) {
  return tiling.num_caches * tiling.units * tiling.tiles.tokens * tiling.tiles.parts * tiling.tiles.row_bytes;
}

inline int64_t bytes_written(const npu::InterleaveTiling& tiling) {
  return tiling.tiles.tokens * tiling.tiles.parts * tiling.tiles.row_bytes;
}

template <class Tiling>
struct Task {
  void (*kernel)(GM_ADDR, GM_ADDR, Tiling);
  uint32_t cores;
  GM_ADDR a;
  GM_ADDR b;
  Tiling tiling;
};

// What the twin finds ends the process: no stream carries an error out of a host function.
template <class Tiling>
void run(void* argument) {
  const std::unique_ptr<Task<Tiling>> task(static_cast<Task<Tiling>*>(argument));
  try {
    AscendC::twin::launch(task->cores, task->kernel, task->a, task->b, task->tiling);
  } catch (const std::logic_error& error) {
    std::fprintf(stderr, "AscendC twin: %s\n", error.what());
    std::abort();
  }
}

template <class Tiling>
uint32_t launch(const char* name, void (*kernel)(GM_ADDR, GM_ADDR, Tiling), uint32_t cores, void* stream, void* a,
                void* b, const Tiling& tiling) {
  auto* task = new Task<Tiling>{kernel, cores, static_cast<GM_ADDR>(a), static_cast<GM_ADDR>(b), tiling};
  return ascendc_twin_queue(name, bytes_written(tiling), stream, run<Tiling>, task);
}

}  // namespace ascendc_twin
