# SPDX-License-Identifier: Apache-2.0
"""Which engine gets a request."""
