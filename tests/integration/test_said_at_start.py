# SPDX-License-Identifier: Apache-2.0
"""What an engine's log says at its start: the hosts whose tickets prefill serves, the places where decode's tickets may
go, and known faults of installed versions."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from harness.connectors import config_of, scheduler_connector
from vllm_ascend_pd.connector import known_faults
from vllm_ascend_pd.transport.secret_files import new_secret, write_new

Said = Callable[..., str]

SECRET = "a file with a secret"
"""Stands for its path."""


@pytest.fixture
def said(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Said:
    """Returns the line with `words` that an engine of a role shows at its start, on a host with a hundred networks.
    `options`: of `EngineArgs`."""
    bridges = [SimpleNamespace(address=f"198.51.{n}.7", netmask="255.255.255.0") for n in range(100)]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"bridges": bridges})

    def start(role: str, extra: dict[str, Any], words: str, **options: Any) -> str:
        if extra.get("secret_file") == SECRET:
            write_new(tmp_path / "secret", new_secret())
            extra = extra | {"secret_file": str(tmp_path / "secret")}
        config = config_of(model, {"kv_role": role, "kv_connector_extra_config": extra}, **options)
        shown = logging.getLogger("vllm")  # what an engine shows
        monkeypatch.setattr(shown, "handlers", [*shown.handlers, caplog.handler])
        with scheduler_connector(config):
            pass
        # Once or twice, as vLLM's logger may hand records on.
        [line] = {text for record in caplog.records if words in (text := record.getMessage())}
        return line

    return start


@pytest.mark.parametrize(
    ("extra", "named", "not_named"),
    [
        ({}, "127.0.0.0/8", "10.0.0.0/8"),
        ({"trust_network": True}, "10.0.0.0/8", "8.8.8.0/24"),
        ({"trust_network": True}, "198.51.0.0/24", "198.51.99.0/24"),  # of a hundred networks, only some are named
        ({"secret_file": SECRET}, "any host", "10.0.0.0/8"),
        ({"peers": ["203.0.113.0/24"]}, "203.0.113.0/24", "10.0.0.0/8"),
    ],
)
def test_prefills_start_names_the_networks_that_it_admits(
    extra: dict[str, Any], named: str, not_named: str, said: Said
) -> None:
    line = said("kv_producer", extra, "decode engines are served at")
    assert named in line
    assert not_named not in line
    assert len(line) < 1000


ELSEWHERE = "http://proxy.example:8000"


@pytest.mark.parametrize(
    ("extra", "proxies", "named", "not_named"),
    [
        ({}, "this host only", "127.0.0.0/8", "10.0.0.0/8"),
        ({"trust_network": True}, "peers names no URL", "198.51.0.0/24", "198.51.99.0/24"),
        ({"peers": [ELSEWHERE]}, ELSEWHERE, "127.0.0.0/8", "this host only"),
        (
            {"secret_file": SECRET},
            "those with the signature of this cluster's proxies",
            "any host with a signature, no host without",
            "this host only",
        ),
        ({"peers": ["203.0.113.0/24"]}, "this host only", "203.0.113.0/24", "10.0.0.0/8"),
    ],
)
def test_decodes_start_names_the_places_where_its_tickets_may_go(
    extra: dict[str, Any], proxies: str, named: str, not_named: str, said: Said
) -> None:
    line = said("kv_consumer", extra, "tickets are posted to proxies at")
    before, _, after = line.partition("prefill engines at")
    assert proxies in before
    assert named in after
    assert not_named not in line
    assert line.endswith("are refused")
    assert len(line) < 1000


def test_decodes_start_warns_of_a_fault_of_the_installed_vllm_ascend(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_faults, "version", {"vllm-ascend": "0.23.0"}.__getitem__)
    line = said("kv_consumer", {}, "vllm-ascend 0.23.0 with data parallelism on decode", data_parallel_size=2)
    assert line == known_faults.IDLE_RANKS_OVERWRITE_BLOCKS


def test_prefills_start_says_why_prompts_are_not_computed_before_decode_gives_them_memory(said: Said) -> None:
    words = "decode gives all prompts memory before they are computed"
    assert "too few blocks for two prompts of --max-model-len tokens" in said("kv_producer", {}, words)
