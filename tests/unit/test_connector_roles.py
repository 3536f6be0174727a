# SPDX-License-Identifier: Apache-2.0
"""How a worker's role is built, and what is imported without vLLM."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_pd.connector import build as build_worker
from vllm_ascend_pd.connector.setup import EngineSetup
from vllm_ascend_pd.core.config import ConnectorConfig


def test_what_a_worker_has_opened_is_closed_if_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Engine:
        def __init__(self, *args: object) -> None: ...

        def register(self, *args: object, **kwargs: object) -> None:
            raise RuntimeError("the caches overlap other memory")

        def close(self) -> None:
            closed.append("engine")

    device = SimpleNamespace(name="cpu", transfer_protocol="tcp", close=lambda: closed.append("device"))
    monkeypatch.setattr(build_worker, "make_device", lambda kind: device)
    monkeypatch.setattr(build_worker, "_rank_info", lambda setup: SimpleNamespace(pp_rank=0, rank=0, share=None))
    monkeypatch.setattr(build_worker, "layer_specs", lambda *args: {})
    monkeypatch.setattr(build_worker, "describe", lambda *args, **kwargs: SimpleNamespace(regions=list, in_turn=()))
    monkeypatch.setattr(build_worker, "readers_of_others", lambda config: None)
    monkeypatch.setattr(build_worker, "TransferEngine", Engine)
    config: Any = SimpleNamespace()
    setup = EngineSetup(config, config, ConnectorConfig(), "p", "p-1", "127.0.0.1", 1, prefills=True)
    with pytest.raises(RuntimeError, match="overlap"):
        build_worker.build_worker_role(setup, {})
    assert closed == ["engine", "device"]
