# SPDX-License-Identifier: Apache-2.0
"""Starts real vLLM engines and talks to them: shared by the end-to-end tests, the benchmarks and the demo."""
