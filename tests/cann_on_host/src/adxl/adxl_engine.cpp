// SPDX-License-Identifier: Apache-2.0
// libllm_datadist.so: transfers between the processes of one machine. The sender's thread moves the bytes, as an NPU's
// network would: a peer that is stopped is written to all the same.
#include "adxl_engine.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "../runtime/runtime.h"
#include "channels.h"
#include "link_faults.h"
#include "regions.h"

using namespace cann_on_host;

namespace adxl {
namespace {

constexpr std::chrono::milliseconds kHangPoll{5};

// Mooncake asks what CANN can: 1 and 1 as of CANN 9.1, 0 for older ones.
bool capability(FeatureType feature) {
  return setting(feature == AUTO_CONNECT ? "AUTO_CONNECT" : "CLIENT_SERVER", 1L) != 0;
}

bool is_set(const std::map<AscendString, AscendString>& options, const char* name, const char* value) {
  auto found = options.find(name);
  return found != options.end() && std::strstr(found->second.GetString(), value) != nullptr;
}

Deadline after(int32_t timeout_ms) { return std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms); }

std::string host_of(const std::string& engine) { return engine.substr(0, engine.rfind(':')); }

// HIXL's `hixl_cs_client.cc` and `transfer_pool.cc`: at its first connection a client takes this many slots of two
// streams, unless the option says otherwise (`hixl_options.cc`).
constexpr long kSlots = 128;
constexpr long kStreamsOfSlot = 2;

long slots_of(const std::map<AscendString, AscendString>& options) {
  static constexpr char kOption[] = "\"comm_resource_config.max_active_channels\"";
  for (const auto& [name, value] : options) {
    if (!std::strstr(name.GetString(), "GlobalResourceConfig")) continue;
    const char* found = std::strstr(value.GetString(), kOption);
    if (found) return std::strtol(found + sizeof kOption - 1 + std::strspn(found + sizeof kOption - 1, " :\""), nullptr, 10);
  }
  return kSlots;
}

// As HIXL's `GetDeviceIp`: what the file says, else, without the file, what hccn_tool prints. "": there is no address.
// `IPv6address_N` is not read.
std::string address_of(int32_t device) {
  static const std::string conf = setting("HCCN_CONF", "/etc/hccn.conf");
  std::string key = "address_" + std::to_string(device) + "=", line;
  if (std::ifstream file(conf); file) {
    while (std::getline(file, line))
      if (line.rfind(key, 0) == 0) return line.substr(key.size());
    return "";
  }
  key = "ipaddr:";
  FILE* tool = popen(("hccn_tool -i " + std::to_string(device) + " -ip -g 2>/dev/null").c_str(), "re");
  if (!tool) return "";
  char printed[256];
  std::string address;
  while (std::fgets(printed, sizeof printed, tool))
    if (std::string(printed).rfind(key, 0) == 0) address = printed + key.size();
  pclose(tool);
  return address;
}

Status refuse(Status status, const std::string& reason) {
  fail(static_cast<aclError>(status), "ADXL: %s", reason.c_str());
  return status;
}

}  // namespace

class AdxlEngine::AdxlEngineImpl {
 public:
  Status start(const std::string& name, const std::map<AscendString, AscendString>& options) {
    int32_t device = 0;
    if (aclrtGetDevice(&device) || aclrtGetPhyDevIdByLogicDevId(device, &device_))
      return refuse(PARAM_INVALID, "Initialize: no device is set in this thread");
    name_ = name;
    auto_connect_ = is_set(options, "AutoConnect", "1");
    client_server_ = is_set(options, "adxl.LocalCommRes", "1.3");
    if (client_server_ && address_of(device_).empty())  // even where all goes over HCCS: `BuildEndpointList`
      return refuse(FAILED, "Initialize: Failed to get device ip of device " + std::to_string(device_));
    logical_device_ = device;
    slots_ = slots_of(options);
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // lets other processes of this user write into this one
    listener_ = Listener::start(name, [this] {
      std::lock_guard<std::mutex> lock(mutex_);
      return Greeting{getpid(), client_server_, device_, regions_.list()};
    });
    return listener_ ? SUCCESS : refuse(FAILED, "Initialize: cannot listen as " + name);
  }

