// SPDX-License-Identifier: Apache-2.0
//
// A launch: the kernel runs on the twin when the stream gets there.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
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

inline int64_t bytes_written(const npu::SumTiling& tiling) { return tiling.out_bytes; }

inline int64_t bytes_written(const npu::Sum32Tiling& tiling) { return tiling.out_bytes; }

inline int64_t bytes_written(const void*) { return 0; }

inline GM_ADDR argument(void* address) { return static_cast<GM_ADDR>(address); }

template <class Tiling>
const Tiling& argument(const Tiling& tiling) {
  return tiling;
}

// What the twin finds ends the process: no stream carries an error out of a host function.
inline void run(void* task) {
  const std::unique_ptr<std::function<void()>> kernel(static_cast<std::function<void()>*>(task));
  try {
    (*kernel)();
  } catch (const std::logic_error& error) {
    std::fprintf(stderr, "AscendC twin: %s\n", error.what());
    std::abort();
  }
}

// `arguments`: addresses, then the tiling.
template <class Kernel, class... Arguments>
uint32_t launch(const char* name, Kernel kernel, uint32_t cores, void* stream, const Arguments&... arguments) {
  auto* task = new std::function<void()>([=] { AscendC::twin::launch(cores, kernel, argument(arguments)...); });
  return ascendc_twin_queue(name, (bytes_written(arguments) + ...), stream, run, task);
}

}  // namespace ascendc_twin
