// SPDX-License-Identifier: Apache-2.0
#include "regions.h"

#include "../runtime/runtime.h"

namespace cann_on_host {
namespace {

// Device memory that is registered for HCCS begins at a multiple of 2 MiB (Mooncake's guide to its Ascend transport).
constexpr uint64_t kAlignment = 2u << 20;
// What HIXL's guide allows with its communication engine.
constexpr size_t kMaxRegions = 256;

adxl::Status refuse(adxl::Status status, const char* reason, uintptr_t address, size_t bytes) {
  fail(static_cast<aclError>(status), "ADXL RegisterMem of %zu bytes at %#zx: %s", bytes, address, reason);
  return status;
}

}  // namespace

Regions::Regions(const std::vector<Region>& regions) {
  for (const Region& region : regions) by_address_[region.address] = {region, 1};
}

adxl::Status Regions::add(uintptr_t address, size_t bytes, bool on_device) {
  const Place place = locate(reinterpret_cast<const void*>(address), bytes);
  if (!bytes) return refuse(adxl::PARAM_INVALID, "no bytes", address, bytes);
  if (on_device && place != Place::kDevice)
    return refuse(adxl::PARAM_INVALID, "not inside one block of device memory", address, bytes);
  if (!on_device && place != Place::kPinnedHost)
    return refuse(adxl::PARAM_INVALID, "host memory that the runtime does not know", address, bytes);
  if (on_device && address % kAlignment)
    return refuse(adxl::PARAM_INVALID, "device memory must begin at a multiple of 2 MiB", address, bytes);
  auto next = by_address_.lower_bound(address);
  if (next != by_address_.end() && next->first == address && next->second.region.bytes == bytes) {
    next->second.times++;
    return adxl::SUCCESS;
  }
  const bool overlaps_next = next != by_address_.end() && next->first < address + bytes;
  bool overlaps_previous = false;
  if (next != by_address_.begin()) {
    const Region& previous = std::prev(next)->second.region;
    overlaps_previous = previous.address + previous.bytes > address;
  }
  if (overlaps_next || overlaps_previous)
    return refuse(adxl::PARAM_INVALID, "it overlaps registered memory without being equal to it", address, bytes);
  if (by_address_.size() >= kMaxRegions)
    return refuse(adxl::RESOURCE_EXHAUSTED, "256 regions are registered already", address, bytes);
  // The guide documents a limit that the code does not check. 0: none here, too.
  static const uint64_t most = static_cast<uint64_t>(setting("REGISTERED_MB", 0L)) << 20;
  if (most && on_device && device_bytes_ + bytes > most)
    return refuse(adxl::RESOURCE_EXHAUSTED, "more device memory in all than may be registered", address, bytes);
  if (on_device) device_bytes_ += bytes;
  by_address_[address] = {{address, bytes, on_device}, 1};
  return adxl::SUCCESS;
}

bool Regions::remove(uintptr_t address) {
  auto found = by_address_.find(address);
  if (found == by_address_.end()) return false;
  if (--found->second.times) return true;
  if (found->second.region.on_device) device_bytes_ -= found->second.region.bytes;
  by_address_.erase(found);
  return true;
}

bool Regions::cover(uintptr_t address, size_t bytes) const {
  auto next = by_address_.upper_bound(address);
  if (next == by_address_.begin()) return false;
  const Region& region = std::prev(next)->second.region;
  return address + bytes <= region.address + region.bytes;
}

std::vector<Region> Regions::list() const {
  std::vector<Region> regions;
  for (const auto& [address, entry] : by_address_) regions.push_back(entry.region);
  return regions;
}

}  // namespace cann_on_host
