// SPDX-License-Identifier: Apache-2.0
// Hccl*: collectives, each one exchange of byte ranges on the caller's stream.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "communicator.h"
#include "data_types.h"
#include "rules.h"

using namespace cann_on_host;

namespace {

using Bytes = std::vector<uint64_t>;

Communicator* get(HcclComm handle) { return static_cast<Communicator*>(handle); }

// The same data for every rank.
std::vector<const char*> same(const void* data, uint32_t ranks) { return {ranks, static_cast<const char*>(data)}; }

// The i-th of equal parts for rank i.
template <class Pointer>
std::vector<Pointer> parts_of(Pointer data, uint32_t ranks, uint64_t bytes) {
  std::vector<Pointer> parts;
  for (uint32_t i = 0; i < ranks; i++) parts.push_back(data + i * bytes);
  return parts;
}

void check_memory(const char* name, const Exchange& exchange) {
  for (size_t i = 0; i < exchange.send.size(); i++) require_device(exchange.send[i], exchange.send_bytes[i], name);
  for (size_t i = 0; i < exchange.receive.size(); i++) {
    require_device(exchange.receive[i], exchange.receive_bytes[i], name);
  }
}

// Queues `work` as a call of HCCL: counted, and with injected faults.
HcclResult queue(HcclComm handle, aclrtStream stream, const char* name, uint64_t bytes, std::function<void()> work) {
  Communicator* communicator = get(handle);
  count(kHcclCalls);
  count(kHcclBytes, bytes);
  CANN_ON_HOST_LOG("%s on %s, stream %p", name, communicator->describe().c_str(), stream);
  const Fault fault = take_hccl_fault();
  if (fault == Fault::kFail) {
    fail(kRemoteError, "injected fault: %s on %s fails", name, communicator->describe().c_str());
    return HCCL_E_INTERNAL;
  }
  std::shared_ptr<void> under_way;
  try {
    under_way = begin_aiv_operation(*communicator, name, stream);
  } catch (const std::runtime_error& error) {
    fail(kParamInvalid, "HCCL: %s", error.what());
    return HCCL_E_INTERNAL;
  }
  enqueue(stream, TaskKind::kHccl, name, [fault, under_way, name = std::string(name), work = std::move(work)] {
    if (fault == Fault::kHang) hang(name);
    work();
  });
  return HCCL_SUCCESS;
}

HcclResult queue_exchange(HcclComm handle, aclrtStream stream, const char* name, const Exchange& exchange) {
  check_memory(name, exchange);
  const uint64_t sent = std::accumulate(exchange.send_bytes.begin(), exchange.send_bytes.end(), uint64_t{0});
  Communicator* communicator = get(handle);
  return queue(handle, stream, name, sent, [=] { communicator->exchange(name, exchange); });
}

// Every rank that `receives` takes `elements` elements of every rank and reduces them into `out`.
HcclResult queue_reduce(HcclComm handle, aclrtStream stream, const char* name, std::vector<const char*> send,
                        Bytes send_bytes, void* out, uint64_t elements, HcclDataType type, HcclReduceOp operation,
                        bool receives = true) {
  Communicator* communicator = get(handle);
  const uint64_t bytes = receives ? elements * bytes_of(type) : 0;
  for (size_t i = 0; i < send.size(); i++) require_device(send[i], send_bytes[i], name);
  require_device(out, bytes, name);
  if (!reduce(nullptr, nullptr, 0, type, operation)) {
    fail(kParamInvalid, "%s: HCCL does not reduce data of type %d by operation %d", name, static_cast<int>(type),
         static_cast<int>(operation));
    return HCCL_E_NOT_SUPPORT;
  }
  const uint64_t sent = std::accumulate(send_bytes.begin(), send_bytes.end(), uint64_t{0});
  return queue(handle, stream, name, sent, [=] {
    std::vector<char> all(bytes * communicator->size + 1);
    const uint32_t ranks = communicator->size;
    communicator->exchange(name, {send, send_bytes, parts_of(all.data(), ranks, bytes), Bytes(ranks, bytes)});
    if (!bytes) return;
    for (uint32_t i = 1; i < ranks; i++) reduce(all.data(), all.data() + i * bytes, elements, type, operation);
    std::memcpy(out, all.data(), bytes);
  });
}

}  // namespace

