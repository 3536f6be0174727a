// SPDX-License-Identifier: Apache-2.0
//
// libascendc_runtime.a, which CANN's compiler links into every library with kernels.
#include <acl/acl_rt.h>

#include <cstdint>

// The stand-in for CANN counts launches, if it can.
extern "C" __attribute__((weak)) void cann_on_host_count_launch(const char* name, uint64_t bytes_written);

extern "C" uint32_t ascendc_twin_queue(const char* kernel, uint64_t bytes_written, void* stream, void (*run)(void*),
                                       void* task) {
  if (cann_on_host_count_launch) cann_on_host_count_launch(kernel, bytes_written);
  return aclrtLaunchHostFunc(stream, run, task);
}
