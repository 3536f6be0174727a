# SPDX-License-Identifier: Apache-2.0
"""The prefill side: plans each step, and pushes the KV of each layer to decode engines."""
