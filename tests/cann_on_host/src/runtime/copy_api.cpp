// SPDX-License-Identifier: Apache-2.0
// aclrtMemcpy* and aclrtMemset*, with the rules that CANN's reference gives for them:
// - a copy stays inside the blocks that it begins in, and its kind says where they are;
// - an asynchronous copy from or to host memory that the runtime did not allocate fails in unpredictable ways
//   (aclrtMemcpyAsync, CANN 8.0): here it is an error at once;
// - asynchronous copies inside the host are not supported (same page);
// - addresses of asynchronous copies are multiples of 64 (the same page up to CANN 8.0.RC3; later versions no
//   longer say so, and torch_npu copies slices at any address): counted, an error with CANN_ON_HOST_ALIGN=1;
// - a batch goes either from the host to the device or from the device to the host (aclrtMemcpyBatchAsync).
#include <cstring>

#include "acl/acl.h"
#include "memory.h"

using namespace cann_on_host;

namespace {

constexpr uintptr_t kAlignment = 64;

const char* describe(Place place) { return place == Place::kDevice ? "device" : "host"; }

bool fits(aclrtMemcpyKind kind, bool to_device, bool from_device) {
  switch (kind) {
    case ACL_MEMCPY_HOST_TO_HOST:
      return !to_device && !from_device;
    case ACL_MEMCPY_HOST_TO_DEVICE:
      return to_device && !from_device;
    case ACL_MEMCPY_DEVICE_TO_HOST:
      return !to_device && from_device;
    case ACL_MEMCPY_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INNER_DEVICE_TO_DEVICE:
    case ACL_MEMCPY_INTER_DEVICE_TO_DEVICE:
      return to_device && from_device;
    default:
      return true;
  }
}

void count_copy(bool to_device, bool from_device, size_t bytes) {
  if (to_device && from_device) {
    count(kCopiesOnDevice);
    count(kCopyBytesOnDevice, bytes);
  } else if (to_device) {
    count(kCopiesToDevice);
    count(kCopyBytesToDevice, bytes);
  } else if (from_device) {
    count(kCopiesToHost);
    count(kCopyBytesToHost, bytes);
  }
}

// All copies of a batch go from the host to the device, or all from the device to the host.
aclError check_direction(const char* name, void** to, void** from, const size_t* bytes, size_t i) {
  const bool to_device = locate(to[i], bytes[i]) == Place::kDevice;
  if (to_device == (locate(from[i], bytes[i]) == Place::kDevice)) {
    return fail(kFeatureNotSupported, "%s: copy %zu is inside the %s", name, i, to_device ? "device" : "host");
  }
  if (to_device != (locate(to[0], bytes[0]) == Place::kDevice)) {
    return fail(kFeatureNotSupported, "%s: copy %zu is in another direction than the first", name, i);
  }
  return ACL_SUCCESS;
}

aclError check(const void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, bool async) {
  if (bytes > room) return fail(kParamInvalid, "copy of %zu bytes into %zu", bytes, room);
  if (!bytes) return ACL_SUCCESS;
  const Place to_place = locate(to, bytes), from_place = locate(from, bytes);
  if (to_place == Place::kOutOfBounds || from_place == Place::kOutOfBounds) {
    return fail(kParamInvalid, "copy of %zu bytes: the %s at %p is out of bounds", bytes,
                to_place == Place::kOutOfBounds ? "destination" : "source",
                to_place == Place::kOutOfBounds ? to : from);
  }
  const bool to_device = to_place == Place::kDevice, from_device = from_place == Place::kDevice;
  if (!fits(kind, to_device, from_device)) {
    return fail(kParamInvalid, "copy of kind %d from %s to %s memory", static_cast<int>(kind), describe(from_place),
                describe(to_place));
  }
  if (async) {
    if (!to_device && !from_device) return fail(kFeatureNotSupported, "asynchronous copy inside the host");
    if (to_place == Place::kUnknownHost || from_place == Place::kUnknownHost) {
      return fail(kParamInvalid, "asynchronous copy of %zu bytes with host memory that is not pinned", bytes);
    }
    if (to_device && from_device &&
        (reinterpret_cast<uintptr_t>(to) % kAlignment || reinterpret_cast<uintptr_t>(from) % kAlignment)) {
      count(kUnalignedCopies);
      static const bool strict = setting("ALIGN", 0L) != 0;
      if (strict) return fail(kParamInvalid, "copy from %p to %p: not multiples of %zu", from, to, kAlignment);
    }
  }
  count_copy(to_device, from_device, bytes);
  return ACL_SUCCESS;
}

bool is_unpinned(const void* to, const void* from, size_t bytes) {
  return bytes && (locate(to, bytes) == Place::kUnknownHost || locate(from, bytes) == Place::kUnknownHost);
}

aclError copy_at_once(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
  if (aclError error = synchronize(stream)) return error;
  if (aclError error = check(to, room, from, bytes, kind, false)) return error;
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

}  // namespace

extern "C" {

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind) {
  if (aclError error = check(to, room, from, bytes, kind, false)) return error;
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                          aclrtStream stream) {
  static const bool pinned_only = setting("PINNED_ONLY", 1L) != 0;
  if (!pinned_only && is_unpinned(to, from, bytes)) return copy_at_once(to, room, from, bytes, kind, stream);
  if (aclError error = check(to, room, from, bytes, kind, true)) return error;
  CANN_ON_HOST_LOG("aclrtMemcpyAsync %p <- %p, %zu bytes, stream %p", to, from, bytes, stream);
  enqueue(stream, TaskKind::kCopy, "aclrtMemcpyAsync", [=] { std::memmove(to, from, bytes); });
  return ACL_SUCCESS;
}

aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
  // Decides itself whether to be synchronous: it is when the host memory is not pinned.
  if (is_unpinned(to, from, bytes)) return copy_at_once(to, room, from, bytes, kind, stream);
  return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}

