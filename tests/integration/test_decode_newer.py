# SPDX-License-Identifier: Apache-2.0
"""What vLLM asks of the scheduler side from 0.32 or 0.33 on, with its own scheduler."""

from contextlib import nullcontext
from pathlib import Path

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from harness.connectors import config_of, scheduler_connector
from harness.decode_scheduler import BLOCK, LONGEST, EngineScheduler, MakeScheduler, closed_schedulers
from harness.engines import Role
from harness.multi_connector import transfer_config
from vllm_ascend_pd.connector.patches import vllm_0_33_lost_steps
from vllm_ascend_pd.core.config import ConfigError

if not hasattr(base, "CacheHitSource"):
    pytest.skip("vLLM before 0.32 asks nothing of this", allow_module_level=True)


make = closed_schedulers()


def test_tokens_that_prefill_delivers_count_as_of_a_peer(make: MakeScheduler) -> None:
    decode = make(blocks=LONGEST)
    request = decode.add("a", 2 * BLOCK)
    decode.begin_step()
    [(source, tokens)] = decode.vllm.connector_prefix_cache_stats.hits_by_source.items()
    assert (source, tokens) == (base.CacheHitSource.P2P, 2 * BLOCK)
    assert request.num_computed_tokens == tokens
    decode.settle()
    decode.run()


@pytest.fixture
def deferring(make: MakeScheduler) -> EngineScheduler:
    """A scheduler that tells the connector of a transfer's blocks when the steps in flight have ended, as vLLM 0.33
    does for HiSparse. One request runs, so there are always steps in flight."""
    decode = make(blocks=3 * LONGEST, scheduler_class=AsyncScheduler)
    if not hasattr(decode.vllm, "deferred_loads"):
        pytest.skip("vLLM 0.32 defers no loads")
    decode.vllm.defer_block_free = decode.vllm.defer_async_loads = True
    decode.add("runs", BLOCK, generates=60, remote=False)
    decode.step()
    return decode


def test_blocks_of_a_transfer_that_the_connector_hears_of_later(deferring: EngineScheduler) -> None:
    deferring.add("later", 2 * BLOCK, first=1000)
    deferring.begin_step()
    assert list(deferring.vllm.deferred_loads) == ["later"]
    assert "later" not in deferring.expected
    for _ in range(4):
        deferring.step()
    assert "later" in deferring.expected
    deferring.run(100)


def test_blocks_of_a_transfer_that_the_connector_never_hears_of(deferring: EngineScheduler) -> None:
    """Its client leaves before. `close` checks that nothing is left of the request."""
    deferring.add("never", 2 * BLOCK, first=1000)
    deferring.begin_step()
    assert list(deferring.vllm.deferred_loads) == ["never"]
    deferring.abort("never")
    deferring.run(100)
    assert "never" not in deferring.expected
    assert deferring.tickets == 0


@pytest.mark.skipif(not vllm_0_33_lost_steps.fits(), reason="vLLM before 0.33 forgets the steps on their way")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=["prefill", "decode"])
def test_an_engine_that_survives_faults_has_no_other_connector_beside_ours(
    role: Role, model: Path, tmp_path: Path
) -> None:
    beside = transfer_config(role, True, tmp_path)
    for transfer in (beside, beside["kv_connector_extra_config"]["connectors"][0]):
        config = config_of(model, transfer)
        config.parallel_config.enable_fault_tolerance = True
        refused = pytest.raises(ConfigError, match="other connectors") if transfer is beside else nullcontext()
        with refused, scheduler_connector(config):
            pass
