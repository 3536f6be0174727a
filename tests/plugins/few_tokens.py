# SPDX-License-Identifier: Apache-2.0
"""A decode engine that says which requests had more tokens computed in one step than a decode step has."""

import sys
from typing import Any

from vllm_ascend_pd.connector.roles import DecodeSchedulerRole

SAID = "too many tokens computed on decode"


def say_if_more_than(tokens: int) -> None:
    """Drafts are not counted."""
    build_step = DecodeSchedulerRole.build_step

    def count(self: DecodeSchedulerRole, output: Any) -> Any:
        for request_id, scheduled in output.num_scheduled_tokens.items():
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            if scheduled - drafts > tokens:
                print(f"{SAID}: {scheduled - drafts} of {request_id}", file=sys.stderr, flush=True)
        return build_step(self, output)

    DecodeSchedulerRole.build_step = count  # type: ignore[method-assign]
