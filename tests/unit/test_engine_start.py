# SPDX-License-Identifier: Apache-2.0
"""What an engine does at its start: it warns of known faults (tests/integration/test_said_at_start.py has the log),
logs as vLLM does, patches vLLM's scheduler, and closes what it has opened if it cannot be built."""

import logging
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ascend_pd import register
from vllm_ascend_pd.connector import build as build_worker
from vllm_ascend_pd.connector import known_faults, patches
from vllm_ascend_pd.connector.known_faults import overwrites_blocks, warn_of_known_faults
from vllm_ascend_pd.connector.setup import EngineSetup
from vllm_ascend_pd.core.config import ConfigError, ConnectorConfig

CASES = [
    ("0.23.0", 2, True),
    ("0.23.0+local", 2, True),
    ("0.23.0", 1, False),
    ("0.23.0.post1", 2, False),
    ("0.30.0", 2, False),
    (None, 2, False),
]


@pytest.mark.parametrize(("installed", "data_parallel", "warns"), CASES)
def test_idle_ranks_that_overwrite_blocks_are_warned_of(
    installed: str | None,
    data_parallel: int,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def version(name: str) -> str:
        assert name == "vllm-ascend"
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(known_faults, "version", version)
    assert overwrites_blocks(installed, data_parallel) is warns
    with caplog.at_level(logging.WARNING, "vllm_ascend_pd"):
        warn_of_known_faults(data_parallel)
    assert bool(caplog.records) is warns


# --- the log -----------------------------------------------------------------------------------------------------

OURS, OF_VLLM = logging.getLogger("vllm_ascend_pd"), logging.getLogger("vllm")


@pytest.fixture
def root_without_warnings() -> Iterator[None]:
    """A library has raised the root logger's level."""
    levels = [(logger, logger.level) for logger in (logging.root, OURS)]
    logging.root.setLevel(logging.ERROR)
    OURS.setLevel(logging.NOTSET)
    yield
    for logger, level in levels:
        logger.setLevel(level)


@pytest.mark.usefixtures("root_without_warnings")
def test_warnings_are_logged_as_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler()
    monkeypatch.setattr(OF_VLLM, "handlers", [handler])
    monkeypatch.setattr(OURS, "handlers", [])
    register()
    register()
    assert OURS.handlers == [handler]
    assert logging.getLogger("vllm_ascend_pd.decode.scheduler").isEnabledFor(logging.WARNING)


# --- patches of decode's scheduler: tests/integration/test_decode_pressure.py shows what they do ------------------


def test_a_scheduler_that_no_patch_fits_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests could wait forever there. vLLM 0.32 and 0.33 are such versions."""
    monkeypatch.delattr(Scheduler, "_select_waiting_queue_for_scheduling")
    with pytest.raises(ConfigError, match=f"vLLM {vllm.__version__} schedules requests in a way"):
        patches.install_for_decode_scheduler()


# --- a worker that cannot be built -------------------------------------------------------------------------------


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
    monkeypatch.setattr(
        build_worker, "describe", lambda *args, **kwargs: SimpleNamespace(regions=list, sharing_buffers=())
    )
    monkeypatch.setattr(build_worker, "readers_of_others", lambda config: None)
    monkeypatch.setattr(build_worker, "TransferEngine", Engine)
    config: Any = SimpleNamespace()
    setup = EngineSetup(config, config, ConnectorConfig(), "p", "p-1", "127.0.0.1", 1, prefills=True, recomputes=False)
    with pytest.raises(RuntimeError, match="overlap"):
        build_worker.connect_worker(setup, {})
    assert closed == ["engine", "device"]
