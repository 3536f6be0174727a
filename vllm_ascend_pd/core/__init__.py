# SPDX-License-Identifier: Apache-2.0
"""What both sides share: tickets, messages, layouts and topology. Pure: no I/O, nothing of vLLM."""
