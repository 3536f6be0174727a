// SPDX-License-Identifier: Apache-2.0
// aclrtMalloc*, aclrtFree*, aclrtHostRegister and questions about memory.
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "acl/acl.h"
#include "memory.h"

using namespace cann_on_host;

extern "C" {

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  bytes = bytes ? bytes : 1;
  if (device_bytes_used() + bytes > device_bytes_total()) return kMemoryAllocation;
  void* block = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return kMemoryAllocation;
  scribble(block, bytes);
  add_block(block, bytes, true);
  CANN_ON_HOST_LOG("aclrtMalloc %zu -> %p", bytes, block);
  *address = block;
  return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}

aclError aclrtFree(void* address) {
  const size_t bytes = remove_block(address);
  if (!bytes) return fail(kParamInvalid, "aclrtFree of %p, where no block begins", address);
  munmap(address, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** address, size_t bytes) {
  bytes = bytes ? bytes : 1;
  if (posix_memalign(address, 4096, bytes)) return kMemoryAllocation;
  add_block(*address, bytes, false);
  return ACL_SUCCESS;
}

aclError aclrtFreeHost(void* address) {
  if (!remove_block(address)) return fail(kParamInvalid, "aclrtFreeHost of %p, where no block begins", address);
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtHostRegister(void* address, uint64_t bytes, aclrtHostRegisterType, void** device_address) {
  add_block(address, bytes, false);
  *device_address = address;
  return ACL_SUCCESS;
}

aclError aclrtHostUnregister(void* address) {
  remove_block(address);
  return ACL_SUCCESS;
}

aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  int device = 0;
  const Place place = locate(address, 1, &device);
  attributes->location.id = device;
  attributes->location.type = place == Place::kDevice       ? ACL_MEM_LOCATION_TYPE_DEVICE
                              : place == Place::kPinnedHost ? ACL_MEM_LOCATION_TYPE_HOST
                                                            : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  *total_bytes = device_bytes_total();
  *free_bytes = *total_bytes - device_bytes_used();
  return ACL_SUCCESS;
}

}  // extern "C"
