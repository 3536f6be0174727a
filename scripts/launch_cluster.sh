#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
echo 'launch_cluster.sh: there is no launcher over ssh any more: start launch_prefill.sh, launch_decode.sh and' \
  'launch_proxy.sh on their hosts (examples/two-nodes-1p1d, docs/migrating.md)' >&2
exit 2
