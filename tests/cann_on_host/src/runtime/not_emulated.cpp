// SPDX-License-Identifier: Apache-2.0
// What torch_npu and Mooncake link against and is not emulated. Dumps and profiles are empty; kernels cannot run.
#include <chrono>

#include "acl/acl.h"
#include "acl/acl_dump.h"
#include "acl/acl_mdl.h"
#include "runtime.h"

using namespace cann_on_host;

extern "C" {

aclError aclmdlInitDump() { return ACL_SUCCESS; }
aclError aclmdlSetDump(const char*) { return ACL_SUCCESS; }
aclError aclmdlFinalizeDump() { return ACL_SUCCESS; }

uint64_t MsprofGetHashId(const char*, size_t) { return 0; }
int32_t MsprofRegisterCallback(uint32_t, void*) { return 0; }
int32_t MsprofReportAdditionalInfo(uint32_t, const void*, uint32_t) { return 0; }
int32_t MsprofReportApi(uint32_t, const void*) { return 0; }
int32_t MsprofReportCompactInfo(uint32_t, const void*, uint32_t) { return 0; }
uint64_t MsprofSysCycleTime() { return std::chrono::steady_clock::now().time_since_epoch().count(); }

aclError aclrtBinaryLoadFromData(const void*, size_t, const aclrtBinaryLoadOptions*, aclrtBinHandle*) {
  fatal("aclrtBinaryLoadFromData: compiled kernels are not emulated");
}

aclError aclrtBinaryGetFunction(const aclrtBinHandle, const char* name, aclrtFuncHandle*) {
  fatal("aclrtBinaryGetFunction %s: compiled kernels are not emulated", name);
}

aclError aclrtGetFunctionAddr(aclrtFuncHandle, void**, void**) {
  fatal("aclrtGetFunctionAddr: compiled kernels are not emulated");
}

int rtDevBinaryRegister(const void*, void**) { fatal("rtDevBinaryRegister: compiled kernels are not emulated"); }

int rtFunctionRegister(void*, const void*, const char* name, const void*, uint32_t) {
  fatal("rtFunctionRegister %s: compiled kernels are not emulated", name);
}

aclError aclrtStreamAbort(aclrtStream) { fatal("aclrtStreamAbort is not emulated"); }

// Memory shared between processes, which Mooncake's store uses.
aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp*, aclrtMemGranularityOptions, size_t*) {
  return fail(kFeatureNotSupported, "aclrtMemGetAllocationGranularity is not emulated");
}

aclError aclrtMemImportFromShareableHandleV2(void*, aclrtMemSharedHandleType, uint64_t, void**) {
  return fail(kFeatureNotSupported, "aclrtMemImportFromShareableHandleV2 is not emulated");
}

aclError aclrtMemExportToShareableHandleV2(aclrtDrvMemHandle, uint64_t, aclrtMemSharedHandleType, void*) {
  return fail(kFeatureNotSupported, "aclrtMemExportToShareableHandleV2 is not emulated");
}

aclError aclrtIpcMemGetExportKey(void*, size_t, char*, size_t, uint64_t) {
  return fail(kFeatureNotSupported, "aclrtIpcMemGetExportKey is not emulated");
}

aclError aclrtIpcMemImportByKey(void**, const char*, uint64_t) {
  return fail(kFeatureNotSupported, "aclrtIpcMemImportByKey is not emulated");
}

aclError aclrtIpcMemClose(const char*) { return fail(kFeatureNotSupported, "aclrtIpcMemClose is not emulated"); }

aclError aclrtMemSetAccess(void*, size_t, aclrtMemAccessDesc*, size_t) {
  return fail(kFeatureNotSupported, "aclrtMemSetAccess is not emulated");
}

aclError aclrtReserveMemAddressNoUCMemory(void**, size_t, size_t, void*, uint64_t) {
  return fail(kFeatureNotSupported, "aclrtReserveMemAddressNoUCMemory is not emulated");
}

int rtGetC2cCtrlAddr(uint64_t*, uint32_t*) { return kFeatureNotSupported; }

int rtKernelLaunch(const void*, uint32_t, void*, uint32_t, void*, void*) {
  fatal("rtKernelLaunch: compiled kernels are not emulated");
}

}  // extern "C"
