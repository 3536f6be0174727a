# SPDX-License-Identifier: Apache-2.0
"""Which descriptors a layer of a prompt comes to, ours and vllm-ascend's, and what they take by HIXL's figures.

Real models' shapes and parallel sizes; a prompt is computed in steps of 8192 tokens. Both sides' own code makes the
lists of a rank's writes: ours from tickets to Mooncake's arguments, vllm-ascend's layerwise connector from requests to
them. Nothing is sent. A row has the busiest prefill rank of either side.

    CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/descriptors.py --check
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

from helpers import vllm_ascend_producer
from helpers.plan_step import BLOCK, our_ticket
from helpers.report import options

from vllm_ascend_pd.core.layout import CacheTensor, Geometry, Order, RankCaches
from vllm_ascend_pd.core.plan import make_mapping, slot_bytes
from vllm_ascend_pd.core.prefill_ticket import PrefillTicket
from vllm_ascend_pd.core.protocol import EngineDescription, RankDescription
from vllm_ascend_pd.core.step import Send
from vllm_ascend_pd.core.topology import sharding
from vllm_ascend_pd.prefill.decode_layout import DecodeLayout
from vllm_ascend_pd.prefill.step_send import plan_sends
from vllm_ascend_pd.prefill.transfer import Transfer
from vllm_ascend_pd.tools.write_costs import HIXL
from vllm_ascend_pd.transport.batches import TransferLimits

STEP = 8192
LAYER = "model.layers.0.self_attn.attn"
BASES = (1 << 40, 1 << 41)
PLACES = ("contiguous", "runs of 4", "scattered")
SIZES = ((8, 8), (8, 4), (8, 2), (8, 1), (4, 8))
TIME_BARS = {2: 1.8, 4: 3.0}
"""By how many times heads are brought together: how many times less theirs must take on the links that are `TIMED`."""
TIMED = tuple(each for each in HIXL if each.engine == "comm" and each.link != "RoCE, two machines")


@dataclass(frozen=True)
class Model:
    """`heads`: KV heads, 1 for MLA's latent. `widths`: bytes of a head of a token in each tensor of a layer."""

    name: str
    heads: int
    widths: tuple[int, ...]


MODELS = (
    Model("Qwen3-32B", 8, (256, 256)),
    Model("Qwen3-235B-A22B", 4, (256, 256)),
    Model("DeepSeek-V3.1", 1, (1024, 128)),
    Model("GLM-4.7", 8, (256, 256)),
)


