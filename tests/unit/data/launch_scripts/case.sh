# SPDX-License-Identifier: Apache-2.0
# started as: case.sh prefill
case "$1" in
  prefill) ROLE=kv_producer PORT=8100 TP=8;;
  decode) ROLE=kv_consumer PORT=8200 TP=2;;
esac
vllm serve MODEL --port $PORT -tp $TP --kv-transfer-config '{"kv_connector":"MooncakeLayerwiseConnector","kv_role":"'$ROLE'","kv_port":"23000"}'
