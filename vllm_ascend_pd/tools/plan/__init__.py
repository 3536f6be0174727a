# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan`: what a prefill and a decode engine will send each other, without starting either."""
