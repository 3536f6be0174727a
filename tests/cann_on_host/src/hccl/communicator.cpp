// SPDX-License-Identifier: Apache-2.0
#include "communicator.h"

#include "rules.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstring>

namespace cann_on_host {

// Mapped by every rank; begins as zeros.
struct Communicator::Shared {
  std::atomic<uint32_t> joined;
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> generation;
  std::atomic<uint64_t> barriers[kMaxRanks];  // how many this rank has reached: names the missing ones
  struct Offer {
    char operation[32];
    uint64_t sequence;
    uint64_t offset[kMaxRanks];
    uint64_t bytes[kMaxRanks];
  } offers[kMaxRanks];
};

namespace {

std::chrono::seconds timeout() {
  static const long seconds = setting("HCCL_TIMEOUT_S", 60L);
  return std::chrono::seconds(seconds);
}

// torch_npu's name for it, with the one that its user gave.
std::string name_of(const std::string& id, const HcclCommConfig& config) {
  std::string name = config.hcclCommName[0] ? config.hcclCommName : "hccl_" + id;
  if (config.hcclUdi[0]) name += std::string(" (") + config.hcclUdi + ")";
  return name;
}

int calling_device() {
  int32_t device = 0;
  return aclrtGetDevice(&device) == ACL_SUCCESS ? device : 0;
}

}  // namespace

Communicator* Communicator::join(const std::string& id, const HcclCommConfig& config, uint32_t size, uint32_t rank) {
  auto* communicator = new Communicator(id, config, size, rank);
  if (communicator->open_all()) return communicator;
  delete communicator;
  return nullptr;
}

Communicator::Communicator(const std::string& id, const HcclCommConfig& config, uint32_t size, uint32_t rank)
    : name(name_of(id, config)),
      size(size),
      rank(rank),
      device(calling_device()),
      aiv(is_aiv(config)),
      memory(buffer_bytes(config)),
      id_(id),
      sent_(size),
      received_(size) {}

Communicator::~Communicator() {
  for (int file : files_) close(file);
  if (own_file_ >= 0) close(own_file_);
  if (shared_) munmap(shared_, sizeof(Shared));
}

bool Communicator::open_all() {
  const int control = open(path("control").c_str(), O_RDWR | O_CREAT, 0600);
  if (control < 0 || ftruncate(control, sizeof(Shared))) fatal("HCCL cannot use %s", path("control").c_str());
  shared_ = static_cast<Shared*>(mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, control, 0));
  close(control);
  if (shared_ == MAP_FAILED) fatal("HCCL cannot map %s", path("control").c_str());
  own_file_ = open(path(std::to_string(rank)).c_str(), O_RDWR | O_CREAT, 0600);

  shared_->joined++;
  const bool complete = wait([&] { return shared_->joined == size; });
  if (complete) {
    for (uint32_t i = 0; i < size; i++) files_.push_back(open(path(std::to_string(i)).c_str(), O_RDONLY));
    barrier("HcclCommInit");
  }
  unlink(path(std::to_string(rank)).c_str());
  if (rank == 0 || !complete) unlink(path("control").c_str());
  return complete;
}

std::string Communicator::path(const std::string& what) const {
  return std::string(setting("HCCL_DIR", "/dev/shm")) + "/cann_on_host." + id_ + "." + what;
}

std::string Communicator::message_path(uint32_t from, uint32_t to, uint64_t number) const {
  return path("message." + std::to_string(from) + "." + std::to_string(to) + "." + std::to_string(number));
}

std::string Communicator::describe() const {
  return name + " rank " + std::to_string(rank) + " of " + std::to_string(size);
}

