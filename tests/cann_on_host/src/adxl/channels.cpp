// SPDX-License-Identifier: Apache-2.0
#include "channels.h"

#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "../runtime/runtime.h"
#include "link_faults.h"

namespace cann_on_host {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kMagic = 0x4144584c00000002;  // "ADXL", version 2
constexpr milliseconds kPollEvery{10};

struct Header {
  uint64_t magic;
  int64_t process;
  uint64_t client_server;
  int64_t device;
  uint64_t regions;
};

int milliseconds_until(Deadline deadline) {
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  return left > 0 ? static_cast<int>(left) : 0;
}

// A socket that is bound to, or connecting to, the address in an engine's name; -1 with errno set.
int make_socket(const std::string& engine, bool listening) {
  const size_t colon = engine.rfind(':');
  if (colon == std::string::npos) return errno = EINVAL, -1;
  std::string host = engine.substr(0, colon);
  if (host.size() > 1 && host.front() == '[') host = host.substr(1, host.size() - 2);
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (getaddrinfo(host.c_str(), engine.c_str() + colon + 1, &hints, &found)) return errno = EINVAL, -1;
  const int fd = socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  int result = -1;
  if (fd >= 0 && listening) {
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    result = bind(fd, found->ai_addr, found->ai_addrlen) || listen(fd, 64) ? -1 : 0;
  } else if (fd >= 0) {
    result = connect(fd, found->ai_addr, found->ai_addrlen) && errno != EINPROGRESS ? -1 : 0;
  }
  const int error = errno;
  freeaddrinfo(found);
  if (fd >= 0 && result) close(fd);
  errno = error;
  return result ? -1 : fd;
}

bool wait_for(int fd, short events, Deadline deadline) {
  pollfd entry{fd, events, 0};
  return poll(&entry, 1, milliseconds_until(deadline)) == 1;
}

enum class Received { kAll, kClosed, kLate };

Received receive(int fd, void* into, size_t bytes, Deadline deadline) {
  for (char* at = static_cast<char*>(into); bytes;) {
    if (!wait_for(fd, POLLIN, deadline)) return Received::kLate;
    const ssize_t got = recv(fd, at, bytes, 0);
    if (got == 0 || (got < 0 && errno != EAGAIN)) return Received::kClosed;
    if (got > 0) at += got, bytes -= static_cast<size_t>(got);
  }
  return Received::kAll;
}

}  // namespace

std::unique_ptr<Channel> Channel::open(const std::string& engine, Deadline deadline, adxl::Status& status) {
  status = adxl::FAILED;
  const int fd = make_socket(engine, false);
  if (fd < 0) return nullptr;
  Greeting peer;
  Header header{};
  Received received = Received::kLate;
  if (wait_for(fd, POLLOUT, deadline)) {
    received = receive(fd, &header, sizeof header, deadline);
    if (received == Received::kAll && header.magic != kMagic) received = Received::kClosed;
    if (received == Received::kAll) {
      peer = {
          static_cast<pid_t>(header.process), header.client_server != 0, static_cast<int32_t>(header.device),
          std::vector<Region>(header.regions)};
      received = receive(fd, peer.regions.data(), header.regions * sizeof(Region), deadline);
    }
  }
  if (received == Received::kAll) {
    status = adxl::SUCCESS;
    return std::unique_ptr<Channel>(new Channel(fd, std::move(peer)));
  }
  if (received == Received::kLate) status = adxl::TIMEOUT;
  close(fd);
  return nullptr;
}

Channel::~Channel() { close(socket_); }

bool Channel::is_closed() const {
  char byte;
  const ssize_t got = recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN);
}

std::unique_ptr<Listener> Listener::start(const std::string& engine, std::function<Greeting()> greeting) {
  const int fd = make_socket(engine, true);
  return fd < 0 ? nullptr : std::unique_ptr<Listener>(new Listener(fd, std::move(greeting)));
}

Listener::Listener(int socket, std::function<Greeting()> greeting)
    : socket_(socket), greeting_(std::move(greeting)), thread_([this] { serve(); }) {}

Listener::~Listener() {
  stopping_ = true;
  thread_.join();
  close_channels();
  close(socket_);
}

void Listener::serve() {
  while (!stopping_) {
    pollfd entry{socket_, POLLIN, 0};
    const bool asked = poll(&entry, 1, static_cast<int>(kPollEvery.count())) == 1;
    const Link link = link_of(getpid()).link;
    if (link == Link::kDown) close_channels();
    if (!asked) continue;
    if (link == Link::kHang) {  // whoever connects waits
      std::this_thread::sleep_for(kPollEvery);
      continue;
    }
    const int fd = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    if (link == Link::kDown)
      close(fd);
    else
      greet(fd);
  }
}

void Listener::greet(int channel) {
  const Greeting greeting = greeting_();
  const Header header{
      kMagic, greeting.process, greeting.client_server, greeting.device,
      static_cast<uint64_t>(greeting.regions.size())};
  const size_t bytes = greeting.regions.size() * sizeof(Region);
  // At most 256 regions: it fits a socket's buffer.
  if (::send(channel, &header, sizeof header, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof header) &&
      ::send(channel, greeting.regions.data(), bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes))
    channels_.push_back(channel);
  else
    close(channel);
}

void Listener::close_channels() {
  for (const int channel : channels_) close(channel);
  channels_.clear();
}

}  // namespace cann_on_host
