# SPDX-License-Identifier: Apache-2.0
"""What both sides share: tickets, messages, layouts, topology and plans.

Nothing here uses the network or vLLM, waits, or starts threads or processes. Nearly all of it is pure: it depends on
its arguments alone. The exceptions read a clock or the name of one (`running_time`, `host_clock`) or an environment
variable (`threads`), or hold a lock (`weights`, `running_time`).
"""
