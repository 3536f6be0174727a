# SPDX-License-Identifier: Apache-2.0
"""Chats with images: Qwen3-VL on vllm-ascend, prefill and decode behind the proxy."""

import dataclasses
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from harness.agreement import compare
from harness.ascend import WITH_IMAGES
from harness.client import Client, Messages, at_once
from harness.clusters import Cluster
from harness.engines import EngineConfig
from harness.failures import wait_all_blocks_free
from harness.http_server import Handler, serving
from harness.pool import Reference, long
from harness.vision import VISION, chat_about, data_url, png
from npu_engines import on_npu, one_to_one

pytestmark = [pytest.mark.npu, pytest.mark.timeout(600)]

ARGS = ("--limit-mm-per-prompt", '{"image": 4, "video": 0}')
TOOLS_ON_DECODE = ("--enable-auto-tool-choice", "--tool-call-parser", "pythonic")
ALIKE = one_to_one("qwen3-vl", 1, 1, args=ARGS, env=WITH_IMAGES, model=VISION)
QWEN3_VL = dataclasses.replace(
    ALIKE,
    decode=tuple(dataclasses.replace(decode, args=(*decode.args, *TOOLS_ON_DECODE)) for decode in ALIKE.decode),
    single=on_npu(EngineConfig(args=ARGS, env=WITH_IMAGES)),
)

the_cluster = pytest.mark.parametrize("cluster", [long(QWEN3_VL)], ids=str, indirect=True)


@pytest.fixture
def single(reference: Reference) -> Iterator[Client]:
    """Talks to the single engine."""
    with Client(reference.engine.url, logprobs=10) as client:
        yield client


def wrong_answers(client: Client, single: Client, chats: list[Messages]) -> list[str]:
    answers = at_once(lambda messages: client.chat(messages), chats, concurrency=4)
    results = [compare(answer, single.chat(messages)) for answer, messages in zip(answers, chats, strict=True)]
    assert all(answer.kv_transfer_params is not None for answer in answers), "prefill had no part in it"
    return [why for _, why in results if why]


@the_cluster
def test_answers_are_those_of_a_single_engine(cluster: Cluster, client: Client, single: Client) -> None:
    """One and two images, before little text and much, of several sizes."""
    wide = data_url(png("wide", 320, 64))
    chats = [
        chat_about("What is this? " * n, data_url(png(f"of {n}")), *others) for n in (1, 40) for others in ((), (wide,))
    ]
    assert wrong_answers(client, single, chats) == []
    assert (
        client.chat(chats[0]).token_ids != client.chat(chat_about("What is this? ", data_url(png("other")))).token_ids
    )
    wait_all_blocks_free(cluster)


@the_cluster
def test_cached_images(client: Client, single: Client) -> None:
    """Images that both engines know already, and another one after the same beginning."""
    first = data_url(png("cached"))
    chats = [chat_about("What comes next? " * 20, first, *more) for more in ((), (), (data_url(png("next")),))]
    assert [wrong_answers(client, single, [chat]) for chat in chats] == [[], [], []]


@the_cluster
@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}], ids=["default", "auto"])
def test_tools_beside_an_image(client: Client, choice: dict[str, str]) -> None:
    """Prefill renders the prompt itself, and has no parser of tool calls."""
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    body = {"messages": chat_about(f"What is this? {choice}", data_url(png("tools"))), "tools": [tool], **choice}
    answer = client.http.post("/v1/chat/completions", json={"model": client.model, "max_tokens": 4, **body})
    assert answer.status_code == 200, answer.text
    assert answer.json()["kv_transfer_params"] is not None, "prefill had no part in it"


FETCHED: Counter[str] = Counter()
"""By path of the image server."""


class Images(Handler):
    """Serves an image per path. Below `/changing` it is another one each time."""

    def do_GET(self) -> None:
        FETCHED[self.path] += 1
        self.begin(200, "image/png")
        turn = FETCHED[self.path] if self.path.startswith("/changing") else 0
        self.wfile.write(png(f"{self.path} {turn}"))


@pytest.fixture(scope="module")
def images() -> Iterator[str]:
    with serving(Images) as url:
        yield url


@the_cluster
def test_an_image_that_changes_between_decode_and_prefill_is_refused(
    cluster: Cluster, client: Client, images: str
) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="images, sounds or videos differ"):
        client.chat(chat_about("What is this?", f"{images}/changing"))
    wait_all_blocks_free(cluster)
