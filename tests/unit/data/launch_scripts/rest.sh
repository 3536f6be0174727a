# SPDX-License-Identifier: Apache-2.0
# started as: rest.sh -tp 8 --seed 1
vllm serve MODEL --port 8200 --kv-transfer-config '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":"23000"}' "$@"
