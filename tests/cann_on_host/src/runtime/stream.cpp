// SPDX-License-Identifier: Apache-2.0
#include "stream.h"

#include <chrono>
#include <map>
#include <set>

namespace cann_on_host {
namespace {

thread_local int thread_device = -1;

struct Registry {
  std::mutex mutex;
  std::set<Stream*> streams;
  std::map<int, Stream*> default_streams;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: streams are used until the process ends
  return *instance;
}

int next_id() {
  static std::atomic<int> next{1};
  return next++;
}

bool is_first(int device) {
  static std::mutex mutex;
  static std::set<int> seen;
  std::lock_guard<std::mutex> lock(mutex);
  return seen.insert(device).second;
}

// Before every task, in microseconds.
struct Delays {
  std::atomic<long> first_stream{setting("DELAY_US", 0L)};
  std::atomic<long> side_streams{setting("DELAY_SIDE_US", first_stream)};
};

Delays& delays() {
  static Delays instance;
  return instance;
}

void delay(bool side_stream) {
  const long microseconds = side_stream ? delays().side_streams : delays().first_stream;
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace

void Event::reach(uint64_t record, aclError stream_error) {
  std::lock_guard<std::mutex> lock(mutex);
  reached = std::max(reached, record);
  error = stream_error;
  when = std::chrono::steady_clock::now();
  changed.notify_all();
}

aclError Event::wait(uint64_t record) {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return reached >= record; });
  return error;
}

Stream::Stream(int device) : device(device), id(next_id()), is_side(!is_first(device)) {
  thread_ = std::thread([this] { run(); });
}

Stream::~Stream() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  queued_.notify_one();
  thread_.join();
}

void Stream::push(TaskKind kind, const std::string& name, std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back({kind, name, std::move(work)});
  }
  queued_.notify_one();
}

void Stream::record(std::shared_ptr<Event> event) {
  uint64_t record;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    record = ++event->recorded;
    event->error = ACL_SUCCESS;
    event->marks = marks();
  }
  push(TaskKind::kEventRecord, "event record", [this, event, record] { event->reach(record, error()); });
}

// As on hardware, it waits for the latest record at the time of this call; none: it does not wait.
void Stream::wait_for(std::shared_ptr<Event> event) {
  uint64_t record;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    record = event->recorded;
    add_marks(event->marks);
  }
  push(TaskKind::kEventWait, "event wait", [event, record] {
    if (aclError error = event->wait(record)) throw TaskError(error, "the stream that it waits for has failed");
  });
}

void Stream::add_marks(const Marks& marks) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [what, number] : marks) marks_[what] = std::max(marks_[what], number);
}

Marks Stream::marks() {
  std::lock_guard<std::mutex> lock(mutex_);
  return marks_;
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.empty() && !busy_;
}

aclError Stream::synchronize(int timeout_ms) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto is_idle = [&] { return queue_.empty() && !busy_; };
  if (timeout_ms < 0) {
    drained_.wait(lock, is_idle);
  } else if (!drained_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_idle)) {
    return kStreamSyncTimeout;
  }
  return error_;
}

aclError Stream::error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return error_;
}

void Stream::set_stop_on_failure(bool stop) {
  std::lock_guard<std::mutex> lock(mutex_);
  stop_on_failure_ = stop;
}

void Stream::run() {
  thread_device = device;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    queued_.wait(lock, [&] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    Task task = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    // After a failure only records of events pass: they carry the error to whoever waits.
    const bool dropped = error_ != ACL_SUCCESS && stop_on_failure_ && task.kind != TaskKind::kEventRecord;
    lock.unlock();
    if (!dropped) execute(task);
    task = {};  // may hold the last reference to something: never under the lock
    lock.lock();
    busy_ = false;
    if (queue_.empty()) drained_.notify_all();
  }
}

void Stream::execute(const Task& task) {
  delay(is_side);
  aclError code = ACL_SUCCESS;
  std::string reason;
  try {
    switch (take_task_fault(task.kind, is_side)) {
      case Fault::kFail:
        throw TaskError(kAicoreException, "injected fault");
      case Fault::kHang:
        hang(task.name);
        break;
      case Fault::kNone:
        break;
    }
    task.work();
  } catch (const TaskError& error) {
    code = error.code;
    reason = error.what();
  } catch (const std::exception& error) {
    fatal("%s on stream %d: %s", task.name.c_str(), id, error.what());
  }
  if (code == ACL_SUCCESS) return;
  fail(code, "%s on stream %d failed: %s", task.name.c_str(), id, reason.c_str());
  std::lock_guard<std::mutex> lock(mutex_);
  if (error_ == ACL_SUCCESS) error_ = code;
}

int current_device() { return thread_device; }

void set_current_device(int device) { thread_device = device; }

int device_count() {
  static const int count = static_cast<int>(setting("DEVICES", 8L));
  return count;
}

namespace {

struct StreamsHeld {
  std::mutex mutex;
  std::map<int, long> by_device;
};

StreamsHeld& streams_held() {
  static auto* instance = new StreamsHeld;
  return *instance;
}

}  // namespace

long streams_left(int device) {
  static const long all = setting("STREAMS", 1984L);
  const auto made = static_cast<long>(streams_of(device).size());
  std::lock_guard<std::mutex> lock(streams_held().mutex);
  return all - made - streams_held().by_device[device];
}

bool hold_streams(int device, long streams) {
  if (streams_left(device) < streams) return false;
  std::lock_guard<std::mutex> lock(streams_held().mutex);
  streams_held().by_device[device] += streams;
  return true;
}

void release_streams(int device, long streams) {
  std::lock_guard<std::mutex> lock(streams_held().mutex);
  streams_held().by_device[device] -= streams;
}

Stream* create_stream(int device) {
  if (streams_left(device) < 1) return nullptr;
  auto* stream = new Stream(device);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().streams.insert(stream);
  return stream;
}

bool destroy_stream(Stream* stream) {
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    if (!registry().streams.erase(stream)) return false;
  }
  delete stream;
  return true;
}

Stream* resolve(aclrtStream stream) {
  Registry& all = registry();
  std::lock_guard<std::mutex> lock(all.mutex);
  if (stream) {
    auto* known = static_cast<Stream*>(stream);
    if (!all.streams.count(known)) fatal("stream %p does not exist", stream);
    return known;
  }
  const int device = std::max(thread_device, 0);
  Stream*& known = all.default_streams[device];
  if (!known) {
    known = new Stream(device);
    all.streams.insert(known);
  }
  return known;
}

std::vector<Stream*> streams_of(int device) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  std::vector<Stream*> found;
  for (auto* stream : registry().streams) {
    if (stream->device == device) found.push_back(stream);
  }
  return found;
}

void enqueue(aclrtStream stream, TaskKind kind, const std::string& name, std::function<void()> work) {
  resolve(stream)->push(kind, name, std::move(work));
}

void set_mark(aclrtStream stream, const void* what, uint64_t number) { resolve(stream)->add_marks({{what, number}}); }

uint64_t mark_of(aclrtStream stream, const void* what) { return resolve(stream)->marks()[what]; }

aclError synchronize(aclrtStream stream, int timeout_ms) { return resolve(stream)->synchronize(timeout_ms); }

}  // namespace cann_on_host

extern "C" {

void cann_on_host_set_delays(long first_stream_us, long side_streams_us) {
  cann_on_host::delays().first_stream = first_stream_us;
  cann_on_host::delays().side_streams = side_streams_us;
}

}  // extern "C"
