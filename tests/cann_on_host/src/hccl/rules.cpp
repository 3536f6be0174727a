// SPDX-License-Identifier: Apache-2.0
#include "rules.h"

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <stdexcept>

namespace cann_on_host {
namespace {

// Of HcclCommConfig::hcclOpExpansionMode.
enum Mode : uint32_t { kDefault = 0, kHost = 1, kAiCpu = 2, kAiv = 3, kAivOnly = 4 };

constexpr uint64_t kMegabyte = 1024 * 1024;

thread_local bool model_step = false;

struct Operation {
  uint64_t number;
  std::string name;
};

struct UnderWay {
  std::mutex mutex;
  std::map<const Communicator*, Operation> last;  // in mode AIV, that have not ended
  std::map<const Communicator*, uint64_t> numbers;
};

UnderWay& under_way() {
  static auto* instance = new UnderWay;  // never destroyed: streams run until the process ends
  return *instance;
}

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

}  // namespace

bool is_aiv(const HcclCommConfig& config) {
  const bool is_a2 = std::string(aclrtGetSocName()).rfind("Ascend910B", 0) == 0;
  switch (config.hcclOpExpansionMode) {
    case kAiv:
    case kAivOnly:
      return true;
    case kHost:
      if (is_a2) return false;
      break;  // not for Atlas A3
    case kAiCpu:
      if (!is_a2) return false;
      break;  // for Atlas A2 not before CANN 9.1
    default:
      break;
  }
  return std::string(environment("HCCL_OP_EXPANSION_MODE")) == "AIV";  // as without a mode of its own
}

uint64_t buffer_bytes(const HcclCommConfig& config) {
  uint64_t megabytes = config.hcclBufferSize;
  if (megabytes == HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET) {
    const char* given = environment("HCCL_BUFFSIZE");
    megabytes = *given ? std::strtoull(given, nullptr, 10) : HCCL_COMM_DEFAULT_BUFFSIZE;
  }
  return 2 * megabytes * kMegabyte;
}

bool in_model_step() { return model_step; }

std::shared_ptr<void> begin_aiv_operation(const Communicator& communicator, const std::string& operation,
                                          aclrtStream stream) {
  // What else HCCL offers does not run on vector cores.
  static const std::set<std::string> known = {"HcclAllReduce", "HcclReduceScatter", "HcclAllGather",
                                              "HcclBroadcast", "HcclAlltoAll",      "HcclAlltoAllV"};
  if (!communicator.aiv || communicator.size < 2 || !known.count(operation)) return nullptr;
  const Communicator* own = &communicator;
  std::lock_guard<std::mutex> lock(under_way().mutex);
  for (const auto& [other, last] : under_way().last) {
    if (other == own || other->device != own->device || mark_of(stream, other) >= last.number) continue;
    throw std::runtime_error(operation + " of " + own->describe() + " may run at the same time as " + last.name +
                             " of " + other->describe() +
                             ": HCCL does not support several communicators in mode AIV at a time, they deadlock");
  }
  const uint64_t number = ++under_way().numbers[own];
  under_way().last[own] = {number, operation};
  set_mark(stream, own, number);
  return std::shared_ptr<void>(nullptr, [own, number](void*) {
    std::lock_guard<std::mutex> lock(under_way().mutex);
    const auto last = under_way().last.find(own);
    if (last != under_way().last.end() && last->second.number == number) under_way().last.erase(last);
  });
}

}  // namespace cann_on_host

extern "C" {

void cann_on_host_set_model_step(int running) { cann_on_host::model_step = running != 0; }

}  // extern "C"
