// SPDX-License-Identifier: Apache-2.0
// What HCCL does not allow of communicators; README.md names the sources.
#pragma once

#include <memory>
#include <string>

#include "communicator.h"

namespace cann_on_host {

// Whether a communicator of this configuration runs its operations on vector cores (mode AIV).
bool is_aiv(const HcclCommConfig& config);

// Device memory that a communicator of this configuration takes.
uint64_t buffer_bytes(const HcclCommConfig& config);

// Whether the calling thread runs a step of a model: it must not wait for a communicator to connect.
bool in_model_step();

// An operation of a communicator in mode AIV, from now until the last copy of the pointer is gone. Null for others.
// Throws std::runtime_error where another communicator of this device has one that may run at the same time: it has
// not ended, and nothing orders this one, which will be queued on `stream`, after it.
std::shared_ptr<void> begin_aiv_operation(const Communicator& communicator, const std::string& operation,
                                          aclrtStream stream);

}  // namespace cann_on_host
