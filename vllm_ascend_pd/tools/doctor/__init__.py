# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd doctor`: what is wrong with a machine, or with a running pair of engines, and what to do about it."""
