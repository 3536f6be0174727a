# SPDX-License-Identifier: Apache-2.0
"""Decode's scheduler with a real metaserver client, a metaserver for it, and requests that get a ticket."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler

import pytest

from harness.metaserver import metaserver as serving_metaserver
from harness.schedulers import decode_scheduler
from harness.scheduling import make_request
from harness.waiting import wait_until
from vllm_ascend_pd.core.caches import TokenGroup
from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.protocol import FAILURE_SUFFIX, METASERVER_PATH
from vllm_ascend_pd.core.step import DecodeStep
from vllm_ascend_pd.decode.metaserver import MetaserverClient
from vllm_ascend_pd.decode.scheduler import DecodeScheduler
from vllm_ascend_pd.decode.tickets import EngineInfo

BLOCK = 4
PROMPT = 10
BLOCKS = ([7, 1, 5],)
ENGINE = EngineInfo("decode-0", "10.0.0.1", 5555, 2)
CONFIG = ConnectorConfig(transfer_timeout_s=20, metaserver_retries=0)


class Metaserver:
    """What was posted. Posts are answered with `status`, once `answering` is set."""

    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.bodies: list[dict] = []
        self.failures: list[dict] = []
        self.answering = threading.Event()
        self.answering.set()

    def answer(self, post: BaseHTTPRequestHandler, content: bytes) -> None:
        if post.path == METASERVER_PATH + FAILURE_SUFFIX:
            self.failures.append(json.loads(content))
        else:
            self.bodies.append(json.loads(content))
            self.answering.wait(20)
        post.send_response(self.status)
        post.end_headers()


@pytest.fixture
def metaserver() -> Iterator[Metaserver]:
    metaserver = Metaserver()
    with serving_metaserver(metaserver.answer) as metaserver.url:
        yield metaserver
        metaserver.answering.set()


@pytest.fixture
def scheduler() -> Iterator[DecodeScheduler]:
    scheduler = decode_scheduler(ENGINE, [TokenGroup(BLOCK)], MetaserverClient(CONFIG, own_host="127.0.0.1"))
    yield scheduler
    scheduler.close()


def wanting(url: object, request_id: str = "r", num_tokens: int = PROMPT, **wants: object):
    """A request as the proxy sends it to decode."""
    return make_request(request_id, num_tokens, {"do_remote_prefill": True, "metaserver": url}, **wants)


def issue(scheduler: DecodeScheduler, request, blocks=BLOCKS, computed: int = 0) -> DecodeStep:
    """The step in which `request` gets its ticket."""
    external = scheduler.matched_tokens(request, computed)
    scheduler.allocated(request, blocks, external)
    return scheduler.build_step({"other": 1})


def step_with(scheduler: DecodeScheduler, what: Callable[[DecodeStep], object]) -> DecodeStep:
    """Runs empty steps until `what` is in one."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        step = scheduler.build_step({})
        if what(step):
            return step
        time.sleep(0.005)
    raise AssertionError("no step had it")


eventually = partial(wait_until, timeout_s=10)
