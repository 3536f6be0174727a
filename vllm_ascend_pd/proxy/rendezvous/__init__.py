# SPDX-License-Identifier: Apache-2.0
"""Brings a client's request, decode's ticket and prefill's answer together, and decides what is retried."""
