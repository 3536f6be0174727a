# SPDX-License-Identifier: Apache-2.0
"""For operators: health, status, metrics, traces and the admin API."""
