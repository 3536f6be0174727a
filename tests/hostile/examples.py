# SPDX-License-Identifier: Apache-2.0
"""Messages as engines send them, with a value in every field: those that tests/unit/wire_messages.py keeps."""

import json
from pathlib import Path

import msgspec

from vllm_ascend_pd.core.protocol import PROTOCOL_VERSION, EngineDescription, decode

KEPT = Path(__file__).parents[1] / "unit" / "data" / "wire" / f"version-{PROTOCOL_VERSION}.json"
MESSAGES = tuple(decode(bytes.fromhex(frame))[1] for frame, _ in json.loads(KEPT.read_text()))
PLAIN = tuple(msgspec.to_builtins(message, builtin_types=(bytes,)) for message in MESSAGES)
*_, DESCRIPTION = (message for message in MESSAGES if isinstance(message, EngineDescription))
RANK = DESCRIPTION.ranks[0]
LARGE = msgspec.structs.replace(DESCRIPTION, ranks=(RANK,) * 250)
