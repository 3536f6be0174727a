# SPDX-License-Identifier: Apache-2.0
export ASCEND_BASE_PORT=1000
vllm serve MODEL -tp 2 --kv-transfer-config '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":"1500"}'
