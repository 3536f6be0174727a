// SPDX-License-Identifier: Apache-2.0
// Devices, contexts and what is asked about the machine.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#include "acl/acl.h"
#include "stream.h"

using namespace cann_on_host;

namespace {

struct Context {
  int device;
};

Context* context_of(int device, bool make) {
  static std::mutex mutex;
  static auto* contexts = new std::map<int, Context*>;
  std::lock_guard<std::mutex> lock(mutex);
  auto found = contexts->find(device);
  if (found != contexts->end()) return found->second;
  return make ? contexts->emplace(device, new Context{device}).first->second : nullptr;
}

aclError synchronize_device(int device) {
  aclError first = ACL_SUCCESS;
  for (Stream* stream : streams_of(device)) {
    const aclError error = stream->synchronize(-1);
    if (!first) first = error;
  }
  return first;
}

// A process counts the devices that ASCEND_RT_VISIBLE_DEVICES lists; a container may count from another first one.
int32_t physical_device(int32_t device) {
  const char* visible = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  std::istringstream listed(visible ? visible : "");
  std::string entry;
  for (int32_t i = 0; std::getline(listed, entry, ','); i++)
    if (i == device) device = std::atoi(entry.c_str());
  return device + static_cast<int32_t>(setting("FIRST_DEVICE", 0L));
}

}  // namespace

extern "C" {

aclError aclInit(const char*) {
  static std::atomic<bool> done{false};
  return done.exchange(true) ? ACL_ERROR_REPEAT_INITIALIZE : ACL_SUCCESS;
}

aclError aclFinalize() { return ACL_SUCCESS; }

const char* aclrtGetSocName() {
  static const std::string name = setting("SOC", "Ascend910B1");  // Atlas A2
  return name.c_str();
}

aclError aclrtGetDeviceCount(uint32_t* devices) {
  *devices = static_cast<uint32_t>(device_count());
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return fail(kInvalidDevice, "there is no device %d", device);
  set_current_device(device);
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (current_device() < 0) return kContextNull;
  *device = current_device();
  return ACL_SUCCESS;
}

aclError aclrtGetPhyDevIdByLogicDevId(int32_t device, int32_t* physical) {
  if (device < 0 || device >= device_count()) return fail(kInvalidDevice, "there is no device %d", device);
  *physical = physical_device(device);
  return ACL_SUCCESS;
}

aclError aclrtGetLogicDevIdByUserDevId(int32_t user_device, int32_t* device) {
  *device = user_device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) { return synchronize_device(device); }

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (current_device() < 0) return kContextNull;
  *context = context_of(current_device(), true);
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  if (!context) return kContextNull;
  set_current_device(static_cast<Context*>(context)->device);
  return ACL_SUCCESS;
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (flags) *flags = 0;
  *active = current_device() == device || context_of(device, false) != nullptr;
  return ACL_SUCCESS;
}

aclError aclrtSynchronizeDevice() {
  if (current_device() < 0) return kContextNull;
  count(kSynchronizes);
  return synchronize_device(current_device());
}

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return aclrtSynchronizeDevice(); }

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t, int32_t) {
  *can = 1;
  return ACL_SUCCESS;
}

aclError aclrtDeviceEnablePeerAccess(int32_t, uint32_t) { return ACL_SUCCESS; }

// As of an Ascend 910B1: 24 cube cores, 48 vector cores, 192 MiB of L2.
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo info, int64_t* value) {
  *value = info == ACL_DEVICE_INFO_L2_SIZE ? 192 << 20 : info == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? 48 : 24;
  return ACL_SUCCESS;
}

aclError aclGetCannAttribute(aclCannAttr, int32_t* value) {
  *value = 1;
  return ACL_SUCCESS;
}

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }
aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }
aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }
aclError aclrtPeekAtLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }
aclError aclrtGetLastError(aclrtLastErrLevel) { return ACL_SUCCESS; }

aclError aclrtDeviceGetBareTgid(int32_t* process) {
  *process = getpid();
  return ACL_SUCCESS;
}

aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
  std::memset(version, 0, sizeof *version);
  std::strncpy(version->version, setting("CANN_VERSION", "9.0.0"), sizeof version->version - 1);
  return ACL_SUCCESS;
}

}  // extern "C"