aclError aclrtMemcpyBatch(void** to, size_t* rooms, void** from, size_t* bytes, size_t copies, aclrtMemcpyBatchAttr*,
                          size_t*, size_t, size_t* failed) {
  for (size_t i = 0; i < copies; i++) {
    if (aclError error = check_direction("aclrtMemcpyBatch", to, from, bytes, i)) {
      *failed = i;
      return error;
    }
    if (aclError error = aclrtMemcpy(to[i], rooms[i], from[i], bytes[i], ACL_MEMCPY_DEFAULT)) {
      *failed = i;
      return error;
    }
  }
  return ACL_SUCCESS;
}

aclError aclrtMemcpyBatchAsync(void** to, size_t* rooms, void** from, size_t* bytes, size_t copies,
                               aclrtMemcpyBatchAttr*, size_t*, size_t, size_t* failed, aclrtStream stream) {
  for (size_t i = 0; i < copies; i++) {
    if (aclError error = check_direction("aclrtMemcpyBatchAsync", to, from, bytes, i)) {
      *failed = i;
      return error;
    }
    if (aclError error = aclrtMemcpyAsync(to[i], rooms[i], from[i], bytes[i], ACL_MEMCPY_DEFAULT, stream)) {
      *failed = i;
      return error;
    }
  }
  return ACL_SUCCESS;
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) {
  if (bytes > room || (bytes && locate(to, bytes) != Place::kDevice)) {
    return fail(kParamInvalid, "aclrtMemset of %zu bytes at %p: out of bounds", bytes, to);
  }
  std::memset(to, value, bytes);
  return ACL_SUCCESS;
}

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  if (bytes > room || (bytes && locate(to, bytes) != Place::kDevice)) {
    return fail(kParamInvalid, "aclrtMemsetAsync of %zu bytes at %p: out of bounds", bytes, to);
  }
  enqueue(stream, TaskKind::kCopy, "aclrtMemsetAsync", [=] { std::memset(to, value, bytes); });
  return ACL_SUCCESS;
}

}  // extern "C"
