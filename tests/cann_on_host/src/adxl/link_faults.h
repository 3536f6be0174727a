// SPDX-License-Identifier: Apache-2.0
// Faults of a process's network link, ordered by a file that names it, so that any process can order them:
// <CANN_ON_HOST_LINKS or /dev/shm/cann_on_host_links>/<pid of the process that is written to>.
#pragma once

#include <sys/types.h>

#include <chrono>

namespace cann_on_host {

enum class Link {
  kWell,
  kHang,    // transfers to it and connections to it wait for their timeout
  kSlow,    // transfers to it take `delay` longer
  kRefuse,  // transfers to it fail at once
  kDown,    // it closes its channels and takes no new ones
  kLost,    // of the comm engine: the sender that meets it never transfers anything again
};

struct LinkState {
  Link link = Link::kWell;
  std::chrono::milliseconds delay{0};
};

// The file says "hang", "slow MILLISECONDS", "refuse", "down" or "lost"; no file: the link is well.
LinkState link_of(pid_t process);

}  // namespace cann_on_host
