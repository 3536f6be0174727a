// SPDX-License-Identifier: Apache-2.0
// Counters of this process, read through ctypes.
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include "runtime.h"

namespace cann_on_host {
namespace {

// In the order of `enum Counter`.
constexpr std::array<const char*, kNumCounters> kNames = {
    "launches",
    "kernel_bytes",
    "copies_on_device",
    "copies_to_device",
    "copies_to_host",
    "copy_bytes_on_device",
    "copy_bytes_to_device",
    "copy_bytes_to_host",
    "unaligned_copies",
    "hccl_calls",
    "hccl_bytes",
    "event_records",
    "event_waits",
    "synchronizes",
    "adxl_connects",
    "adxl_transfers",
    "adxl_descriptors",
    "adxl_bytes",
};

std::array<std::atomic<uint64_t>, kNumCounters> values{};

struct Launches {
  std::mutex mutex;
  std::map<std::string, uint64_t> by_name;
};

Launches& launches() {
  static auto* instance = new Launches;
  return *instance;
}

}  // namespace

void count(Counter counter, uint64_t by) { values[counter] += by; }

void count_launch(const std::string& name, uint64_t bytes_written) {
  count(kLaunches);
  count(kKernelBytes, bytes_written);
  std::lock_guard<std::mutex> lock(launches().mutex);
  launches().by_name[name]++;
}

}  // namespace cann_on_host

using namespace cann_on_host;

extern "C" {

int cann_on_host_num_counters() { return kNumCounters; }

const char* cann_on_host_counter_name(int counter) { return kNames.at(static_cast<size_t>(counter)); }

uint64_t cann_on_host_counter(int counter) { return values.at(static_cast<size_t>(counter)); }

// "name count" lines of all launches by operator into `text`; returns the length that is needed.
size_t cann_on_host_launches(char* text, size_t room) {
  std::lock_guard<std::mutex> lock(launches().mutex);
  std::string lines;
  for (const auto& [name, times] : launches().by_name) lines += name + " " + std::to_string(times) + "\n";
  if (room > lines.size()) std::memcpy(text, lines.c_str(), lines.size() + 1);
  return lines.size() + 1;
}

void cann_on_host_reset_counters() {
  for (auto& value : values) value = 0;
  std::lock_guard<std::mutex> lock(launches().mutex);
  launches().by_name.clear();
}

// 0: device memory, 1: pinned host memory, 2: other host memory, 3: begins in a block and ends outside of it.
int cann_on_host_locate(const void* address, size_t bytes) { return static_cast<int>(locate(address, bytes)); }

}  // extern "C"
