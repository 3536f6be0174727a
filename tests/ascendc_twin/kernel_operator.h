// SPDX-License-Identifier: Apache-2.0
//
// The part of AscendC that csrc/block_ops/npu uses, on the CPU: with this folder first on the include path the
// kernels compile unmodified, and each vector core is a thread.
//
// It moves real bytes and throws std::logic_error for what hardware would punish silently: accesses outside of
// global memory or a tile, more unified buffer than a core has, unaligned tiles, values that do not fit
// DataCopyPad's fields, and steps of the queue's protocol left out. That protocol is what orders the copies on
// hardware (EnQue and DeQue wait for the reading of a tile, FreeTensor and AllocTensor for its writing), so
// here a tile may be read into only between AllocTensor and EnQue, and written from only between DeQue and
// FreeTensor. A TBuf has no such protocol: there each pipe (reading, writing, the scalar unit) may touch a buffer only
// after SetFlag and WaitFlag have ordered it behind the pipe that touched it last. Threads stand for cores, not for a core's pipes: within a core the copies themselves are done
// when DataCopyPad returns.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#define __aicore__
#define __gm__
// A kernel names the cores that it runs on: `__global__ __vector__` where ASC compiles it, KERNEL_TASK_TYPE_DEFAULT in its
// body where ascendc_library does. Without the first it does not compile here (`__global__` opens a bracket that
// `__vector__` closes), without the second it ends with an error.
#ifdef ASCENDC_TWIN_LIBRARY
#define __global__
#define KERNEL_TASK_TYPE_DEFAULT(type) AscendC::twin::has_type = true
#else
#define __global__ __attribute__((
#define __vector__ __unused__))
#define KERNEL_TASK_TYPE_DEFAULT(type) static_assert(false, "soon deprecated: declare the kernel __vector__")
#endif
using GM_ADDR = uint8_t*;
enum pipe_t { PIPE_V };

