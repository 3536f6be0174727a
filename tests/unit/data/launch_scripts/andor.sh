# SPDX-License-Identifier: Apache-2.0
# started as: andor.sh big
[ "$1" = big ] && TP=8 || TP=2
vllm serve MODEL -tp $TP --kv-transfer-config '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"kv_consumer","kv_port":"23000"}'
