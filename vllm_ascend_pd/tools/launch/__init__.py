# SPDX-License-Identifier: Apache-2.0
"""Starting engines, one node at a time (scripts/launch_prefill.sh and its neighbours) or a whole cluster
(scripts/launch_cluster.sh)."""
