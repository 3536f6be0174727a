# SPDX-License-Identifier: Apache-2.0
"""Every kind of request is answered through the proxy as a single engine answers it: see `harness/answers.py` for what
is compared, `kinds.py` for what is sent. Answers are named after the client's request id."""

import httpx
import pytest
from kinds import BATCH, CHAT, COMPLETIONS, KINDS, MAX_MODEL_LEN, MESSAGES, MODEL, Kind

from harness.answers import Answer, answer_of, differences
from harness.clusters import Cluster, one_to_one
from harness.engines import EngineConfig
from harness.plain_http import PLAIN_HTTP
from harness.pool import Reference

ENGINE = EngineConfig(
    max_model_len=MAX_MODEL_LEN,
    max_num_batched_tokens=1024,  # a prompt with a seed that is computed in parts ends an engine of the CPU backend
    args=(
        *("--served-model-name", "kinds"),
        "--enable-prompt-tokens-details",
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--reasoning-parser", "deepseek_v3"),
        "--enable-scale-out",
        "--enable-tokenizer-info-endpoint",
        "--trust-request-chat-template",
        "--enable-prompt-embeds",
        *("--scheduling-policy", "priority"),
    ),
)

pytestmark = [
    pytest.mark.parametrize("cluster", [one_to_one(1, 1, model=MODEL, engine=ENGINE)], ids=str, indirect=True),
    pytest.mark.timeout(600),
]


REQUEST_ID = {"X-Request-Id": "abc"}
NAMED = (COMPLETIONS, CHAT, BATCH, MESSAGES)
"""Routes whose answers have the request's id in theirs."""


def names_in(answer: Answer) -> set[str]:
    """Returns the ids of an answer, or of a stream's events."""
    parts = [event["data"] for event in answer.body] if isinstance(answer.body, list) else [answer.body]
    named = [each for part in parts if isinstance(part, dict) for each in (part, part.get("message"))]
    return {each["id"] for each in named if isinstance(each, dict) and "id" in each}


def answers(url: str, kind: Kind) -> list[Answer]:
    with httpx.Client(base_url=url, timeout=120, **PLAIN_HTTP) as client:
        return [
            answer_of(client.request(kind.method, kind.path, content=kind.content, headers=kind.headers | REQUEST_ID))
            for _ in range(kind.times)
        ]


@pytest.mark.parametrize("name", KINDS)
def test_answered_as_by_a_single_engine(cluster: Cluster, reference: Reference, name: str) -> None:
    kind = KINDS[name]
    ours, theirs = answers(cluster.url, kind), answers(reference.engine.url, kind)
    assert kind.status in (None, theirs[0].status), theirs[0]
    if kind.own_words:
        assert [each.status for each in ours] == [each.status for each in theirs]
        return
    found = [
        difference
        for one, other in zip(ours, theirs, strict=True)
        for difference in differences(one.compared(), other.compared())
    ]
    assert not found, "\n".join(found)
    if kind.path in NAMED and ours[0].status == 200:
        assert names_in(ours[0]) == names_in(theirs[0]) != set()
    if kind.transfers and isinstance(ours[0].body, dict):
        assert ours[0].transfer, "prefill did not compute it"
        assert ours[0].transfer["received_bytes"] > 0