namespace AscendC {

enum class TPosition { GM, VECIN, VECOUT, VECCALC };
enum class HardEvent { MTE2_S, S_MTE2, S_MTE3, MTE3_S, MTE2_V, V_MTE2, V_S, S_V };

namespace twin {

constexpr size_t kUnifiedBufferBytes = 192 * 1024;  // Atlas A2 and A3
constexpr size_t kAlignment = 32;
constexpr uint32_t kMaxBlockCount = 4095;
constexpr uint32_t kMaxBlockBytes = 2097151;
constexpr uint32_t kMaxBufferGap = 65535;  // in units of 32 bytes

inline thread_local int64_t core = 0;
inline thread_local int64_t num_cores = 1;
inline thread_local bool has_type = false;
inline thread_local std::string fault_at_exit;  // found by a destructor, which cannot throw

inline void require(bool ok, const std::string& what) {
  if (!ok) throw std::logic_error("core " + std::to_string(core) + ": " + what);
}

// What all cores have done since the last reset: reads and writes of single values, and instructions of the vector unit
// with their repeats of 256 bytes.
inline std::atomic<int64_t> scalar_accesses{0}, vector_instructions{0}, vector_repeats{0};

inline size_t align_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Runs kernel(args...) once per core and throws the first core's error.
template <class Kernel, class... Args>
void launch(uint32_t cores, Kernel kernel, Args... args) {
  std::vector<std::exception_ptr> errors(cores);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < cores; ++i)
    threads.emplace_back([&, i] {
      core = i;
      num_cores = cores;
      try {
        kernel(args...);
#ifdef ASCENDC_TWIN_LIBRARY
        require(has_type, "the kernel does not say which cores it is for");
#endif
        require(fault_at_exit.empty(), fault_at_exit);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

enum class State { kFree, kAllocated, kQueued, kDequeued, kOrderedByFlags };
enum class Pipe { kNone, kReading, kWriting, kScalar, kVector };

// One buffer of a queue, or a TBuf.
struct Buffer {
  uint8_t* data;
  size_t bytes;
  State state = State::kFree;
  bool is_for_copies = true;  // DataCopyPad is documented for VECIN and VECOUT on A2 and A3, not for VECCALC
  // Of a TBuf: which pipe touched it last, which one SetFlag names since, and which one has waited for that.
  Pipe last = Pipe::kNone;
  Pipe flagged = Pipe::kNone;
  Pipe waited = Pipe::kNone;

  void touch(Pipe pipe) {
    if (state != State::kOrderedByFlags) return;
    require(last == Pipe::kNone || last == pipe || waited == pipe, "TBuf: touched before another pipe is done with it");
    last = pipe, flagged = waited = Pipe::kNone;
  }
};

inline thread_local std::vector<Buffer*> flag_buffers;
inline thread_local bool is_flag_set[8] = {};

// Bytes that the vector unit has written since its last barrier.
inline thread_local std::vector<std::pair<const uint8_t*, const uint8_t*>> vector_results;

inline Pipe first_pipe(HardEvent event) {
  if (event == HardEvent::MTE2_S || event == HardEvent::MTE2_V) return Pipe::kReading;
  if (event == HardEvent::V_MTE2 || event == HardEvent::V_S) return Pipe::kVector;
  return event == HardEvent::MTE3_S ? Pipe::kWriting : Pipe::kScalar;
}

inline Pipe second_pipe(HardEvent event) {
  if (event == HardEvent::S_MTE2 || event == HardEvent::V_MTE2) return Pipe::kReading;
  if (event == HardEvent::MTE2_V || event == HardEvent::S_V) return Pipe::kVector;
  return event == HardEvent::S_MTE3 ? Pipe::kWriting : Pipe::kScalar;
}

}  // namespace twin

inline int64_t GetBlockIdx() { return twin::core; }
inline int64_t GetBlockNum() { return twin::num_cores; }

template <class T>
class GlobalTensor {
 public:
  void SetGlobalBuffer(T* data, uint64_t size) { data_ = data, offset_ = 0, size_ = size; }

  GlobalTensor operator[](uint64_t offset) const {
    GlobalTensor view = *this;
    view.offset_ += offset;
    return view;
  }

  T GetValue(uint64_t i) const {
    ++twin::scalar_accesses;
    return *at(i, 1);
  }

  T* at(uint64_t i, uint64_t count) const {
    const uint64_t begin = offset_ + i;
    twin::require(begin <= size_ && count <= size_ - begin,
                  "global memory: elements [" + std::to_string(static_cast<int64_t>(begin)) + ", +" +
                      std::to_string(count) + ") of " + std::to_string(size_));
    return data_ + begin;
  }

 private:
  T* data_ = nullptr;
  uint64_t offset_ = 0;
  uint64_t size_ = 0;
};

template <class T>
class LocalTensor {
 public:
  LocalTensor() = default;
  explicit LocalTensor(twin::Buffer* buffer) : buffer_(buffer) {}

  LocalTensor operator[](uint32_t offset) const {
    LocalTensor view = *this;
    view.offset_ += offset * sizeof(T);
    return view;
  }

  uint8_t* at(size_t offset, size_t bytes) const {
    twin::require(offset_ + offset + bytes <= buffer_->bytes,
                  "tile: bytes [" + std::to_string(offset_ + offset) + ", +" + std::to_string(bytes) + ") of " +
                      std::to_string(buffer_->bytes));
    return buffer_->data + offset_ + offset;
  }

  twin::Buffer* whole_buffer() const {
    twin::require(buffer_ != nullptr && offset_ == 0, "queue: not a tensor that AllocTensor or DeQue returned");
    return buffer_;
  }

  bool is(twin::State state) const { return buffer_ != nullptr && buffer_->state == state; }

  void touch(twin::Pipe pipe) const { buffer_->touch(pipe); }

  bool is_for_copies() const { return buffer_ != nullptr && buffer_->is_for_copies; }

  template <class Other>
  LocalTensor<Other> ReinterpretCast() const {
    LocalTensor<Other> other(buffer_);
    other.offset_ = offset_;
    return other;
  }

  T GetValue(uint32_t i) const {
    ++twin::scalar_accesses;
    touch(twin::Pipe::kScalar);
    T value;
    std::memcpy(&value, at(i * sizeof(T), sizeof(T)), sizeof(T));
    return value;
  }

  void SetValue(uint32_t i, T value) const {
    ++twin::scalar_accesses;
    touch(twin::Pipe::kScalar);
    std::memcpy(at(i * sizeof(T), sizeof(T)), &value, sizeof(T));
  }

 private:
  template <class Other>
  friend class LocalTensor;
  twin::Buffer* buffer_ = nullptr;
  size_t offset_ = 0;
};

class TPipe;

template <TPosition source, TPosition destination, int32_t depth>
class TQueBind {
 public:
  TQueBind() = default;
  TQueBind(const TQueBind&) = delete;
  ~TQueBind() {
    for (const auto& buffer : buffers_)
      if (buffer->state != twin::State::kFree) twin::fault_at_exit = "queue: a tensor was not freed";
  }

  template <class T>
  LocalTensor<T> AllocTensor() {
    for (const auto& buffer : buffers_)
      if (buffer->state == twin::State::kFree) {
        buffer->state = twin::State::kAllocated;
        std::memset(buffer->data, 0xA5, buffer->bytes);  // what was there before means nothing
        return LocalTensor<T>(buffer.get());
      }
    twin::require(false, "AllocTensor: all buffers are in use");
    return {};
  }

  template <class T>
  void EnQue(const LocalTensor<T>& tensor) {
    step(tensor.whole_buffer(), twin::State::kAllocated, twin::State::kQueued, "EnQue: not allocated");
    queued_.push_back(tensor.whole_buffer());
    twin::require(queued_.size() <= static_cast<size_t>(depth), "EnQue: deeper than the queue");
  }

  template <class T>
  LocalTensor<T> DeQue() {
    twin::require(!queued_.empty(), "DeQue: the queue is empty");
    twin::Buffer* buffer = queued_.front();
    queued_.pop_front();
    buffer->state = twin::State::kDequeued;
    return LocalTensor<T>(buffer);
  }

  template <class T>
  void FreeTensor(const LocalTensor<T>& tensor) {
    step(tensor.whole_buffer(), twin::State::kDequeued, twin::State::kFree, "FreeTensor: not dequeued");
  }

 private:
  friend class TPipe;

  static void step(twin::Buffer* buffer, twin::State from, twin::State to, const char* error) {
    twin::require(buffer->state == from, error);
    buffer->state = to;
  }

  std::vector<std::unique_ptr<twin::Buffer>> buffers_;
  std::deque<twin::Buffer*> queued_;
};

// A buffer without a queue, for all that a core does with it in turn.
template <TPosition position>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get() {
    return LocalTensor<T>(buffer_.get());
  }

 private:
  friend class TPipe;
  std::unique_ptr<twin::Buffer> buffer_;
};

using TEventID = int8_t;

template <HardEvent event>
void SetFlag(TEventID) {
  twin::require(!twin::is_flag_set[static_cast<int>(event)], "SetFlag: set twice");
  twin::is_flag_set[static_cast<int>(event)] = true;
  for (twin::Buffer* buffer : twin::flag_buffers)
    if (buffer->last == twin::first_pipe(event)) buffer->flagged = twin::second_pipe(event);
}

template <HardEvent event>
void WaitFlag(TEventID) {
  twin::require(twin::is_flag_set[static_cast<int>(event)], "WaitFlag: nothing sets it");
  twin::is_flag_set[static_cast<int>(event)] = false;
  for (twin::Buffer* buffer : twin::flag_buffers)
    if (buffer->flagged == twin::second_pipe(event)) buffer->waited = buffer->flagged;
}

class TPipe {
 public:
  TPipe() { twin::flag_buffers.clear(), twin::vector_results.clear(); }

  TEventID FetchEventID(HardEvent) { return 0; }

  template <TPosition position>
  bool InitBuffer(TBuf<position>& buffer, uint32_t bytes) {
    buffer.buffer_ = std::make_unique<twin::Buffer>(twin::Buffer{take(bytes), twin::align_up(bytes)});
    buffer.buffer_->state = twin::State::kOrderedByFlags;
    buffer.buffer_->is_for_copies = position != TPosition::VECCALC;
    std::memset(buffer.buffer_->data, 0xA5, buffer.buffer_->bytes);
    twin::flag_buffers.push_back(buffer.buffer_.get());
    return true;
  }

  template <TPosition source, TPosition destination, int32_t depth>
  bool InitBuffer(TQueBind<source, destination, depth>& queue, uint8_t count, uint32_t bytes) {
    for (uint8_t i = 0; i < count; ++i)
      queue.buffers_.push_back(std::make_unique<twin::Buffer>(twin::Buffer{take(bytes), twin::align_up(bytes)}));
    return true;
  }

 private:
  uint8_t* take(size_t bytes) {
    twin::require(used_ + twin::align_up(bytes) <= twin::kUnifiedBufferBytes,
                  "InitBuffer: more than the unified buffer has");
    uint8_t* data = memory_.get() + used_;
    used_ += twin::align_up(bytes);
    return data;
  }

  struct Delete {
    void operator()(uint8_t* memory) const { ::operator delete(memory, std::align_val_t{twin::kAlignment}); }
  };
  std::unique_ptr<uint8_t, Delete> memory_{static_cast<uint8_t*>(
      ::operator new(twin::kUnifiedBufferBytes, std::align_val_t{twin::kAlignment}))};
  size_t used_ = 0;
};

// --- the vector unit: instructions on `count` values. One must not use another's results before a barrier.

template <pipe_t>
void PipeBarrier() {
  twin::vector_results.clear();
}

namespace twin {

template <class T>
T* vector_operand(const LocalTensor<T>& tensor, int32_t count) {
  require(count >= 1, "vector: no values");
  tensor.touch(Pipe::kVector);
  uint8_t* begin = tensor.at(0, static_cast<size_t>(count) * sizeof(T));
  require(reinterpret_cast<uintptr_t>(begin) % kAlignment == 0, "vector: not aligned to 32 bytes");
  for (const auto& [from, to] : vector_results)
    require(begin >= to || begin + count * sizeof(T) <= from, "vector: uses a result before a barrier");
  return reinterpret_cast<T*>(begin);
}

template <class T, class Body>
void vector_instruction(T* to, int32_t count, const Body& body) {
  ++vector_instructions;
  vector_repeats += (static_cast<int64_t>(count) * static_cast<int64_t>(sizeof(T)) + 255) / 256;
  for (int32_t i = 0; i < count; ++i) to[i] = body(i);
  vector_results.emplace_back(reinterpret_cast<uint8_t*>(to), reinterpret_cast<uint8_t*>(to + count));
}

inline uint32_t low(int32_t value) { return static_cast<uint32_t>(value); }

}  // namespace twin

inline void Duplicate(const LocalTensor<int32_t>& to, int32_t value, int32_t count) {
  twin::vector_instruction(twin::vector_operand(to, count), count, [&](int32_t) { return value; });
}

inline void ShiftRight(const LocalTensor<uint32_t>& to, const LocalTensor<uint32_t>& from, uint32_t bits, int32_t count) {
  const uint32_t* source = twin::vector_operand(from, count);
  twin::vector_instruction(twin::vector_operand(to, count), count, [&](int32_t i) { return source[i] >> bits; });
}

inline void ShiftLeft(const LocalTensor<uint32_t>& to, const LocalTensor<uint32_t>& from, uint32_t bits, int32_t count) {
  const uint32_t* source = twin::vector_operand(from, count);
  twin::vector_instruction(twin::vector_operand(to, count), count, [&](int32_t i) { return source[i] << bits; });
}

// Products keep their low 32 bits here. Hardware's answer is a question (docs/npu.md).
inline void Muls(const LocalTensor<int32_t>& to, const LocalTensor<int32_t>& from, int32_t factor, int32_t count) {
  const int32_t* source = twin::vector_operand(from, count);
  twin::vector_instruction(twin::vector_operand(to, count), count, [&](int32_t i) {
    return static_cast<int32_t>(twin::low(source[i]) * twin::low(factor));
  });
}

inline void Mul(const LocalTensor<int32_t>& to, const LocalTensor<int32_t>& one, const LocalTensor<int32_t>& other,
                int32_t count) {
  const int32_t *a = twin::vector_operand(one, count), *b = twin::vector_operand(other, count);
  twin::vector_instruction(twin::vector_operand(to, count), count,
                           [&](int32_t i) { return static_cast<int32_t>(twin::low(a[i]) * twin::low(b[i])); });
}

inline void Add(const LocalTensor<int32_t>& to, const LocalTensor<int32_t>& one, const LocalTensor<int32_t>& other,
                int32_t count) {
  const int32_t *a = twin::vector_operand(one, count), *b = twin::vector_operand(other, count);
  twin::vector_instruction(twin::vector_operand(to, count), count,
                           [&](int32_t i) { return static_cast<int32_t>(twin::low(a[i]) + twin::low(b[i])); });
}

// Strides are gaps: in bytes in global memory, in units of 32 bytes in the unified buffer.
struct DataCopyExtParams {
  DataCopyExtParams(uint16_t count, uint32_t bytes, uint32_t source_gap, uint32_t destination_gap, uint32_t reserved)
      : blockCount(count), blockLen(bytes), srcStride(source_gap), dstStride(destination_gap), rsv(reserved) {}
  uint16_t blockCount;
  uint32_t blockLen;
  uint32_t srcStride;
  uint32_t dstStride;
  uint32_t rsv;
};

template <class T>
struct DataCopyPadExtParams {
  DataCopyPadExtParams(bool pad, uint8_t left, uint8_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
  bool isPad;
  uint8_t leftPadding;
  uint8_t rightPadding;
  T paddingValue;
};

namespace twin {

inline void check_copy(const DataCopyExtParams& params, const uint8_t* tile, uint32_t tile_gap) {
  require(params.blockCount >= 1 && params.blockCount <= kMaxBlockCount, "DataCopyPad: blockCount");
  require(params.blockLen >= 1 && params.blockLen <= kMaxBlockBytes, "DataCopyPad: blockLen");
  require(tile_gap <= kMaxBufferGap, "DataCopyPad: gap in the unified buffer");
  require(reinterpret_cast<uintptr_t>(tile) % kAlignment == 0, "DataCopyPad: tile not aligned to 32 bytes");
}

}  // namespace twin

// Every block begins at a multiple of 32 bytes in the tile; what fills up the one before is undefined.
inline void DataCopyPad(const LocalTensor<uint8_t>& to, const GlobalTensor<uint8_t>& from,
                        const DataCopyExtParams& params, const DataCopyPadExtParams<uint8_t>& pad) {
  twin::require(to.is(twin::State::kAllocated) || to.is(twin::State::kOrderedByFlags),
                "DataCopyPad: reads into a tensor that is not allocated");
  twin::require(to.is_for_copies(), "DataCopyPad: reads into VECCALC");
  to.touch(twin::Pipe::kReading);
  twin::require(!pad.isPad && pad.leftPadding == 0 && pad.rightPadding == 0, "DataCopyPad: padding is not emulated");
  twin::check_copy(params, to.at(0, 0), params.dstStride);
  const size_t padded = twin::align_up(params.blockLen);
  for (uint64_t i = 0; i < params.blockCount; ++i)
    std::memcpy(to.at(i * (padded + params.dstStride * twin::kAlignment), padded),
                from.at(i * (uint64_t{params.blockLen} + params.srcStride), params.blockLen), params.blockLen);
}

inline void DataCopyPad(const GlobalTensor<uint8_t>& to, const LocalTensor<uint8_t>& from,
                        const DataCopyExtParams& params) {
  twin::require(from.is(twin::State::kDequeued) || from.is(twin::State::kOrderedByFlags),
                "DataCopyPad: writes from a tensor that is not dequeued");
  twin::require(from.is_for_copies(), "DataCopyPad: writes from VECCALC");
  from.touch(twin::Pipe::kWriting);
  twin::check_copy(params, from.at(0, 0), params.srcStride);
  const size_t padded = twin::align_up(params.blockLen);
  for (uint64_t i = 0; i < params.blockCount; ++i)
    std::memcpy(to.at(i * (uint64_t{params.blockLen} + params.dstStride), params.blockLen),
                from.at(i * (padded + params.srcStride * twin::kAlignment), padded), params.blockLen);
}

}  // namespace AscendC
