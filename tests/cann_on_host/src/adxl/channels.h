// SPDX-License-Identifier: Apache-2.0
// Channels between engines: a TCP connection to the port in an engine's name. The engine tells its process and its
// registered memory when a channel opens; a channel that either side closes is gone for both.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "regions.h"

namespace cann_on_host {

using Deadline = std::chrono::steady_clock::time_point;

// What an engine says when a channel to it opens.
struct Greeting {
  pid_t process;
  bool client_server;  // which kind of engine it is: only equal kinds connect
  int32_t device;      // physical number of its NPU
  std::vector<Region> regions;
};

class Channel {
 public:
  // Opens one to `engine` ("host:port" or "[host]:port"). `status`: why there is none.
  static std::unique_ptr<Channel> open(const std::string& engine, Deadline deadline, adxl::Status& status);
  ~Channel();

  bool is_closed() const;
  const Greeting& peer() const { return peer_; }

 private:
  Channel(int socket, Greeting peer) : socket_(socket), peer_(std::move(peer)) {}

  const int socket_;
  const Greeting peer_;
};

// Listens on an engine's port, on a thread of its own.
class Listener {
 public:
  // nullptr: the port is taken, or the name is none.
  static std::unique_ptr<Listener> start(const std::string& engine, std::function<Greeting()> greeting);
  ~Listener();

 private:
  Listener(int socket, std::function<Greeting()> greeting);
  void serve();
  void greet(int channel);
  void close_channels();

  const int socket_;
  const std::function<Greeting()> greeting_;
  std::vector<int> channels_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace cann_on_host
