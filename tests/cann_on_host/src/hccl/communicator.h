// SPDX-License-Identifier: Apache-2.0
// An HCCL communicator between processes of one machine. Its control block is a shared mapping, its data goes
// through one file per rank; both live in memory (/dev/shm) and have no name once every rank has joined.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "../runtime/runtime.h"
#include "hccl/hccl.h"

namespace cann_on_host {

constexpr uint32_t kMaxRanks = 64;
constexpr aclError kRemoteError = 507035;  // what a stream reports when a collective ran into its timeout

// One rank's part of a collective, byte ranges per rank.
struct Exchange {
  std::vector<const char*> send;
  std::vector<uint64_t> send_bytes;
  std::vector<char*> receive;
  std::vector<uint64_t> receive_bytes;
};

class Communicator {
 public:
  // Returns nullptr when the other ranks do not join in time.
  static Communicator* join(const std::string& id, const HcclCommConfig& config, uint32_t size, uint32_t rank);
  ~Communicator();

  // All of the following run in tasks of a stream; they throw TaskError after the timeout, and end the process
  // when ranks call different operations or sizes, which on hardware would hang or corrupt memory.
  void exchange(const char* operation, const Exchange& parts);
  void barrier(const char* operation);
  void send(const char* data, uint64_t bytes, uint32_t to);
  void receive(char* data, uint64_t bytes, uint32_t from);

  std::string describe() const;
  HcclResult async_error() const { return async_error_; }

  const std::string name;
  const uint32_t size;
  const uint32_t rank;
  const int device;
  const bool aiv;          // runs its operations on vector cores
  const uint64_t memory;   // bytes of the device that it takes

 private:
  struct Shared;

  Communicator(const std::string& id, const HcclCommConfig& config, uint32_t size, uint32_t rank);
  bool open_all();
  std::string path(const std::string& what) const;
  std::string message_path(uint32_t from, uint32_t to, uint64_t number) const;
  [[noreturn]] void time_out(const char* operation, const std::string& missing);
  std::string missing_ranks() const;
  template <class Condition>
  bool wait(Condition condition) const;
  void write_all(int file, const char* data, uint64_t bytes, uint64_t offset) const;
  void read_all(int file, char* data, uint64_t bytes, uint64_t offset) const;

  const std::string id_;
  Shared* shared_ = nullptr;
  int own_file_ = -1;
  std::vector<int> files_;
  std::mutex mutex_;
  uint64_t sequence_ = 0;
  std::vector<uint64_t> sent_, received_;
  std::atomic<HcclResult> async_error_{HCCL_SUCCESS};
};

}  // namespace cann_on_host
