# SPDX-License-Identifier: Apache-2.0
"""The decode side: issues a ticket for each request, grants writes, and reports which requests' KV has arrived."""
