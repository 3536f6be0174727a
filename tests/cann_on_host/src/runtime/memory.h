// SPDX-License-Identifier: Apache-2.0
// Device memory is host memory; every block that the runtime hands out or learns of is recorded.
#pragma once

#include "runtime.h"

namespace cann_on_host {

void add_block(void* address, size_t bytes, bool on_device);
size_t remove_block(void* address);  // its size, 0 if no block begins there

size_t device_bytes_used();
size_t device_bytes_total();

// Memory of devices is not zeroed, and nobody may count on it: new blocks are filled with 0xCB.
void scribble(void* address, size_t bytes);

}  // namespace cann_on_host
