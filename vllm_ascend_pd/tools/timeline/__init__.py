# SPDX-License-Identifier: Apache-2.0
"""Where a request's time goes: engines write trace files, `vllm-ascend-pd timeline` merges and draws them."""