template <class Condition>
bool Communicator::wait(Condition condition) const {
  const auto deadline = std::chrono::steady_clock::now() + timeout();
  for (int spins = 0; !condition(); spins++) {
    if (spins < 64) {
      sched_yield();
    } else {
      usleep(50);
    }
    if (std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

void Communicator::time_out(const char* operation, const std::string& missing) {
  async_error_ = HCCL_E_TIMEOUT;
  throw TaskError(kRemoteError, std::string("HCCL ") + describe() + ": " + operation + " timed out after " +
                                    std::to_string(timeout().count()) + " s, missing: " + missing);
}

std::string Communicator::missing_ranks() const {
  std::string missing;
  for (uint32_t i = 0; i < size; i++) {
    if (shared_->barriers[i] >= shared_->barriers[rank]) continue;
    missing += (missing.empty() ? "rank " : ", rank ") + std::to_string(i);
  }
  return missing;
}

void Communicator::barrier(const char* operation) {
  const uint32_t generation = shared_->generation;
  shared_->barriers[rank]++;
  if (shared_->arrived.fetch_add(1) + 1 == size) {
    shared_->arrived = 0;
    shared_->generation++;
    return;
  }
  if (!wait([&] { return shared_->generation != generation; })) time_out(operation, missing_ranks());
}

void Communicator::exchange(const char* operation, const Exchange& parts) {
  std::lock_guard<std::mutex> lock(mutex_);
  Shared::Offer& own = shared_->offers[rank];
  std::snprintf(own.operation, sizeof own.operation, "%s", operation);
  own.sequence = ++sequence_;
  uint64_t offset = 0;
  for (uint32_t j = 0; j < size; j++) {
    own.bytes[j] = parts.send_bytes[j];
    if (j && parts.send[j] == parts.send[j - 1] && parts.send_bytes[j] == parts.send_bytes[j - 1]) {
      own.offset[j] = own.offset[j - 1];  // the same data for all
      continue;
    }
    own.offset[j] = offset;
    write_all(own_file_, parts.send[j], parts.send_bytes[j], offset);
    offset += parts.send_bytes[j];
  }
  barrier(operation);
  for (uint32_t i = 0; i < size; i++) {
    const Shared::Offer& offer = shared_->offers[i];
    if (std::strcmp(offer.operation, operation) || offer.sequence != sequence_) {
      fatal("HCCL %s: %s number %lu meets %s number %lu of rank %u", describe().c_str(), operation, sequence_,
            offer.operation, offer.sequence, i);
    }
    if (offer.bytes[rank] != parts.receive_bytes[i]) {
      fatal("HCCL %s: %s expects %lu bytes of rank %u, which sends %lu", describe().c_str(), operation,
            parts.receive_bytes[i], i, offer.bytes[rank]);
    }
    read_all(files_[i], parts.receive[i], parts.receive_bytes[i], offer.offset[rank]);
  }
  barrier(operation);
  if (ftruncate(own_file_, 0)) fatal("HCCL %s: ftruncate", describe().c_str());
}

// A message is a file that appears whole, by a rename.
void Communicator::send(const char* data, uint64_t bytes, uint32_t to) {
  const std::string target = message_path(rank, to, sent_[to]++);
  const std::string unfinished = target + ".tmp";
  const int file = open(unfinished.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (file < 0) fatal("HCCL cannot use %s", unfinished.c_str());
  write_all(file, data, bytes, 0);
  close(file);
  if (std::rename(unfinished.c_str(), target.c_str())) fatal("HCCL cannot use %s", target.c_str());
}

void Communicator::receive(char* data, uint64_t bytes, uint32_t from) {
  const std::string source = message_path(from, rank, received_[from]++);
  int file = -1;
  if (!wait([&] { return (file = open(source.c_str(), O_RDONLY)) >= 0; })) {
    time_out("HcclRecv", "rank " + std::to_string(from));
  }
  struct stat status;
  fstat(file, &status);
  if (static_cast<uint64_t>(status.st_size) != bytes) {
    fatal("HCCL %s: HcclRecv of %lu bytes meets a message of %ld from rank %u", describe().c_str(), bytes,
          static_cast<long>(status.st_size), from);
  }
  read_all(file, data, bytes, 0);
  close(file);
  unlink(source.c_str());
}

void Communicator::write_all(int file, const char* data, uint64_t bytes, uint64_t offset) const {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t written = pwrite(file, data + done, bytes - done, static_cast<off_t>(offset + done));
    if (written <= 0) fatal("HCCL %s: cannot write (is /dev/shm full?)", describe().c_str());
    done += static_cast<uint64_t>(written);
  }
}

void Communicator::read_all(int file, char* data, uint64_t bytes, uint64_t offset) const {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t got = pread(file, data + done, bytes - done, static_cast<off_t>(offset + done));
    if (got <= 0) fatal("HCCL %s: short read", describe().c_str());
    done += static_cast<uint64_t>(got);
  }
}

}  // namespace cann_on_host
