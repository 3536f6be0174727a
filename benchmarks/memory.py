# SPDX-License-Identifier: Apache-2.0
"""Memory that a prefill rank registers with Mooncake for regrouping: ours against a copy of a whole layer's cache.

$ python benchmarks/memory.py [--cache-gb 40] [--step-tokens 2048 8192 16384] [--slots N] [--check] [--json]
$ CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/memory.py --npu ...

ours       the staging ring: slots of a layer of one step's tokens, in whole 2 MiB as an NPU's memory is registered.
           Worked out for models of known shapes by the code that the connector itself uses, without allocating anything
others     the send and receive buffers of the all-to-all, each of a slot's size. They are not registered
reference  what vllm-ascend v0.23.0 registers for the same (`create_kv_buffer` of its layerwise connector): as much as
           the K and V cache of one layer. Its all-to-all allocates buffers for each layer, which are not counted

The first line is from two real PrefillWorkers with a small cache: what they passed to Mooncake's
`batch_register_memory` besides their caches. It must equal what the code computes. With --npu they are on emulated CANN
libraries, which also count what torch_npu allocates. A GB is 10^9 bytes; caches are per rank.

With --check, exits with 1 where ours is more than 1/MIN_LESS of the reference's.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE), str(HERE.parent / "tests")]

from helpers.memory_rank import CountingRank  # noqa: E402
from helpers.report import line, need_emulated_npu  # noqa: E402

from harness.kv import Model as SmallModel  # noqa: E402
from harness.kv import Side  # noqa: E402
from harness.ports import reserve_port  # noqa: E402
from harness.rank_hosts import Rank  # noqa: E402
from vllm_ascend_pd.core.config import ConnectorConfig  # noqa: E402
from vllm_ascend_pd.device.npu import REGISTRATION_BYTES  # noqa: E402
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine, rank_caches  # noqa: E402
from vllm_ascend_pd.tools.plan.exchange import make_plan  # noqa: E402
from vllm_ascend_pd.tools.plan.figures import Staging  # noqa: E402
from vllm_ascend_pd.tools.plan.model import Cached, CacheDtype, ModelShape, parse_model  # noqa: E402

MIB = 1 << 20
MIN_LESS = 20.0
BLOCK = 128
PREFILL_TP = 8
TIMEOUT_S = 60.0
SHAPES: dict[str, dict[str, Any]] = {
    # Qwen2.5-72B has the same layers, heads and head size.
    "Llama-3.1-70B": {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
    "Qwen3-235B-A22B": {"num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4},
}
"""As their config.json says."""


@dataclass(frozen=True)
class Result:
    """Bytes of one prefill rank. `heads`: KV heads that it holds; `ratio`: how many times as many a decode rank has."""

    model: str
    prefill_tp: int
    decode_tp: int
    heads: int
    ratio: int
    cache: int
    step_tokens: int
    slots: int
    ours: int
    others: int
    reference: int

    @property
    def less(self) -> float:
        return self.reference / self.ours

    @property
    def holds(self) -> bool:
        return self.less >= MIN_LESS

    def row(self) -> str:
        return (
            f"{self.model:<18}{self.prefill_tp:>4} -> {self.decode_tp:<4}{self.heads:>5}{self.ratio:>7}"
            f"{self.step_tokens:>12}{self.slots:>7}{self.ours / MIB:>9.1f}{self.others / MIB:>8.1f}"
            f"{self.reference / MIB:>11.1f}{self.less:>8.1f}"
        )


HEADER = (
    f"{'':58}{'registered (MiB)':>9}\n"
    f"{'model':<18}{'TP':>4}{'':8}{'heads':>5}{'ratio':>7}{'step tokens':>12}{'slots':>7}{'ours':>9}{'others':>8}"
    f"{'reference':>11}{'less':>8}"
)


def staging(model: ModelShape, prefill_tp: int, decode_tp: int, block: int, step_tokens: int, slots: int) -> Staging:
    engines = (PlannedEngine("prefill", prefill_tp, 1, 1, block), PlannedEngine("decode", decode_tp, 1, 1, block))
    return make_plan(model, Layout.VLLM_ASCEND, *engines, step_tokens=step_tokens, staging_slots=slots).staging


def registered_bytes(found: Staging, whole: int) -> int:
    """Of a ring that is allocated in multiples of `whole` bytes."""
    return math.ceil(found.slots * found.slot_bytes / whole) * whole


def layer_bytes(model: ModelShape, prefill_tp: int, cache: int) -> int:
    """K and V of one layer, on a rank whose whole cache takes `cache` bytes."""
    engine = PlannedEngine("prefill", prefill_tp, 1, 1, BLOCK)
    caches = rank_caches(model, Layout.VLLM_ASCEND, engine, 0, 0, 1)
    block_bytes = sum(caches.geometry_of(tensor).block_bytes for tensor in caches.tensors)  # of all layers
    return cache // block_bytes * block_bytes // len(model.cached)


def predicted(name: str, decode_tp: int, cache: int, step_tokens: int, slots: int | None) -> Result:
    model = parse_model({"architectures": [name], "head_dim": 128, "torch_dtype": "bfloat16", **SHAPES[name]})
    slots = ConnectorConfig(staging_slots=slots).slots(step_tokens)
    found = staging(model, PREFILL_TP, decode_tp, BLOCK, step_tokens, slots)
    heads, of_decode = (max(1, model.kv_heads // tp) for tp in (PREFILL_TP, decode_tp))
    ring = registered_bytes(found, REGISTRATION_BYTES)
    return Result(
        name,
        PREFILL_TP,
        decode_tp,
        heads,
        of_decode // heads,
        cache,
        step_tokens,
        slots,
        ring,
        found.total_bytes - found.slots * found.slot_bytes,
        layer_bytes(model, PREFILL_TP, cache),
    )


# --- real workers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """Bytes that each of two real ranks registered beside its caches, what the code says, and, on an NPU, how many of
    the device's bytes torch has allocated beside the caches."""

    device: str
    step_tokens: int
    registered: list[int]
    predicted: int
    allocated: list[int]

    def __str__(self) -> str:
        each = ", ".join(f"{value:,}" for value in self.registered)
        text = f"two real ranks, {self.step_tokens} tokens a step: {each} bytes registered for staging, as predicted"
        if self.device == "npu":
            text += "; the device has allocated " + ", ".join(f"{value:,}" for value in self.allocated)
        return text


