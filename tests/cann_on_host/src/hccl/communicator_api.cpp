// SPDX-License-Identifier: Apache-2.0
// HcclComm*: making communicators and asking about them.
#include <chrono>
#include <cstring>

#include "communicator.h"

using namespace cann_on_host;

namespace {

Communicator* get(HcclComm handle) { return static_cast<Communicator*>(handle); }

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
  const std::string name = config && config->hcclCommName[0] ? config->hcclCommName : "hccl_" + id;
  Communicator* communicator = Communicator::join(id, name, ranks, rank);
  if (!communicator) {
    fail(kRemoteError, "HCCL %s: not all of %u ranks joined in time", name.c_str(), ranks);
    return HCCL_E_TIMEOUT;
  }
  CANN_ON_HOST_LOG("joined %s", communicator->describe().c_str());
  *handle = communicator;
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* handle) {
  return HcclCommInitRootInfoConfig(ranks, info, rank, nullptr, handle);
}

HcclResult HcclCommDestroy(HcclComm handle) {
  delete get(handle);
  return HCCL_SUCCESS;
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