@dataclass(frozen=True)
class Case:
    model: Model
    p_tp: int
    d_tp: int
    tokens: int
    place: str

    @property
    def ratio(self) -> int:
        """How many prefill ranks hold the heads of one decode rank."""
        return max(1, min(self.p_tp, self.model.heads) // min(self.d_tp, self.model.heads))

    def blocks(self, seed: int) -> list[int]:
        """Returns the prompt's blocks on one of the sides."""
        run = {"contiguous": self.tokens // BLOCK, "runs of 4": 4, "scattered": 1}[self.place]
        runs = self.tokens // BLOCK // run
        order = random.Random(seed).sample(range(runs), runs)
        return [1 + (run + 1) * number + place for number in order for place in range(run)]

    def steps(self) -> list[tuple[int, int]]:
        return [(start, min(start + STEP, self.tokens)) for start in range(0, self.tokens, STEP)]

    def caches(self, tp: int) -> RankCaches:
        heads = max(1, self.model.heads // tp)
        geometries = tuple(
            Geometry(0, Order.TOKEN_MAJOR, "bfloat16", BLOCK, BLOCK * heads * width, heads, self.model.heads, width)
            for width in sorted(set(self.model.widths), reverse=True)
        )
        widths = [geometry.head_bytes for geometry in geometries]
        tensors = (
            CacheTensor(LAYER, part, BASES[part], 1 << 20, widths.index(width))
            for part, width in enumerate(self.model.widths)
        )
        return RankCaches(geometries, tuple(tensors))


Writes = list[int]
"""Lengths of the descriptors of one layer that one rank writes."""


def ours(case: Case) -> list[Writes]:
    prefill, decode = sharding(case.p_tp), sharding(case.d_tp)
    caches, limits = case.caches(case.p_tp), TransferLimits.over("ascend")
    ranks = tuple(RankDescription(0, rank, "", str(rank), case.caches(case.d_tp)) for rank in range(case.d_tp))
    layout = DecodeLayout(EngineDescription("decode", "model", case.d_tp, 1, ranks))
    blocks, device = case.blocks(1), SimpleNamespace(upload=lambda tensor: tensor)
    issued = our_ticket("request", case.blocks(2), case.d_tp, port=1)
    sender: Any = None
    transfer = Transfer("request", issued, sender, PrefillTicket(0.0))
    written: list[Writes] = []
    for rank in range(case.p_tp):
        lengths: Writes = []
        for index, geometry in enumerate(caches.geometries):
            mapping = make_mapping(geometry, rank, prefill, decode, BLOCK)
            tensors = [tensor for tensor in caches.tensors if tensor.geometry == index]
            units = mapping.slot_units(slot_bytes(caches, STEP), len(tensors)) if mapping.is_staged else 0
            for start, stop in case.steps() if mapping.serves(issued.replica_hash) else ():
                send = Send("request", start, stop, (blocks[start // BLOCK : stop // BLOCK],), stop == case.tokens)
                chosen: Any = device
                for step_send in plan_sends(mapping, geometry, [(transfer, send)], chosen, units):
                    for target in layout.targets(tensors, mapping):
                        write = step_send.write_to(target, limits)
                        for _, _, sizes in write.at([([0] * len(target.bases), target.bases)]):
                            lengths += sizes
        written.append(lengths)
    return written


def reference(case: Case) -> list[Writes] | None:
    """None: vllm-ascend's layerwise connector refuses such sizes."""
    if case.p_tp < case.d_tp:
        return None
    return [list(_reference_rank(case, rank)) for rank in range(case.p_tp)]


def _reference_rank(case: Case, rank: int) -> Iterator[int]:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_layerwise_connector as layerwise

    heads, d_heads = (max(1, case.model.heads // tp) for tp in (case.p_tp, case.d_tp))
    parts = len(case.model.widths)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=heads, head_size=128, dtype=torch.bfloat16)
    mine, theirs = (
        layerwise.LayerMetadata(
            [0] * parts, list(BASES), [BLOCK * of * width for width in case.model.widths], [1] * parts
        )
        for of in (heads, d_heads)
    )
    buffer = SimpleNamespace(device="cpu", data_ptr=lambda: 1 << 42)
    buffers = {"k_buffer": buffer, "v_buffer": buffer}
    worker = vllm_ascend_producer.worker(
        tp=case.p_tp,
        rank=rank,
        ratio=case.ratio,
        total_heads=case.model.heads,
        spec=spec,
        layers={LAYER: mine},
        **buffers,
    )
    worker.use_mla = case.model.heads == 1
    # As vllm_ascend/ascend_config.py has it.
    worker.num_head_replica = max(1, case.p_tp // case.model.heads) if case.p_tp > case.d_tp else 1
    thread = object.__new__(layerwise.KVCacheSendingLayerThread)
    vars(thread).update({**vars(worker), "mamba_cache_mode": "none"})
    for start, stop in case.steps():
        metadata = layerwise.MooncakeLayerwiseConnectorMetadata()
        ticket = vllm_ascend_producer.ticket(case.blocks(2), BLOCK, remote_tp=case.d_tp)
        metadata.add_new_req(
            "request",
            [case.blocks(1)],
            ticket,
            chunk_finish=stop == case.tokens,
            prompt_len=case.tokens,
            local_transed_tokens=start,
            local_computed_tokens=stop,
        )
        worker.start_load_kv(metadata)
        metadata.send_task.layer_name = LAYER
        for request, meta in metadata.requests.items():
            meta.remote_layer_metadata = {LAYER: theirs}
            _, _, lengths = thread.get_transfer_meta(metadata.send_task, request, meta, 0)
            yield from lengths


@dataclass(frozen=True)
class Busiest:
    """The prefill rank that takes longest for its writes of a layer."""

    descriptors: int
    num_bytes: int
    # By chip, link and engine of HIXL's table.
    milliseconds: dict[str, float]

    @classmethod
    def of(cls, ranks: list[Writes]) -> "Busiest":
        times = {str(costs): max(costs.total(writes) for writes in ranks) * 1e3 for costs in HIXL}
        return cls(max(map(len, ranks)), max(map(sum, ranks)), times)


@dataclass(frozen=True)
class Result:
    model: str
    sizes: str
    tokens: int
    place: str
    ratio: int
    ours: Busiest
    reference: Busiest | None

    @property
    def misses(self) -> list[str]:
        if self.reference is None:
            return []
        found = []
        fewer = self.reference.descriptors / self.ours.descriptors
        if fewer < self.ratio:
            found.append(f"{fewer:.1f} times fewer descriptors, not {self.ratio}")
        bar = TIME_BARS.get(self.ratio)
        for costs in TIMED if bar is not None and self.place != "scattered" else ():
            less = self.reference.milliseconds[str(costs)] / self.ours.milliseconds[str(costs)]
            if less < (bar or 0):
                found.append(f"{less:.1f} times less on {costs}, not {bar:g}")
        return [f"{self.model} {self.sizes} {self.tokens} {self.place}: {miss}" for miss in found]

    def row(self) -> str:
        text = f"{self.model:<17}{self.sizes:<10}{self.tokens:>7}  {self.place:<11}"
        for side in (self.ours, self.reference):
            if side is None:
                return text + f"{'refused':>11}"
            times = "".join(f"{side.milliseconds[str(costs)]:>9.3f}" for costs in TIMED)
            text += f"{side.descriptors:>7}{side.num_bytes / 1e6:>8.2f}{times}"
        return text


def measure(case: Case) -> Result:
    """Raises RuntimeError unless both sides send as many bytes in all."""
    mine, theirs = ours(case), reference(case)
    if theirs is not None and (sent := sum(map(sum, mine))) != (wanted := sum(map(sum, theirs))):
        raise RuntimeError(f"{case}: ours sends {sent} bytes, vllm-ascend {wanted}")
    return Result(
        case.model.name,
        f"P{case.p_tp}-D{case.d_tp}",
        case.tokens,
        case.place,
        case.ratio,
        Busiest.of(mine),
        None if theirs is None else Busiest.of(theirs),
    )


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096, 32768], help=f"multiples of {4 * BLOCK}")
    args = parser.parse_args()
    if any(tokens < 1 or tokens % (4 * BLOCK) for tokens in args.tokens):
        parser.error(f"--tokens must be multiples of {4 * BLOCK}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # vLLM logs to standard output
    models = [model for model in MODELS if args.models is None or model.name in args.models]
    misses: list[str] = []
    if not args.json:
        print(
            "descriptors, MB and milliseconds of a layer, at the busiest rank, on " + " and on ".join(map(str, TIMED))
        )
        print(f"{'':47}{'ours':^33}{'vllm-ascend':^33}")
    for model, (p_tp, d_tp), tokens, place in product(models, SIZES, args.tokens, PLACES):
        result = measure(Case(model, p_tp, d_tp, tokens, place))
        misses += result.misses
        print(json.dumps({**asdict(result), "misses": result.misses}) if args.json else result.row(), flush=True)
    for miss in misses:
        print(miss, file=sys.stderr)
    return 1 if args.check and misses else 0


if __name__ == "__main__":
    sys.exit(main())