def check_worker(device: str) -> Check:
    """Raises RuntimeError where the two differ."""
    small, side = SmallModel(layers=2, heads=2, widths=(64, 64)), Side(2, num_blocks=8)
    model = ModelShape("small", (Cached.FULL,) * 2, 2, 2, False, small.widths, CacheDtype.BFLOAT16, ())
    init = f"tcp://127.0.0.1:{reserve_port()}"
    ranks = [
        Rank(CountingRank, small, side, rank, 0, init, "prefill", {}, device, device=device) for rank in range(side.tp)
    ]
    for rank in ranks:
        rank.receive(TIMEOUT_S)
    slots = ConnectorConfig().slots(side.step_tokens)
    found = staging(model, side.tp, 1, side.block_size, side.step_tokens, slots)
    registered = [rank.call("staging_bytes") for rank in ranks]
    allocated = [rank.call("allocated_bytes") for rank in ranks]
    for rank in ranks:
        rank.stop()
    if left := [what for rank in ranks for what in rank.stopped()]:
        raise RuntimeError(f"the ranks left {left}")
    predicted = registered_bytes(found, REGISTRATION_BYTES if device == "npu" else 1)
    check = Check(device, side.step_tokens, registered, predicted, allocated)
    if set(registered) != {check.predicted}:
        raise RuntimeError(f"real ranks registered {registered} bytes for staging, not {check.predicted}")
    return check


# --- all of them -------------------------------------------------------------------------------------------


def results(args: argparse.Namespace) -> Iterator[Result]:
    for name, shape in SHAPES.items():
        for ratio in args.ratios:
            decode_tp = min(PREFILL_TP, shape["num_key_value_heads"]) // ratio
            for step_tokens in args.step_tokens:
                yield predicted(name, decode_tp, int(args.cache_gb * 1e9), step_tokens, args.slots)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache-gb", type=float, default=40.0, help="of a prefill rank's KV cache")
    parser.add_argument("--ratios", type=int, nargs="+", choices=[2, 4], default=[2, 4], help="of the ranks' KV heads")
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[2048, 8192, 16384], help="of vLLM")
    parser.add_argument("--slots", type=int, help="staging_slots; by default what the connector chooses")
    parser.add_argument("--npu", action="store_true", help="real ranks on emulated CANN libraries")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    if min(*args.step_tokens, args.slots or 1) < 1 or args.cache_gb < 1:
        parser.error("all numbers must be positive, and --cache-gb 1 or more")
    if args.npu:
        need_emulated_npu(parser)
    real = check_worker("npu" if args.npu else "cpu")
    if args.json:
        print(json.dumps({"measure": "real ranks"} | asdict(real)), flush=True)
    else:
        print(f"{real}\n\n{HEADER}")
    missed = False
    for result in results(args):
        missed |= not result.holds
        print(line(result, result.holds, args.json, measure="staging", less=result.less), flush=True)
    return 1 if missed and args.check else 0


if __name__ == "__main__":
    sys.exit(main())
