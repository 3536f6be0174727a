// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <cstring>
#include <map>
#include <mutex>

#include "stream.h"

namespace cann_on_host {
namespace {

constexpr size_t kScribbleLimit = 64u << 20;  // larger blocks stay untouched, so that they cost no real memory

struct Block {
  size_t bytes;
  int device;
  bool on_device;
};

struct Blocks {
  std::mutex mutex;
  std::map<uintptr_t, Block> by_address;
  size_t device_bytes = 0;
};

Blocks& blocks() {
  static auto* instance = new Blocks;  // never destroyed: torch frees memory at exit
  return *instance;
}

const char* describe(Place place) {
  switch (place) {
    case Place::kDevice:
      return "device memory";
    case Place::kPinnedHost:
      return "pinned host memory";
    case Place::kUnknownHost:
      return "host memory";
    case Place::kOutOfBounds:
      return "out of bounds";
  }
  return "?";
}

}  // namespace

void add_block(void* address, size_t bytes, bool on_device) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  blocks().by_address[reinterpret_cast<uintptr_t>(address)] = {bytes, current_device(), on_device};
  if (on_device) blocks().device_bytes += bytes;
}

size_t remove_block(void* address) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  auto found = blocks().by_address.find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks().by_address.end()) return 0;
  const Block block = found->second;
  blocks().by_address.erase(found);
  if (block.on_device) blocks().device_bytes -= block.bytes;
  return block.bytes;
}

size_t device_bytes_used() {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  return blocks().device_bytes;
}

bool hold_device_memory(size_t bytes) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  if (blocks().device_bytes + bytes > device_bytes_total()) return false;
  blocks().device_bytes += bytes;
  return true;
}

void release_device_memory(size_t bytes) {
  std::lock_guard<std::mutex> lock(blocks().mutex);
  blocks().device_bytes -= bytes;
}

size_t device_bytes_total() {
  static const size_t total = static_cast<size_t>(setting("MEMORY_GB", 64L)) << 30;
  return total;
}

void scribble(void* address, size_t bytes) {
  if (bytes <= kScribbleLimit) std::memset(address, 0xCB, bytes);
}

Place locate(const void* address, size_t bytes, int* device) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(blocks().mutex);
  auto& all = blocks().by_address;
  auto block = all.upper_bound(begin);
  if (block == all.begin()) return Place::kUnknownHost;
  --block;
  if (begin - block->first >= block->second.bytes) return Place::kUnknownHost;
  if (device) *device = block->second.device;
  // Expandable segments: blocks that are mapped one after another count as one.
  uintptr_t end = block->first + block->second.bytes;
  auto next = block;
  while (begin + bytes > end && ++next != all.end() && next->first == end) end += next->second.bytes;
  if (begin + bytes > end) return Place::kOutOfBounds;
  return block->second.on_device ? Place::kDevice : Place::kPinnedHost;
}

void require_device(const void* address, size_t bytes, const std::string& user) {
  if (!bytes) return;
  const Place place = locate(address, bytes);
  if (place == Place::kDevice) return;
  fatal("%s: %zu bytes at %p are %s, must be device memory", user.c_str(), bytes, address, describe(place));
}

}  // namespace cann_on_host
