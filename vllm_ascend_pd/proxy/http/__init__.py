# SPDX-License-Identifier: Apache-2.0
"""HTTP in and out: clients' requests, and requests to engines."""
