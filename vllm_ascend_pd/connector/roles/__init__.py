# SPDX-License-Identifier: Apache-2.0
"""The four roles of a connector: prefill or decode, in the scheduler or in a worker."""
