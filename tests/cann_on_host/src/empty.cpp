// SPDX-License-Identifier: Apache-2.0
// libge_runner.so, libgraph.so and libacl_tdt_channel.so: torch_npu is linked against them and calls nothing.
