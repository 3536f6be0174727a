# SPDX-License-Identifier: Apache-2.0
"""Faults injected into real processes while requests are in flight."""
