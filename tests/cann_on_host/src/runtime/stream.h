// SPDX-License-Identifier: Apache-2.0
// A stream is a thread that runs its tasks in order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"

namespace cann_on_host {

using Marks = std::map<const void*, uint64_t>;  // see set_mark

// One recording point of an event, shared with the tasks that reach it or wait for it, so that an event may be
// recorded again or destroyed while they are queued.
struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;  // how often
  uint64_t reached = 0;
  aclError error = ACL_SUCCESS;  // of the stream that it was recorded on
  std::chrono::steady_clock::time_point when;
  Marks marks;  // of the stream that it was last recorded on

  void reach(uint64_t record, aclError stream_error);
  aclError wait(uint64_t record);  // the error, if any
};

class Stream {
 public:
  explicit Stream(int device);
  ~Stream();  // runs what is queued, then ends

  void push(TaskKind kind, const std::string& name, std::function<void()> work);
  void record(std::shared_ptr<Event> event);
  void wait_for(std::shared_ptr<Event> event);
  void add_marks(const Marks& marks);
  Marks marks();
  bool idle();
  aclError synchronize(int timeout_ms);
  aclError error();
  void set_stop_on_failure(bool stop);

  const int device;
  const int id;         // from 1; unique in the process
  const bool is_side;   // not the first stream of its device: torch_npu creates its default stream first

 private:
  struct Task {
    TaskKind kind;
    std::string name;
    std::function<void()> work;
  };
  void run();
  void execute(const Task& task);

  std::mutex mutex_;
  std::condition_variable queued_, drained_;
  std::deque<Task> queue_;
  Marks marks_;  // that what is queued next comes after
  bool busy_ = false;
  bool ending_ = false;
  bool stop_on_failure_ = false;
  aclError error_ = ACL_SUCCESS;
  std::thread thread_;
};

// The device that is current in this thread, -1 before aclrtSetDevice.
int current_device();
void set_current_device(int device);
int device_count();

Stream* create_stream(int device);  // nullptr: the device has no stream left
bool destroy_stream(Stream* stream);  // false: there is no such stream
Stream* resolve(aclrtStream stream);  // nullptr: the current device's default stream
std::vector<Stream*> streams_of(int device);

}  // namespace cann_on_host