  void stop() {
    listener_.reset();
    std::lock_guard<std::mutex> lock(mutex_);
    channels_.clear();
    if (has_slots_) release_streams(logical_device_, kStreamsOfSlot * slots_);
    has_slots_ = false;
  }

  Status add(const MemDesc& memory, MemType type) {
    std::lock_guard<std::mutex> lock(mutex_);
    return regions_.add(memory.addr, memory.len, type == MEM_DEVICE);
  }

  Status remove(MemHandle handle) {
    std::lock_guard<std::mutex> lock(mutex_);
    return regions_.remove(reinterpret_cast<uintptr_t>(handle)) ? SUCCESS : PARAM_INVALID;
  }

  Status connect(const std::string& remote, int32_t timeout_ms) {
    count(kAdxlConnects);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (channels_.count(remote)) return ALREADY_CONNECTED;
    }
    if (!take_slots()) return refuse(FAILED, "the device has too few streams for " + std::to_string(slots_) + " slots");
    Status status;
    std::shared_ptr<Channel> channel = Channel::open(remote, after(timeout_ms), status);
    if (!channel) return refuse(status, "no channel to " + remote);
    if (channel->peer().client_server != client_server_)
      return refuse(FAILED, remote + " is another kind of engine (client/server or not)");
    if (!client_server_ && channel->peer().device == device_ && host_of(remote) == host_of(name_))
      return refuse(PARAM_INVALID, remote + " is on the same NPU");
    std::lock_guard<std::mutex> lock(mutex_);
    channels_[remote] = std::move(channel);
    return SUCCESS;
  }

  Status disconnect(const std::string& remote) {
    std::lock_guard<std::mutex> lock(mutex_);
    return channels_.erase(remote) ? SUCCESS : NOT_CONNECTED;
  }

  Status transfer(
      const std::string& remote, TransferOp operation, const std::vector<TransferOpDesc>& descriptors,
      int32_t timeout_ms) {
    const Deadline deadline = after(timeout_ms);
    count(kAdxlTransfers);
    count(kAdxlDescriptors, descriptors.size());
    std::shared_ptr<Channel> channel = channel_to(remote);
    if (channel && channel->is_closed()) {
      disconnect(remote);
      channel.reset();
      if (!auto_connect_) return refuse(FAILED, "the channel to " + remote + " is closed");
    }
    if (!channel) {
      if (!auto_connect_) return refuse(NOT_CONNECTED, "no channel to " + remote);
      if (const Status status = connect(remote, timeout_ms); status && status != ALREADY_CONNECTED) return status;
      channel = channel_to(remote);
      if (!channel) return NOT_CONNECTED;
    }
    // "AICPU launch failed": not even transfers to others heal then (vllm-ascend, issue 13934).
    if (!client_server_ && link_of(channel->peer().process).link == Link::kLost) lost_ = true;
    if (lost_) return refuse(FAILED, "transfer to " + remote + ": AICPU launch failed");
    if (const Status status = await_link(channel->peer().process, deadline)) {
      if (auto_connect_) disconnect(remote);
      return refuse(status, "transfer to " + remote);
    }
    if (const Status status = check(*channel, descriptors)) return status;
    return move(channel->peer().process, operation, descriptors);
  }

 private:
  bool take_slots() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (client_server_ && !has_slots_) has_slots_ = hold_streams(logical_device_, kStreamsOfSlot * slots_);
    return !client_server_ || has_slots_;
  }

  std::shared_ptr<Channel> channel_to(const std::string& remote) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = channels_.find(remote);
    return found == channels_.end() ? nullptr : found->second;
  }

  // Takes as long as the link to `process` does; not SUCCESS: nothing may be moved.
  static Status await_link(pid_t process, Deadline deadline) {
    LinkState state = link_of(process);
    for (; state.link == Link::kHang; state = link_of(process)) {
      if (std::chrono::steady_clock::now() >= deadline) return TIMEOUT;
      std::this_thread::sleep_for(kHangPoll);
    }
    if (state.link == Link::kRefuse || state.link == Link::kDown) return FAILED;
    if (state.link == Link::kSlow) {
      const auto done = std::chrono::steady_clock::now() + state.delay;
      std::this_thread::sleep_until(std::min(done, deadline));
      if (done > deadline) return TIMEOUT;
    }
    return SUCCESS;
  }

  Status check(const Channel& channel, const std::vector<TransferOpDesc>& descriptors) {
    const Regions remote(channel.peer().regions);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const TransferOpDesc& one : descriptors) {
      if (!regions_.cover(one.local_addr, one.len))
        return refuse(PARAM_INVALID, "a transfer of memory that is not registered here");
      if (!remote.cover(one.remote_addr, one.len))
        return refuse(PARAM_INVALID, "a transfer of memory that was not registered at the peer when the channel opened");
    }
    return SUCCESS;
  }

  static Status move(pid_t process, TransferOp operation, const std::vector<TransferOpDesc>& descriptors) {
    std::vector<iovec> local, remote;
    for (size_t begin = 0; begin < descriptors.size(); begin += IOV_MAX) {
      local.clear();
      remote.clear();
      size_t bytes = 0;
      for (size_t i = begin; i < std::min(begin + IOV_MAX, descriptors.size()); i++) {
        local.push_back({reinterpret_cast<void*>(descriptors[i].local_addr), descriptors[i].len});
        remote.push_back({reinterpret_cast<void*>(descriptors[i].remote_addr), descriptors[i].len});
        bytes += descriptors[i].len;
      }
      const auto call = operation == WRITE ? process_vm_writev : process_vm_readv;
      const ssize_t moved = call(process, local.data(), local.size(), remote.data(), remote.size(), 0);
      if (moved != static_cast<ssize_t>(bytes))
        return refuse(FAILED, std::string("a transfer ended early: ") + (moved < 0 ? std::strerror(errno) : "in part"));
      count(kAdxlBytes, bytes);
    }
    return SUCCESS;
  }

  std::string name_;
  bool auto_connect_ = false;
  bool client_server_ = false;
  int32_t device_ = 0;  // physical
  int32_t logical_device_ = 0;
  long slots_ = kSlots;
  std::atomic<bool> lost_{false};
  std::mutex mutex_;  // of the three below
  bool has_slots_ = false;
  Regions regions_;
  std::map<std::string, std::shared_ptr<Channel>> channels_;
  std::unique_ptr<Listener> listener_;
};

