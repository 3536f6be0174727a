# SPDX-License-Identifier: Apache-2.0
"""Model Runner V2: vLLM's own connector classes call this connector's hooks, in ranks that send over TCP.

From vLLM 0.33 on, they take transfer results before the draft runs, and end the step after it. Every step ends, empty
ones too.
"""

import pytest

from harness.kv import Model, Side
from harness.rank_programs import ONCE, Hooks
from harness.ranks import Pair, expect_delivery, pair_of_each, prompts, run
from harness.runner_v2 import RunnerV2Decode, RunnerV2Prefill
from vllm_ascend_pd.connector.vllm_view import HAS_TRANSFER_RESULTS

if not HAS_TRANSFER_RESULTS:
    pytest.skip("vLLM 0.23 has other connector classes", allow_module_level=True)

PAIRS = {"TP1_TO_TP1": (Model(layers=3, drafts=1), Side(1), Side(1))}
HOOKS = {
    "each layer once": ONCE,
    "the draft's several times": Hooks(saved=(0, 1, 2, 2, 2)),
    "none": Hooks(saved=()),
}

pair = pair_of_each(PAIRS, programs=(RunnerV2Prefill, RunnerV2Decode))


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS.keys())
def test_all_layers_arrive_with_those_of_the_draft(pair: Pair, hooks: Hooks) -> None:
    """Ranks take empty steps, on either side, until everything has arrived."""
    pair.each(pair.d_ranks, "clear")
    requests = prompts(pair, [50, 100])
    run(pair, requests, chunk=64, hooks=hooks)
    expect_delivery(pair, requests)
    assert pair.each(pair.p_ranks, "open_transfers") == [0]
    assert pair.each(pair.p_ranks, "metadata_is_bound") == [False]
