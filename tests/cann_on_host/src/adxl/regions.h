// SPDX-License-Identifier: Apache-2.0
// Registered memory, and the rules for registering it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "adxl_engine.h"

namespace cann_on_host {

struct Region {
  uint64_t address;
  uint64_t bytes;
  uint64_t on_device;
};

class Regions {
 public:
  Regions() = default;
  explicit Regions(const std::vector<Region>& regions);

  adxl::Status add(uintptr_t address, size_t bytes, bool on_device);
  bool remove(uintptr_t address);
  bool cover(uintptr_t address, size_t bytes) const;
  std::vector<Region> list() const;

 private:
  struct Entry {
    Region region;
    int times;  // how often exactly this region was registered
  };
  std::map<uint64_t, Entry> by_address_;
  uint64_t device_bytes_ = 0;
};

}  // namespace cann_on_host