AdxlEngine::AdxlEngine() : impl_(new AdxlEngineImpl) {}
AdxlEngine::~AdxlEngine() = default;

Status AdxlEngine::Initialize(const AscendString& local_engine, const std::map<AscendString, AscendString>& options) {
  return impl_->start(local_engine.GetString(), options);
}

void AdxlEngine::Finalize() { impl_->stop(); }

Status AdxlEngine::RegisterMem(const MemDesc& memory, MemType type, MemHandle& handle) {
  handle = reinterpret_cast<MemHandle>(memory.addr);
  return impl_->add(memory, type);
}

Status AdxlEngine::DeregisterMem(MemHandle handle) { return impl_->remove(handle); }

Status AdxlEngine::Connect(const AscendString& remote_engine, int32_t timeout_ms) {
  return impl_->connect(remote_engine.GetString(), timeout_ms);
}

Status AdxlEngine::Disconnect(const AscendString& remote_engine, int32_t) {
  return impl_->disconnect(remote_engine.GetString());
}

Status AdxlEngine::TransferSync(
    const AscendString& remote_engine, TransferOp operation, const std::vector<TransferOpDesc>& descriptors,
    int32_t timeout_ms) {
  return impl_->transfer(remote_engine.GetString(), operation, descriptors, timeout_ms);
}

Status AdxlEngine::GetCapability(FeatureType feature, int32_t& value) {
  if (feature != AUTO_CONNECT && feature != CLIENT_SERVER_COMM) return UNSUPPORTED;
  value = capability(feature);
  return SUCCESS;
}

}  // namespace adxl
