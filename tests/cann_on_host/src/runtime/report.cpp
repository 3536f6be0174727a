// SPDX-License-Identifier: Apache-2.0
// Settings, messages and errors.
#include <sys/types.h>

#include <atomic>
#include <cstdarg>
#include <cstdlib>
#include <cstring>

#include "acl/acl.h"
#include "runtime.h"

namespace cann_on_host {
namespace {

thread_local char recent_message[1024];

}  // namespace

const char* setting(const char* name, const char* fallback) {
  const char* value = std::getenv((std::string("CANN_ON_HOST_") + name).c_str());
  return value && *value ? value : fallback;
}

long setting(const char* name, long fallback) {
  const char* value = setting(name, "");
  if (!*value) return fallback;
  char* end = nullptr;
  long number = std::strtol(value, &end, 10);
  if (*end) fatal("CANN_ON_HOST_%s=%s is not a number", name, value);
  return number;
}

bool logging() {
  static const bool on = setting("LOG", 0L) != 0;
  return on;
}

aclError fail(aclError code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(recent_message, sizeof recent_message, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "[cann_on_host %d] error %d: %s\n", getpid(), code, recent_message);
  return code;
}

void fatal(const char* format, ...) {
  char message[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  std::fprintf(stderr, "[cann_on_host %d] fatal: %s\n", getpid(), message);
  std::fflush(stderr);
  std::abort();
}

}  // namespace cann_on_host

extern "C" {

const char* aclGetRecentErrMsg() { return cann_on_host::recent_message; }

void aclAppLog(aclLogLevel level, const char*, const char* file, uint32_t line, const char* format, ...) {
  static const long minimum = cann_on_host::setting("APP_LOG", 9L);
  if (static_cast<long>(level) < minimum) return;
  char message[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  const char* name = std::strrchr(file, '/');
  std::fprintf(stderr, "[torch_npu %d] %s:%u %s\n", static_cast<int>(level), name ? name + 1 : file, line, message);
}

}  // extern "C"
