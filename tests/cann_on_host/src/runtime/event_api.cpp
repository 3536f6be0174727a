// SPDX-License-Identifier: Apache-2.0
// aclrt*Event*. The handle is a shared pointer on the heap: see Event.
#include <chrono>

#include "acl/acl.h"
#include "stream.h"

using namespace cann_on_host;

namespace {

using EventPointer = std::shared_ptr<Event>;

EventPointer get(aclrtEvent event) {
  if (!event) fatal("an event that is null");
  return *static_cast<EventPointer*>(event);
}

aclError error_of(const EventPointer& event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->error;
}

}  // namespace

extern "C" {

aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) {
  *event = new EventPointer(new Event);
  return ACL_SUCCESS;
}

aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t flag) { return aclrtCreateEventExWithFlag(event, flag); }

aclError aclrtDestroyEvent(aclrtEvent event) {
  delete static_cast<EventPointer*>(event);
  return ACL_SUCCESS;
}

aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  count(kEventRecords);
  resolve(stream)->record(get(event));
  return ACL_SUCCESS;
}

aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  count(kEventWaits);
  resolve(stream)->wait_for(get(event));
  return ACL_SUCCESS;
}

aclError aclrtResetEvent(aclrtEvent, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtSynchronizeEvent(aclrtEvent event) {
  count(kSynchronizes);
  EventPointer pointer = get(event);
  uint64_t record;
  {
    std::lock_guard<std::mutex> lock(pointer->mutex);
    record = pointer->recorded;
  }
  return pointer->wait(record);
}

aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus* status) {
  EventPointer pointer = get(event);
  if (aclError error = error_of(pointer)) return error;
  std::lock_guard<std::mutex> lock(pointer->mutex);
  const bool complete = pointer->reached >= pointer->recorded;
  *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent event, aclrtEventWaitStatus* status) {
  aclrtEventRecordedStatus recorded;
  if (aclError error = aclrtQueryEventStatus(event, &recorded)) return error;
  const bool complete = recorded == ACL_EVENT_RECORDED_STATUS_COMPLETE;
  *status = complete ? ACL_EVENT_WAIT_STATUS_COMPLETE : ACL_EVENT_WAIT_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtEventElapsedTime(float* milliseconds, aclrtEvent start, aclrtEvent end) {
  if (aclError error = aclrtSynchronizeEvent(start)) return error;
  if (aclError error = aclrtSynchronizeEvent(end)) return error;
  *milliseconds = std::chrono::duration<float, std::milli>(get(end)->when - get(start)->when).count();
  return ACL_SUCCESS;
}

aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t* microseconds) {
  auto since_start = get(event)->when.time_since_epoch();
  *microseconds = std::chrono::duration_cast<std::chrono::microseconds>(since_start).count();
  return ACL_SUCCESS;
}

}  // extern "C"
