# SPDX-License-Identifier: Apache-2.0
"""What differs between devices: streams, events, buffers and collectives, behind one interface."""
