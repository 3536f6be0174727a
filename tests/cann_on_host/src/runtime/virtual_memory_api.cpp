// SPDX-License-Identifier: Apache-2.0
// Reserved addresses and physical memory mapped into them: what torch_npu's expandable segments use.
#include <sys/mman.h>

#include "acl/acl.h"
#include "memory.h"

using namespace cann_on_host;

namespace {

struct PhysicalMemory {
  int file;
  size_t bytes;
};

PhysicalMemory* get(aclrtDrvMemHandle handle) { return reinterpret_cast<PhysicalMemory*>(handle); }

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

}  // namespace

extern "C" {

aclError aclrtReserveMemAddress(void** address, size_t bytes, size_t, void*, uint64_t) {
  *address = mmap(nullptr, bytes, PROT_NONE, kReserved, -1, 0);
  return *address == MAP_FAILED ? kMemoryAllocation : ACL_SUCCESS;
}

aclError aclrtReleaseMemAddress(void*) { return ACL_SUCCESS; }  // address space is not scarce

aclError aclrtMallocPhysical(aclrtDrvMemHandle* handle, size_t bytes, const aclrtPhysicalMemProp*, uint64_t) {
  const int file = memfd_create("cann_on_host", 0);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) return kMemoryAllocation;
  *handle = reinterpret_cast<aclrtDrvMemHandle>(new PhysicalMemory{file, bytes});
  return ACL_SUCCESS;
}

aclError aclrtFreePhysical(aclrtDrvMemHandle handle) {
  close(get(handle)->file);
  delete get(handle);
  return ACL_SUCCESS;
}

aclError aclrtMapMem(void* address, size_t bytes, size_t offset, aclrtDrvMemHandle handle, uint64_t) {
  void* mapped = mmap(address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, get(handle)->file,
                      static_cast<off_t>(offset));
  if (mapped == MAP_FAILED) return kMemoryAllocation;
  scribble(address, bytes);
  add_block(address, bytes, true);
  return ACL_SUCCESS;
}

aclError aclrtUnmapMem(void* address) {
  const size_t bytes = remove_block(address);
  if (!bytes) return fail(kParamInvalid, "aclrtUnmapMem of %p, where nothing is mapped", address);
  mmap(address, bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0);
  return ACL_SUCCESS;
}

aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle, aclrtMemHandleType, uint64_t, uint64_t*) {
  return fail(kFeatureNotSupported, "memory shared between processes is not emulated");
}

aclError aclrtMemImportFromShareableHandle(uint64_t, int32_t, aclrtDrvMemHandle*) {
  return fail(kFeatureNotSupported, "memory shared between processes is not emulated");
}

aclError aclrtMemSetPidToShareableHandle(uint64_t, int32_t*, size_t) {
  return fail(kFeatureNotSupported, "memory shared between processes is not emulated");
}

}  // extern "C"
