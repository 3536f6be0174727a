# SPDX-License-Identifier: Apache-2.0
"""Traces of ranks on NPUs: the model's thread finishes a layer long before the device does."""

from pathlib import Path

import pytest

from harness.kv import GQA, Side, layer_name
from harness.pool import long
from harness.ranks import Pair, expect_delivery, prompts, run
from harness.timelines import nests_properly, traced_requests
from vllm_ascend_pd.tools.timeline.read import Recording

pytestmark = pytest.mark.npu

DELAY_US = 5_000


@pytest.mark.emulated
@pytest.mark.parametrize("delay", ["CANN_ON_HOST_DELAY_US", long("CANN_ON_HOST_DELAY_SIDE_US")])
def test_layers_end_when_the_device_has_computed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delay: str
) -> None:
    """Every task on the stream takes 5 ms more, of computing or of regrouping, and so does every layer."""
    monkeypatch.setenv(delay, str(DELAY_US))
    pair = Pair(
        GQA,
        *(Side(tp, num_blocks=24, block_size=128) for tp in (2, 1)),
        {"trace_dir": str(tmp_path)},
        device="npu",
    )
    made = prompts(pair, [129, 300])
    run(pair, made, chunk=200)
    expect_delivery(pair, made)
    assert pair.close() == []
    recordings, requests = traced_requests(tmp_path, lambda all: len(all) == len(made))
    assert [recording.problems for recording in recordings] == [()] * len(recordings)
    for request in requests:
        nests_properly(
            recordings, request, {layer_name(n) for n in range(pair.model.layers)}, regroups=True, exact=False
        )
    late = durations(recordings, "layer" if delay == "CANN_ON_HOST_DELAY_US" else "regroup")
    assert sum(late) / len(late) >= DELAY_US / 2


def durations(recordings: list[Recording], cat: str) -> list[float]:
    return [event.dur for recording in recordings for event in recording.events if event.cat == cat]
