# SPDX-License-Identifier: Apache-2.0
"""For benchmarks/simulate.py: clusters of prefill and decode engines as discrete events. Times are seconds."""
