// SPDX-License-Identifier: Apache-2.0
// What the emulated libraries share; libascendcl.so defines it.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <string>

#include "acl/acl.h"

namespace cann_on_host {

// --- errors ------------------------------------------------------------------------------------------------

// From acl/error_codes/rt_error_codes.h.
constexpr aclError kInvalidDevice = 107001;
constexpr aclError kContextNull = 107002;
constexpr aclError kParamInvalid = 107000;
constexpr aclError kFeatureNotSupported = 207000;
constexpr aclError kMemoryAllocation = 207001;
constexpr aclError kStreamResourceFailed = 207008;  // no stream resource
constexpr aclError kAicoreTimeout = 507014;
constexpr aclError kAicoreException = 507015;
constexpr aclError kStreamSyncTimeout = 507046;

// Thrown inside a task: its stream has failed with `code`.
struct TaskError : std::runtime_error {
  TaskError(aclError code, const std::string& what) : std::runtime_error(what), code(code) {}
  aclError code;
};

// Remember a message for aclGetRecentErrMsg, print it and return `code`.
aclError fail(aclError code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Print a message and abort: for what must never go on, such as an operator that is not emulated.
[[noreturn]] void fatal(const char* format, ...) __attribute__((format(printf, 1, 2)));

bool logging();
#define CANN_ON_HOST_LOG(...)                                     \
  do {                                                            \
    if (cann_on_host::logging()) {                                \
      std::fprintf(stderr, "[cann_on_host %d] ", getpid());       \
      std::fprintf(stderr, __VA_ARGS__);                          \
      std::fputc('\n', stderr);                                   \
    }                                                             \
  } while (0)

// --- settings ----------------------------------------------------------------------------------------------

// CANN_ON_HOST_<name> from the environment, or `fallback`.
const char* setting(const char* name, const char* fallback);
long setting(const char* name, long fallback);

// --- streams -----------------------------------------------------------------------------------------------

enum class TaskKind { kKernel, kCopy, kHccl, kEventRecord, kEventWait, kCallback };

// Run `work` in order on `stream` (nullptr: the current device's default stream). `name` is for messages.
void enqueue(aclrtStream stream, TaskKind kind, const std::string& name, std::function<void()> work);

// Wait until nothing is queued; the error of the stream, or kStreamSyncTimeout after `timeout_ms` (-1: for ever).
aclError synchronize(aclrtStream stream, int timeout_ms = -1);

// Marks the end of what is queued on `stream`: `mark_of` any stream whose next task comes after it, through events
// too, is at least `number`. 0: nothing orders the stream after a mark of `what`.
void set_mark(aclrtStream stream, const void* what, uint64_t number);
uint64_t mark_of(aclrtStream stream, const void* what);

// A device has 1,984 streams (HIXL, `hixl_cs_client.cc` has the figure). Libraries take some for themselves, which are
// counted only. False: there are not as many left.
bool hold_streams(int device, long streams);
void release_streams(int device, long streams);
long streams_left(int device);

// --- memory ------------------------------------------------------------------------------------------------

enum class Place {
  kDevice,       // inside device memory
  kPinnedHost,   // inside host memory that the runtime allocated or registered
  kUnknownHost,  // memory that the runtime has never seen
  kOutOfBounds,  // begins in a block of the runtime and ends outside of it
};

Place locate(const void* address, size_t bytes, int* device = nullptr);

// Ends the process unless [address, address + bytes) is device memory; `user` names who wants to use it.
void require_device(const void* address, size_t bytes, const std::string& user);

// Device memory that a library takes for itself: it is counted only. False: there is not as much left.
bool hold_device_memory(size_t bytes);
void release_device_memory(size_t bytes);

// --- counters ----------------------------------------------------------------------------------------------

enum Counter {
  kLaunches,             // kernels: aclnn operators and fallbacks
  kKernelBytes,          // bytes that kernels wrote
  kCopiesOnDevice,       // aclrtMemcpy* between addresses of devices
  kCopiesToDevice,
  kCopiesToHost,
  kCopyBytesOnDevice,
  kCopyBytesToDevice,
  kCopyBytesToHost,
  kUnalignedCopies,      // asynchronous copies on the device with an address that is no multiple of 64
  kHcclCalls,
  kHcclBytes,            // sent by this rank, its own part included
  kEventRecords,
  kEventWaits,           // of a stream for an event
  kSynchronizes,         // of a thread for a stream, an event or the device
  kAdxlConnects,         // attempts to open a channel to another engine
  kAdxlTransfers,        // calls of TransferSync
  kAdxlDescriptors,      // in them
  kAdxlBytes,            // moved by them
  kNumCounters,
};

void count(Counter counter, uint64_t by = 1);
void count_launch(const std::string& name, uint64_t bytes_written);

// --- injected faults ---------------------------------------------------------------------------------------

enum class Fault { kNone, kFail, kHang };

// What shall happen to this task or HCCL call; each fault strikes once.
Fault take_task_fault(TaskKind kind, bool side_stream);
Fault take_hccl_fault();

// Blocks until cann_on_host_clear_faults, or throws TaskError once CANN_ON_HOST_OP_TIMEOUT_S have passed.
void hang(const std::string& name);

}  // namespace cann_on_host
