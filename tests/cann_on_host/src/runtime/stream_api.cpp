// SPDX-License-Identifier: Apache-2.0
// aclrt*Stream*: streams and the callbacks on them.
#include "acl/acl.h"
#include "stream.h"

using namespace cann_on_host;

extern "C" {

aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) {
  if (current_device() < 0) return fail(kContextNull, "aclrtCreateStream without aclrtSetDevice");
  *stream = create_stream(current_device());
  return *stream ? ACL_SUCCESS : fail(kStreamResourceFailed, "device %d has no stream left", current_device());
}

aclError aclrtGetStreamAvailableNum(uint32_t* streams) {
  if (current_device() < 0) return fail(kContextNull, "aclrtGetStreamAvailableNum without aclrtSetDevice");
  *streams = static_cast<uint32_t>(streams_left(current_device()));
  return ACL_SUCCESS;
}

aclError aclrtCreateStream(aclrtStream* stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }

aclError aclrtDestroyStream(aclrtStream stream) {
  return destroy_stream(static_cast<Stream*>(stream)) ? ACL_SUCCESS : kParamInvalid;
}

aclError aclrtDestroyStreamForce(aclrtStream stream) { return aclrtDestroyStream(stream); }

aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout_ms) {
  count(kSynchronizes);
  return synchronize(stream, timeout_ms);
}

aclError aclrtSynchronizeStream(aclrtStream stream) { return aclrtSynchronizeStreamWithTimeout(stream, -1); }

aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus* status) {
  Stream* known = resolve(stream);
  if (aclError error = known->error()) return error;
  *status = known->idle() ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}

aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) {
  *id = resolve(stream)->id;
  return ACL_SUCCESS;
}

aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode) {
  resolve(stream)->set_stop_on_failure(mode == ACL_STOP_ON_FAILURE);
  return ACL_SUCCESS;
}

aclError aclrtSetStreamOverflowSwitch(aclrtStream, uint32_t) { return ACL_SUCCESS; }

aclError aclrtGetStreamOverflowSwitch(aclrtStream, uint32_t* on) {
  *on = 0;
  return ACL_SUCCESS;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
  enqueue(stream, TaskKind::kCallback, "host function", [=] { function(argument); });
  return ACL_SUCCESS;
}

aclError aclrtLaunchCallback(aclrtCallback function, void* argument, aclrtCallbackBlockType, aclrtStream stream) {
  enqueue(stream, TaskKind::kCallback, "callback", [=] { function(argument); });
  return ACL_SUCCESS;
}

// Callbacks run on the stream's own thread, so nobody has to process reports.
aclError aclrtSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }
aclError aclrtUnSubscribeReport(uint64_t, aclrtStream) { return ACL_SUCCESS; }

aclError aclrtProcessReport(int32_t timeout_ms) {
  usleep(1000 * (timeout_ms > 0 && timeout_ms < 10 ? timeout_ms : 10));
  return ACL_SUCCESS;
}

}  // extern "C"
