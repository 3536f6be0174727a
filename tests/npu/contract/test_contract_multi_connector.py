# SPDX-License-Identifier: Apache-2.0
"""Our connector as a child of vllm-ascend's MultiConnector."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm_ascend_contract import (
    OURS,
    REQUEST_ID,
    cache_config,
    connector_class,
    engine_config,
)

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
from harness.scheduling import make_request, make_ticket

pytestmark = pytest.mark.npu


def test_multi_connector_hands_on_every_hook_of_ours(plugins: None) -> None:
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector

    left_out = hooks_left_out(AscendMultiConnector, connector_class())
    assert left_out == set(), f"MultiConnector answers {left_out} itself, our class is never asked"


@pytest.fixture
def multi(plugins: None, dense_model: Path) -> Iterator[Any]:
    """vllm-ascend's MultiConnector on a prefill engine's scheduler with ours as its only child."""
    from harness.connectors import scheduler_connector

    extra = {"trust_network": True}  # the ticket's host is another one
    child = {"kv_connector": OURS, "kv_role": "kv_producer", "kv_port": 20001, "kv_connector_extra_config": extra}
    config = engine_config(
        dense_model, kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [child]}
    )
    with scheduler_connector(config, cache_config()) as connector:
        yield connector


def test_ours_as_a_child_of_multi_connector(multi: Any) -> None:
    """A child that loads nothing is told of no blocks: they must be taken from the step that computes them."""
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector

    assert type(multi) is AscendMultiConnector
    [child] = multi._connectors
    assert type(child) is connector_class()
    ours = {"connectors": [{"kv_connector": OURS, "kv_role": "kv_producer"}]}
    assert not multi.requires_piecewise_for_cudagraph(ours), "MultiConnector takes full graphs away"
    assert not hasattr(multi, "on_kv_cache_written"), "MultiConnector hands it on now: layers go earlier below it too"

    prompt, blocks = 300, [5, 6, 7]
    ticket = make_ticket(prompt, [1, 2, 3])
    request = make_request(REQUEST_ID, prompt, msgspec.to_builtins(ticket))
    given: list[Any] = []
    allocated = child.update_state_after_alloc
    child.update_state_after_alloc = lambda *args: (given.append(args), allocated(*args))

    def allocation(ids: list[int]) -> Any:
        return SimpleNamespace(get_block_ids=lambda: (ids,), new_empty=lambda: allocation([]))

    assert multi.get_num_new_matched_tokens(request, 0) == (0, False)
    multi.update_state_after_alloc(request, allocation(blocks), 0)
    [(_, seen, external)] = given
    assert (seen.get_block_ids(), external) == (([],), 0), (
        "MultiConnector now hands on the blocks: simplify `allocated`"
    )

    new = SimpleNamespace(req_id=REQUEST_ID, block_ids=(blocks,), num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    step = multi.build_connector_meta(
        SimpleNamespace(
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={REQUEST_ID: prompt},
            total_num_scheduled_tokens=prompt,
            preempted_req_ids=set(),
        )
    )
    [sent] = step.metadata[0].step.sends
    assert (sent.start, sent.stop, sent.last, sent.blocks) == (0, prompt, True, (blocks,))
    assert multi.request_finished_all_groups(request, (blocks,)) == (True, None)


@pytest.fixture(params=[True, False], ids=["ours-first", "ours-second"])
def both(
    request: pytest.FixtureRequest, role: Role, plugins: None, dense_model: Path, tmp_path: Path
) -> Iterator[Both]:
    """vllm-ascend's MultiConnector with ours and another below it, on the scheduler of an engine of `role`."""
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector

    from harness.connectors import scheduler_connector

    config = engine_config(dense_model, tp=TP, **transfer_config(role, request.param, tmp_path))
    with scheduler_connector(config, cache_config()) as connector:
        assert type(connector) is AscendMultiConnector
        yield Both(connector, request.param)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_ours_beside_another(both: Both, role: Role) -> None:
    (prefill_pushes if role is Role.PREFILL else decode_is_served)(both)


@pytest.mark.parametrize("params", OF_ANOTHER.values(), ids=OF_ANOTHER.keys())
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_requests_for_another_are_left_alone(both: Both, params: Any) -> None:
    others_are_left_alone(both, params)
