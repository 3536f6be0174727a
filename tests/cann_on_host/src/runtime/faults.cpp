// SPDX-License-Identifier: Apache-2.0
// Injected faults: `where:what@n`, several separated by commas.
//   where: task (kernels and copies), side-task (the same on streams other than the device's first), hccl (calls)
//   what:  fail, hang
//   n:     the n-th from now on, from 1; 1 if it is left out
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <vector>

#include "runtime.h"

namespace cann_on_host {
namespace {

enum class Where { kTask, kSideTask, kHccl };

struct Pending {
  Where where;
  Fault what;
  long remaining;
};

struct Faults {
  std::mutex mutex;
  std::condition_variable cleared;
  std::vector<Pending> pending;
  uint64_t generation = 0;
};

bool parse(const std::string& text, Pending* fault) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return false;
  const size_t at = text.find('@', colon);
  const std::string where = text.substr(0, colon);
  const std::string what = text.substr(colon + 1, at == std::string::npos ? at : at - colon - 1);
  if (where == "task") {
    fault->where = Where::kTask;
  } else if (where == "side-task") {
    fault->where = Where::kSideTask;
  } else if (where == "hccl") {
    fault->where = Where::kHccl;
  } else {
    return false;
  }
  if (what != "fail" && what != "hang") return false;
  fault->what = what == "fail" ? Fault::kFail : Fault::kHang;
  char* end = nullptr;
  fault->remaining = at == std::string::npos ? 1 : std::strtol(text.c_str() + at + 1, &end, 10);
  return fault->remaining >= 1 && (!end || !*end);
}

bool parse_all(const std::string& text, std::vector<Pending>* faults) {
  size_t begin = 0;
  while (begin < text.size()) {
    size_t end = std::min(text.find(',', begin), text.size());
    Pending fault;
    if (!parse(text.substr(begin, end - begin), &fault)) return false;
    faults->push_back(fault);
    begin = end + 1;
  }
  return true;
}

Faults& faults() {
  static Faults* instance = [] {
    auto* made = new Faults;
    const char* text = setting("FAULTS", "");
    if (!parse_all(text, &made->pending)) fatal("CANN_ON_HOST_FAULTS=%s cannot be understood", text);
    return made;
  }();
  return *instance;
}

template <class Matches>
Fault take(Matches matches) {
  Faults& all = faults();
  std::lock_guard<std::mutex> lock(all.mutex);
  Fault taken = Fault::kNone;
  for (auto fault = all.pending.begin(); fault != all.pending.end();) {
    if (matches(fault->where) && --fault->remaining == 0) {
      taken = fault->what;
      fault = all.pending.erase(fault);
    } else {
      ++fault;
    }
  }
  return taken;
}

}  // namespace

Fault take_task_fault(TaskKind kind, bool side_stream) {
  if (kind != TaskKind::kKernel && kind != TaskKind::kCopy) return Fault::kNone;
  return take([&](Where where) { return where == Where::kTask || (where == Where::kSideTask && side_stream); });
}

Fault take_hccl_fault() {
  return take([](Where where) { return where == Where::kHccl; });
}

void hang(const std::string& name) {
  static const long seconds = setting("OP_TIMEOUT_S", 60L);
  std::fprintf(stderr, "[cann_on_host %d] injected fault: %s hangs\n", getpid(), name.c_str());
  Faults& all = faults();
  std::unique_lock<std::mutex> lock(all.mutex);
  const uint64_t generation = all.generation;
  auto released = [&] { return all.generation != generation; };
  if (!all.cleared.wait_for(lock, std::chrono::seconds(seconds), released)) {
    throw TaskError(kAicoreTimeout, "injected fault: hung for " + std::to_string(seconds) + " s");
  }
}

}  // namespace cann_on_host

extern "C" {

// 0, or -1 if the text cannot be understood; see the top of this file.
int cann_on_host_inject(const char* text) {
  std::vector<cann_on_host::Pending> more;
  if (!cann_on_host::parse_all(text, &more)) return -1;
  auto& all = cann_on_host::faults();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.pending.insert(all.pending.end(), more.begin(), more.end());
  return 0;
}

// Forgets faults that have not struck, and lets go on what hangs.
void cann_on_host_clear_faults() {
  auto& all = cann_on_host::faults();
  std::lock_guard<std::mutex> lock(all.mutex);
  all.pending.clear();
  all.generation++;
  all.cleared.notify_all();
}

}  // extern "C"
