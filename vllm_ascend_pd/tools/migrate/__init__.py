# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd migrate`: turns the command of a running vllm-ascend engine into one for this package's connector."""
