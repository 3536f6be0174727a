// SPDX-License-Identifier: Apache-2.0
//
// The launch functions that ascendc_library would generate: the kernel runs when the stream gets there.
#include <acl/acl_rt.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "kernel_operator.h"
#include "tiling.h"

#include "aclrtlaunch_vllm_ascend_pd_interleave.h"
#include "aclrtlaunch_vllm_ascend_pd_split.h"

namespace npu = vllm_ascend_pd::npu;

// The stand-in for CANN counts launches, if it can.
extern "C" __attribute__((weak)) void cann_on_host_count_launch(const char* name, uint64_t bytes_written);

extern "C" void vllm_ascend_pd_split(GM_ADDR unit_offsets, GM_ADDR out, npu::SplitTiling tiling);
extern "C" void vllm_ascend_pd_interleave(GM_ADDR src, GM_ADDR out, npu::InterleaveTiling tiling);

namespace {

int64_t bytes_written(const npu::SplitTiling& tiling) {
  return tiling.num_caches * tiling.units * tiling.tiles.tokens * tiling.tiles.parts * tiling.tiles.row_bytes;
}

int64_t bytes_written(const npu::InterleaveTiling& tiling) {
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
uint32_t queue(const char* name, void (*kernel)(GM_ADDR, GM_ADDR, Tiling), uint32_t cores, void* stream, void* a,
               void* b, const Tiling& tiling) {
  if (cann_on_host_count_launch) cann_on_host_count_launch(name, bytes_written(tiling));
  auto* task = new Task<Tiling>{kernel, cores, static_cast<GM_ADDR>(a), static_cast<GM_ADDR>(b), tiling};
  return aclrtLaunchHostFunc(stream, run<Tiling>, task);
}

}  // namespace

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_split(uint32_t cores, void* stream, void* a, void* b,
                                                     npu::SplitTiling* tiling) {
  return queue("vllm_ascend_pd_split", vllm_ascend_pd_split, cores, stream, a, b, *tiling);
}

extern "C" uint32_t aclrtlaunch_vllm_ascend_pd_interleave(uint32_t cores, void* stream, void* a, void* b,
                                                          npu::InterleaveTiling* tiling) {
  return queue("vllm_ascend_pd_interleave", vllm_ascend_pd_interleave, cores, stream, a, b, *tiling);
}
