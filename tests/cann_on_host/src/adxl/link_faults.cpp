// SPDX-License-Identifier: Apache-2.0
#include "link_faults.h"

#include <cstring>
#include <fstream>
#include <string>

#include "../runtime/runtime.h"

namespace cann_on_host {

LinkState link_of(pid_t process) {
  static const std::string folder = setting("LINKS", "/dev/shm/cann_on_host_links");
  std::ifstream file(folder + "/" + std::to_string(process));
  std::string word;
  if (!(file >> word)) return {};
  if (word == "hang") return {Link::kHang};
  if (word == "refuse") return {Link::kRefuse};
  if (word == "down") return {Link::kDown};
  if (word == "lost") return {Link::kLost};
  long milliseconds = 0;
  if (word == "slow" && file >> milliseconds) return {Link::kSlow, std::chrono::milliseconds(milliseconds)};
  fatal("%s/%d: %s is no fault of a link", folder.c_str(), process, word.c_str());
}

}  // namespace cann_on_host
