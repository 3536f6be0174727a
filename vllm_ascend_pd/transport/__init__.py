# SPDX-License-Identifier: Apache-2.0
"""How bytes and messages move: Mooncake's transfer engine, the ZMQ side channel between engines, HTTP."""
