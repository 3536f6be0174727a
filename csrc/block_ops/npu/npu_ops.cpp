// SPDX-License-Identifier: Apache-2.0
//
// The block ops on NPU tensors: checked as on the CPU, then one kernel on the current stream, in the order of
// torch_npu's task queue. Loading the library registers them.
#include <acl/acl_rt.h>
#include <torch/library.h>

#include "../arguments.h"
#include "launch.h"
#include "plan.h"
#include "torch_npu/csrc/core/npu/NPUGuard.h"
#include "torch_npu/csrc/core/npu/NPUStream.h"
#include "torch_npu/csrc/framework/OpCommand.h"

namespace vllm_ascend_pd::npu {
namespace {

// By number: names in ACL's header changed between versions.
constexpr int kVectorCoreNum = 201;         // ACL_DEV_ATTR_VECTOR_CORE_NUM
constexpr int kUnifiedBufferPerCore = 204;  // ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE

// Atlas A2 and A3; later chips have more. Older drivers do not know the attribute.
constexpr int64_t kUnifiedBufferBytes = 192 * 1024;

Chip current_chip() {
  int32_t device = 0;
  TORCH_CHECK(aclrtGetDevice(&device) == ACL_SUCCESS, "no NPU is current in this thread");
  Chip chip{0, 0};
  const aclError error = aclrtGetDeviceInfo(device, static_cast<aclrtDevAttr>(kVectorCoreNum), &chip.vector_cores);
  TORCH_CHECK(error == ACL_SUCCESS && chip.vector_cores > 0, "aclrtGetDeviceInfo of NPU ", device, " returned ",
              error, " and ", chip.vector_cores, " vector cores");
  if (aclrtGetDeviceInfo(device, static_cast<aclrtDevAttr>(kUnifiedBufferPerCore), &chip.unified_buffer_bytes) !=
          ACL_SUCCESS ||
      chip.unified_buffer_bytes <= 0)
    chip.unified_buffer_bytes = kUnifiedBufferBytes;
  return chip;
}

// A process sees one kind of chip.
const Chip& chip() {
  static const Chip chip = current_chip();
  return chip;
}

// The task queue may run `queue_kernel` on another thread, after this returns.
template <class QueueKernel>
void in_task_queue(const char* name, QueueKernel queue_kernel) {
  // Without emptying the task queue: the kernel takes its place in it.
  const aclrtStream stream = c10_npu::getCurrentNPUStream().stream(false);
  at_npu::native::OpCommand command;
  command.Name(name);
  command.SetCustomHandler([stream, queue_kernel]() -> int { return queue_kernel(stream); });
  command.Run();
}

void run(const char* name, const std::optional<Split>& job) {
  if (!job) return;
  for (int64_t first = 0; first < job->num_caches(); first += kMaxCaches) {
    const auto planned = plan_split(chip(), *job, first);
    in_task_queue(name, [planned, offsets = job->unit_offsets, out = job->out](aclrtStream stream) {
      return launch(planned.cores, stream, offsets, out, planned.tiling);
    });
  }
}

void run(const char* name, const std::optional<Interleave>& job) {
  if (!job) return;
  const auto planned = plan_interleave(chip(), *job);
  in_task_queue(name, [planned, src = job->src, out = job->out](aclrtStream stream) {
    return launch(planned.cores, stream, src, out, planned.tiling);
  });
}

void gather_units(at::TensorList caches, const at::Tensor& unit_offsets, int64_t unit_bytes, int64_t section_units,
                  at::Tensor& out, int64_t out_offset, int64_t out_cache_stride, int64_t out_section_stride) {
  const c10_npu::NPUGuard guard(out.device());
  run("vllm_ascend_pd::gather_units", checked_gather_units(caches, unit_offsets, unit_bytes, section_units, out,
                                                           out_offset, out_cache_stride, out_section_stride));
}

void split_heads(at::TensorList caches, const at::Tensor& unit_offsets, int64_t splits, int64_t tokens,
                 int64_t row_bytes, at::Tensor& out, int64_t out_offset, int64_t out_cache_stride,
                 int64_t out_section_stride) {
  const c10_npu::NPUGuard guard(out.device());
  run("vllm_ascend_pd::split_heads", checked_split_heads(caches, unit_offsets, splits, tokens, row_bytes, out,
                                                         out_offset, out_cache_stride, out_section_stride));
}

void interleave_heads(const at::Tensor& src, int64_t src_offset, int64_t src_rank_stride, at::Tensor& out,
                      int64_t out_offset, int64_t ranks, int64_t tokens, int64_t row_bytes) {
  const c10_npu::NPUGuard guard(out.device());
  run("vllm_ascend_pd::interleave_heads",
      checked_interleave(src, src_offset, src_rank_stride, out, out_offset, ranks, tokens, row_bytes));
}

void sum_units(at::TensorList caches, at::TensorList unit_offsets, at::TensorList entry_weights,
               at::TensorList place_weights, at::IntArrayRef heads, at::IntArrayRef word_bytes, at::Tensor& out) {
  const c10_npu::NPUGuard guard(out.device());
  const auto jobs = checked_sums(caches, unit_offsets, entry_weights, place_weights, heads, word_bytes, out);
  for (size_t first = 0; first < jobs.size(); first += kMaxCaches) {
    const auto planned = plan_sum(chip(), jobs, first);
    in_task_queue("vllm_ascend_pd::sum_units", [planned, to = jobs[first].out](aclrtStream stream) {
      return launch(planned.cores, stream, to, planned.tiling);
    });
  }
}

void sum_units_32(at::TensorList caches, at::TensorList unit_offsets, at::TensorList entry_weights,
                  at::TensorList place_weights, at::IntArrayRef heads, at::IntArrayRef words, at::Tensor& out) {
  const c10_npu::NPUGuard guard(out.device());
  const auto jobs = checked_sums_32(caches, unit_offsets, entry_weights, place_weights, heads, words, out);
  for (size_t first = 0; first < jobs.size(); first += kMaxCaches) {
    const auto planned = plan_sum(chip(), jobs, first);
    in_task_queue("vllm_ascend_pd::sum_units_32", [planned, to = jobs[first].out](aclrtStream stream) {
      return launch(planned.cores, stream, to, planned.tiling);
    });
  }
}

TORCH_LIBRARY_IMPL(vllm_ascend_pd, PrivateUse1, m) {
  m.impl("gather_units", gather_units);
  m.impl("split_heads", split_heads);
  m.impl("interleave_heads", interleave_heads);
  m.impl("sum_units", sum_units);
  m.impl("sum_units_32", sum_units_32);
}

}  // namespace
}  // namespace vllm_ascend_pd::npu
