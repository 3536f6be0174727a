// SPDX-License-Identifier: Apache-2.0
// adxl::AdxlEngine as libllm_datadist.so (CANN's HIXL) exports it: what Mooncake's transport for NPUs calls.
// Names, types and values are those of HIXL's public headers, include/adxl/.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "ascend_string.h"

namespace adxl {

using Status = uint32_t;
using AscendString = ge::AscendString;
using MemHandle = void*;

constexpr Status SUCCESS = 0;
constexpr Status PARAM_INVALID = 103900;
constexpr Status TIMEOUT = 103901;
constexpr Status NOT_CONNECTED = 103902;
constexpr Status ALREADY_CONNECTED = 103903;
constexpr Status UNSUPPORTED = 103905;
constexpr Status FAILED = 503900;
constexpr Status RESOURCE_EXHAUSTED = 203900;

enum MemType { MEM_DEVICE, MEM_HOST };
enum TransferOp { READ, WRITE };
enum FeatureType : int32_t { AUTO_CONNECT = 0, CLIENT_SERVER_COMM = 1 };

struct MemDesc {
  uintptr_t addr;
  size_t len;
  uint8_t reserved[128];
};

struct TransferOpDesc {
  uintptr_t local_addr;
  uintptr_t remote_addr;
  size_t len;
};

class AdxlEngine {
 public:
  AdxlEngine();
  ~AdxlEngine();
  Status Initialize(const AscendString& local_engine, const std::map<AscendString, AscendString>& options);
  void Finalize();
  Status RegisterMem(const MemDesc& memory, MemType type, MemHandle& handle);
  Status DeregisterMem(MemHandle handle);
  Status Connect(const AscendString& remote_engine, int32_t timeout_ms);
  Status Disconnect(const AscendString& remote_engine, int32_t timeout_ms);
  Status TransferSync(
      const AscendString& remote_engine, TransferOp operation, const std::vector<TransferOpDesc>& descriptors,
      int32_t timeout_ms);
  static Status GetCapability(FeatureType feature, int32_t& value);

 private:
  class AdxlEngineImpl;
  std::unique_ptr<AdxlEngineImpl> impl_;
};

}  // namespace adxl
