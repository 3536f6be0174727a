// SPDX-License-Identifier: Apache-2.0
// What compiled kernels need beside streams: the size of the chip, and a way to be counted.
#include "runtime.h"

using namespace cann_on_host;

extern "C" {

// Of an Atlas A2.
aclError aclrtGetDeviceInfo(uint32_t device, aclrtDevAttr attribute, int64_t* value) {
  switch (attribute) {
    case ACL_DEV_ATTR_VECTOR_CORE_NUM:
      *value = 24;
      return ACL_SUCCESS;
    case ACL_DEV_ATTR_UBUF_PER_VECTOR_CORE:
      *value = 192 * 1024;
      return ACL_SUCCESS;
    default:
      return fail(kFeatureNotSupported, "device %u: attribute %d is not emulated", device, static_cast<int>(attribute));
  }
}

// A kernel that is none of libopapi's was queued.
void cann_on_host_count_launch(const char* name, uint64_t bytes_written) { count_launch(name, bytes_written); }

}  // extern "C"
