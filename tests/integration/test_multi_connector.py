# SPDX-License-Identifier: Apache-2.0
"""The connector beside another one, below vLLM's own MultiConnector, without an engine."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from harness.connectors import NAME, caches_of, config_of, full_attention, scheduler_connector
from harness.engines import Role
from harness.multi_connector import (
    OF_ANOTHER,
    TP,
    Both,
    decode_is_served,
    hooks_left_out,
    others_are_left_alone,
    prefill_pushes,
    transfer_config,
)
from harness.scheduling import BLOCK, make_request
from vllm_ascend_pd.connector.connector import LayerwisePushConnector
from vllm_ascend_pd.connector.setup import asked_before
from vllm_ascend_pd.core.config import ConfigError
from vllm_ascend_pd.core.role import ConnectorRole


def test_it_hands_on_every_hook_of_ours() -> None:
    left_out = hooks_left_out(MultiConnector, LayerwisePushConnector)
    assert left_out == set(), "MultiConnector answers these itself, our class is never asked"


@pytest.fixture(params=[True, False], ids=["ours-first", "ours-second"])
def both(request: pytest.FixtureRequest, role: Role, model: Path, tmp_path: Path) -> Iterator[Both]:
    """Of an engine of `role`, in either order."""
    config = config_of(model, transfer_config(role, request.param, tmp_path), tensor_parallel_size=TP)
    caches = caches_of(full_attention(block_size=BLOCK, num_kv_heads=2))
    with scheduler_connector(config, caches) as multi:
        assert isinstance(multi, MultiConnector)
        yield Both(multi, request.param)


on_prefill = pytest.mark.parametrize("role", [Role.PREFILL], ids=["prefill"])
on_decode = pytest.mark.parametrize("role", [Role.DECODE], ids=["decode"])
on_either = pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=["prefill", "decode"])


@on_decode
def test_decode_is_served_whatever_stands_beside_it(both: Both) -> None:
    decode_is_served(both)


@on_prefill
def test_prefill_pushes_whatever_stands_beside_it(both: Both) -> None:
    prefill_pushes(both)


@pytest.mark.parametrize("params", OF_ANOTHER.values(), ids=OF_ANOTHER.keys())
@on_either
def test_requests_for_another_are_left_alone(both: Both, params: Any) -> None:
    others_are_left_alone(both, params)


class _OfAnother(KVConnectorHandshakeMetadata):
    pass


@on_decode
def test_metadata_of_another_is_refused(both: Both) -> None:
    with pytest.raises(ConfigError, match=r"_OfAnother.*must be the first"):
        both.multi.set_xfer_handshake_metadata_pp_aware({(0, 0): _OfAnother()})


@on_prefill
def test_prefill_has_no_use_for_metadata(both: Both) -> None:
    both.multi.set_xfer_handshake_metadata_pp_aware({(0, 0): _OfAnother()})


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
@pytest.mark.parametrize("ours_first", [True, False])
def test_by_default_no_prompt_is_computed_before_decode_gives_it_memory(
    model: Path, tmp_path: Path, role: Role, ours_first: bool
) -> None:
    """On prefill, layers may use buffers in turn, which only ranks know. On decode, the other may have a part of a
    prompt, which prefill would compute."""
    transfer = transfer_config(role, ours_first, tmp_path)
    [extra] = [
        each["kv_connector_extra_config"]
        for each in transfer["kv_connector_extra_config"]["connectors"]
        if each["kv_connector"] == NAME
    ]
    extra.update({"hold_timeout_s": 60.0} if role is Role.PREFILL else {"prefill_first_tokens": "auto"})
    with scheduler_connector(config_of(model, transfer), caches_of(full_attention(), blocks=1000)) as multi:
        [ours] = [each for each in multi._connectors if isinstance(each, LayerwisePushConnector)]
        if role is Role.PREFILL:
            assert ours._role._held is not None
            assert ours.get_kv_connector_stats() is None
        else:
            params = {"do_remote_prefill": True, "metaserver": "http://127.0.0.1:9", "prefill_first_tokens": 1}
            request = make_request("long", 3 * BLOCK, params)
            ours._role.add_request(request)
            assert ours._role.matched_tokens(request, 0) == 3 * BLOCK


@on_either
def test_every_rank_counts(both: Both) -> None:
    """The other does not say how many reports it makes: what MultiConnector makes of that must be our number."""
    assert both.ours.get_finished_count() == TP
    assert (both.multi.get_finished_count() or TP) == TP


@pytest.mark.parametrize("prefills", [True, False])
@pytest.mark.parametrize("is_worker", [True, False])
def test_vllm_ascend_finds_whom_to_ask_for_buffers(prefills: bool, is_worker: bool) -> None:
    """By these names, on AscendMultiConnector's construction: before the worker's caches are registered."""
    connector: Any = LayerwisePushConnector.__new__(LayerwisePushConnector)
    connector._setup, connector._is_worker = SimpleNamespace(prefills=prefills), is_worker
    connector._role = ConnectorRole()
    asked = connector.is_producer and connector.connector_worker is not None
    assert asked == (prefills and is_worker)
    assert connector.supports_layerwise_buffer_reuse
    waited: list[str | int] = []
    connector._role = SimpleNamespace(await_buffer=waited.append)
    connector.wait_for_layer_reuse(3)
    connector.wait_for_layer_load("model.layers.7.attn")
    assert waited == [3, "model.layers.7.attn"]


OURS, POOL = ({"kv_connector": name} for name in ("LayerwisePushConnector", "AscendStoreConnector"))


@pytest.mark.parametrize(
    ("connectors", "before"),
    [
        ([OURS, POOL], []),
        ([POOL, POOL, OURS], ["AscendStoreConnector"] * 2),
        ([POOL], []),
        ("what", []),
        (["what", OURS], ["?"]),
    ],
)
def test_connectors_that_are_asked_first(connectors: Any, before: list[str]) -> None:
    assert asked_before("MultiConnector", {"connectors": connectors}) == before
    assert asked_before("AnotherConnector", {"connectors": connectors}) == []
