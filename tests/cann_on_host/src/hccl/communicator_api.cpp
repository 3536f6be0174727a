// SPDX-License-Identifier: Apache-2.0
// HcclComm*: making communicators and asking about them.
#include <chrono>
#include <cstring>

#include <set>

#include "communicator.h"
#include "rules.h"

using namespace cann_on_host;

namespace {

Communicator* get(HcclComm handle) { return static_cast<Communicator*>(handle); }

struct Communicators {
  std::mutex mutex;
  std::set<Communicator*> all;
};

Communicators& communicators() {
  static auto* instance = new Communicators;
  return *instance;
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<int> number{0};
  const auto now = std::chrono::system_clock::now().time_since_epoch().count();
  std::memset(info, 0, sizeof *info);
  std::snprintf(info->internal, 64, "%d.%d.%llx", getpid(), number++, static_cast<unsigned long long>(now));
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank,
                                      const HcclCommConfig* config, HcclComm* handle) {
  if (ranks > kMaxRanks || rank >= ranks) return HCCL_E_PARA;
  const std::string id = info->internal;
  if (in_model_step()) {
    fail(kParamInvalid, "HCCL: communicator %s of %u ranks connects on the thread that runs a model's step, which waits",
         config->hcclUdi, ranks);
    return HCCL_E_INTERNAL;
  }
  if (!hold_device_memory(buffer_bytes(*config))) {
    fail(kMemoryAllocation, "HCCL: no %lu bytes of device memory for a communicator's buffers", buffer_bytes(*config));
    return HCCL_E_MEMORY;
  }
  Communicator* communicator = Communicator::join(id, *config, ranks, rank);
  if (!communicator) {
    release_device_memory(buffer_bytes(*config));
    fail(kRemoteError, "HCCL %s: not all of %u ranks joined in time", id.c_str(), ranks);
    return HCCL_E_TIMEOUT;
  }
  CANN_ON_HOST_LOG("joined %s", communicator->describe().c_str());
  std::lock_guard<std::mutex> lock(communicators().mutex);
  communicators().all.insert(communicator);
  *handle = communicator;
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* handle) {
  HcclCommConfig config;
  HcclCommConfigInit(&config);
  return HcclCommInitRootInfoConfig(ranks, info, rank, &config, handle);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  {
    std::lock_guard<std::mutex> lock(communicators().mutex);
    communicators().all.erase(get(handle));
  }
  release_device_memory(get(handle)->memory);
  delete get(handle);
  return HCCL_SUCCESS;
}

// "name<tab>bytes<tab>1 for mode AIV" lines of all communicators into `text`; returns the length that is needed.
size_t cann_on_host_communicators(char* text, size_t room) {
  std::lock_guard<std::mutex> lock(communicators().mutex);
  std::string lines;
  for (const Communicator* each : communicators().all) {
    lines += each->name + "\t" + std::to_string(each->memory) + "\t" + std::to_string(each->aiv) + "\n";
  }
  if (room > lines.size()) std::memcpy(text, lines.c_str(), lines.size() + 1);
  return lines.size() + 1;
}

HcclResult HcclGetRankSize(HcclComm handle, uint32_t* ranks) {
  *ranks = get(handle)->size;
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm handle, uint32_t* rank) {
  *rank = get(handle)->rank;
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm handle, char* name) {
  std::snprintf(name, COMM_NAME_MAX_LENGTH, "%s", get(handle)->name.c_str());
  return HCCL_SUCCESS;
}

// torch_npu's watchdog asks for it.
HcclResult HcclGetCommAsyncError(HcclComm handle, HcclResult* error) {
  *error = get(handle)->async_error();
  return HCCL_SUCCESS;
}

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

HcclResult HcclGetConfig(HcclConfig, HcclConfigValue* value) {
  value->value = 0;
  return HCCL_SUCCESS;
}

}  // extern "C"