extern "C" {

HcclResult HcclAllReduce(void* in, void* out, uint64_t elements, HcclDataType type, HcclReduceOp operation,
                         HcclComm handle, aclrtStream stream) {
  const uint32_t ranks = get(handle)->size;
  return queue_reduce(handle, stream, "HcclAllReduce", same(in, ranks), Bytes(ranks, elements * bytes_of(type)), out,
                      elements, type, operation);
}

HcclResult HcclReduce(void* in, void* out, uint64_t elements, HcclDataType type, HcclReduceOp operation, uint32_t root,
                      HcclComm handle, aclrtStream stream) {
  const uint32_t ranks = get(handle)->size;
  Bytes bytes(ranks, 0);
  bytes[root] = elements * bytes_of(type);
  return queue_reduce(handle, stream, "HcclReduce", same(in, ranks), bytes, out, elements, type, operation,
                      get(handle)->rank == root);
}

HcclResult HcclReduceScatter(void* in, void* out, uint64_t elements, HcclDataType type, HcclReduceOp operation,
                             HcclComm handle, aclrtStream stream) {
  const uint32_t ranks = get(handle)->size;
  const uint64_t bytes = elements * bytes_of(type);
  return queue_reduce(handle, stream, "HcclReduceScatter", parts_of(static_cast<const char*>(in), ranks, bytes),
                      Bytes(ranks, bytes), out, elements, type, operation);
}

HcclResult HcclAllGather(void* in, void* out, uint64_t elements, HcclDataType type, HcclComm handle,
                         aclrtStream stream) {
  const uint32_t ranks = get(handle)->size;
  const uint64_t bytes = elements * bytes_of(type);
  return queue_exchange(handle, stream, "HcclAllGather",
                        {same(in, ranks), Bytes(ranks, bytes), parts_of(static_cast<char*>(out), ranks, bytes),
                         Bytes(ranks, bytes)});
}

HcclResult HcclBroadcast(void* data, uint64_t elements, HcclDataType type, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
  const uint32_t ranks = get(handle)->size;
  const uint64_t bytes = elements * bytes_of(type);
  Bytes from_root(ranks, 0);
  from_root[root] = bytes;
  return queue_exchange(handle, stream, "HcclBroadcast",
                        {same(data, ranks), Bytes(ranks, get(handle)->rank == root ? bytes : 0),
                         parts_of(static_cast<char*>(data), ranks, 0), from_root});
}

HcclResult HcclScatter(void* in, void* out, uint64_t elements, HcclDataType type, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
  const uint32_t ranks = get(handle)->size;
  const uint64_t bytes = elements * bytes_of(type);
  Bytes from_root(ranks, 0);
  from_root[root] = bytes;
  return queue_exchange(handle, stream, "HcclScatter",
                        {parts_of(static_cast<const char*>(in), ranks, bytes),
                         Bytes(ranks, get(handle)->rank == root ? bytes : 0),
                         parts_of(static_cast<char*>(out), ranks, 0), from_root});
}

HcclResult HcclAlltoAll(const void* in, uint64_t in_elements, HcclDataType in_type, const void* out,
                        uint64_t out_elements, HcclDataType out_type, HcclComm handle, aclrtStream stream) {
  const uint32_t ranks = get(handle)->size;
  const uint64_t sent = in_elements * bytes_of(in_type), received = out_elements * bytes_of(out_type);
  auto* into = static_cast<char*>(const_cast<void*>(out));
  return queue_exchange(handle, stream, "HcclAlltoAll",
                        {parts_of(static_cast<const char*>(in), ranks, sent), Bytes(ranks, sent),
                         parts_of(into, ranks, received), Bytes(ranks, received)});
}

HcclResult HcclAlltoAllV(const void* in, const void* in_counts, const void* in_offsets, HcclDataType in_type,
                         const void* out, const void* out_counts, const void* out_offsets, HcclDataType out_type,
                         HcclComm handle, aclrtStream stream) {
  const auto value = [](const void* array, uint32_t i) { return static_cast<const uint64_t*>(array)[i]; };
  auto* into = static_cast<char*>(const_cast<void*>(out));
  Exchange exchange;
  for (uint32_t i = 0; i < get(handle)->size; i++) {
    exchange.send.push_back(static_cast<const char*>(in) + value(in_offsets, i) * bytes_of(in_type));
    exchange.send_bytes.push_back(value(in_counts, i) * bytes_of(in_type));
    exchange.receive.push_back(into + value(out_offsets, i) * bytes_of(out_type));
    exchange.receive_bytes.push_back(value(out_counts, i) * bytes_of(out_type));
  }
  return queue_exchange(handle, stream, "HcclAlltoAllV", exchange);
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  Communicator* communicator = get(handle);
  return queue(handle, stream, "HcclBarrier", 0, [=] { communicator->barrier("HcclBarrier"); });
}

HcclResult HcclSend(void* data, uint64_t elements, HcclDataType type, uint32_t to, HcclComm handle,
                    aclrtStream stream) {
  Communicator* communicator = get(handle);
  const uint64_t bytes = elements * bytes_of(type);
  require_device(data, bytes, "HcclSend");
  return queue(handle, stream, "HcclSend", bytes,
               [=] { communicator->send(static_cast<const char*>(data), bytes, to); });
}

HcclResult HcclRecv(void* data, uint64_t elements, HcclDataType type, uint32_t from, HcclComm handle,
                    aclrtStream stream) {
  Communicator* communicator = get(handle);
  const uint64_t bytes = elements * bytes_of(type);
  require_device(data, bytes, "HcclRecv");
  return queue(handle, stream, "HcclRecv", 0,
               [=] { communicator->receive(static_cast<char*>(data), bytes, from); });
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t size, HcclComm handle, aclrtStream stream) {
  // All that is sent first: nobody waits for anybody.
  std::stable_partition(items, items + size, [](auto& item) { return item.sendRecvType == HCCL_SEND; });
  for (uint32_t i = 0; i < size; i++) {
    auto* one = items[i].sendRecvType == HCCL_SEND ? HcclSend : HcclRecv;
    const HcclSendRecvItem& item = items[i];
    if (HcclResult error = one(item.buf, item.count, item.dataType, item.remoteRank, handle, stream)) return error;
  }
  return HCCL_SUCCESS;
}

}  // extern "C"
