# SPDX-License-Identifier: Apache-2.0
"""Names of attributes of KV transfers' spans."""

REQUEST_ID = "gen_ai.request.id"
TOKENS = "kv_pd.tokens"
CACHED_TOKENS = "kv_pd.cached_tokens"
DECODE_ENGINE = "kv_pd.decode_engine"
RECEIVED_BYTES = "kv_pd.received_bytes"
EARLY_BYTES = "kv_pd.bytes_before_prefill_end"
