# SPDX-License-Identifier: Apache-2.0
OPTS="--max-num-seqs 32 --enforce-eager"
vllm serve MODEL -tp 2 $OPTS --kv-transfer-config '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":"23000"}'
