# SPDX-License-Identifier: Apache-2.0
"""Engines that answer no health probe while requests wait there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import anyio
import pytest
from proxied import registry, settings_with

from vllm_ascend_pd.proxy.http.engine_client import EngineClient, ReadTimeout
from vllm_ascend_pd.proxy.routing import dispatch
from vllm_ascend_pd.proxy.routing.answers import EngineRole
from vllm_ascend_pd.proxy.routing.dispatch import Attempt, StallWatch

pytestmark = pytest.mark.anyio


class Probes:
    """Takes the place of the client. The probe of one engine is still awaited, that of the other has timed out."""

    def __init__(self) -> None:
        self.first_began = anyio.Event()

    @asynccontextmanager
    async def get(self, url: str, _: float) -> AsyncIterator[None]:
        if url.startswith("http://first"):
            self.first_began.set()
            await anyio.sleep_forever()
        raise ReadTimeout
        yield


async def test_an_engine_that_is_silent_delays_the_probe_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_STALL_LOOK_SECONDS", 0.01)
    probes = Probes()
    watch = StallWatch(registry(EngineRole.DECODE), cast("EngineClient", probes), settings_with(probe_timeout=30.0))
    first, second = Attempt(), Attempt()
    first.engine, second.engine = "http://first", "http://second"
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        with anyio.fail_after(5), watch.over(first):
            await probes.first_began.wait()
            with watch.over(second):
                await anyio.sleep_forever()
        assert second.cut is not None
        assert "no answer to a health probe within 30 s" in second.cut[1]
        tasks.cancel_scope.cancel()
