# SPDX-License-Identifier: Apache-2.0
vllm serve MODEL -tp 2 -dp 4 --kv-transfer-config '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":"23000"}' -dpl 2 -dpa 192.0.2.1 -ep -O3
