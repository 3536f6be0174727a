# SPDX-License-Identifier: Apache-2.0
ARGS=(--tensor-parallel-size 2 --port 8200)
vllm serve MODEL "${ARGS[@]}" --kv-transfer-config '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":"23000"}'
