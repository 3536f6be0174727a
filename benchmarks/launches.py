# SPDX-License-Identifier: Apache-2.0
"""What regrouping one layer's K and V queues on an NPU at TP 2 -> 1: ours against vllm-ascend's layerwise connector.

$ CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/launches.py [--tokens 2048] [--sides SIDE ...] [--json]

Counted on the emulated CANN libraries (tests/cann_on_host), in two processes with HCCL between them, after a first
layer that is not counted. Each side must leave the right bytes for the transfer engine, or nothing is printed.

kernels    our Regrouper with the AscendC kernels, built for the CPU by tests/ascendc_twin
operators  our Regrouper without compiled kernels
reference  `save_kv_layer` and the sending thread's `_transfer_kv_cache` of the installed vllm-ascend. Its paged load
           is one kernel on an NPU and several emulated operators here: it is counted as one.

Exits with 1 where `kernels` exceeds 4 launches or 2 passes over the bytes.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "npu", "cann_on_host", "ascendc_twin"))]

from helpers import vllm_ascend_producer  # noqa: E402
from helpers.regroup_layer import BLOCK, HEAD_SIZE, HEADS, LAYER, Layer, check_bytes, our_side  # noqa: E402
from make_toolkit import build_kernels, make_toolkit  # noqa: E402

import cann_on_host  # noqa: E402
from harness.rank_processes import run_ranks  # noqa: E402

RANKS = 2  # of prefill; decode has one
MAX_LAUNCHES, MAX_PASSES = 4, 2
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Count:
    """The counts of one rank for one layer.

    passes: bytes that kernels and copies wrote, relative to the layer's K and V.
    exchanged: the same for the bytes given to collectives.
    """

    side: str
    kernels: int
    copies: int
    collectives: int
    copies_from_host: int
    copies_to_host: int
    passes: float
    exchanged: float
    operators: dict[str, int]

    @property
    def launches(self) -> int:
        return self.kernels + self.copies + self.collectives

    def row(self) -> str:
        names = ", ".join(f"{times} {name}" for name, times in sorted(self.operators.items()))
        return (
            f"{self.side:<11}{self.launches:>9}{self.kernels:>9}{self.copies:>8}{self.collectives:>13}"
            f"{self.passes:>8.1f}{self.exchanged:>11.1f}   {names}"
        )


HEADER = f"{'side':<11}{'launches':>9}{'kernels':>9}{'copies':>8}{'collectives':>13}{'passes':>8}{'exchanged':>11}"


def count(side: str, tokens: int, library: Path | None = None) -> Count:
    """Counts what one side queues. `library`: the compiled kernels, for the side of that name.

    Raises RuntimeError or ValueError if a side did not do its work.
    """
    if not cann_on_host.is_active():
        raise RuntimeError("launches are counted by the emulated CANN libraries: set CANN_ON_HOST=1")
    if (side == "kernels") != (library is not None):
        raise ValueError(f"{side} with library {library}")
    first, *others = run_ranks(SIDES[side], RANKS, tokens, library)
    if any(other != first for other in others):
        raise RuntimeError(f"the ranks do not agree: {[first, *others]}")
    counted, operators = first
    layer_bytes = 2 * tokens * Layer(RANKS, tokens).heads * HEAD_SIZE * 2  # K and V, bfloat16
    result = Count(
        side,
        kernels=counted["launches"],
        copies=counted["copies_on_device"],
        collectives=counted["hccl_calls"],
        copies_from_host=counted["copies_to_device"],
        copies_to_host=counted["copies_to_host"],
        passes=(counted["kernel_bytes"] + counted["copy_bytes_on_device"]) / layer_bytes,
        exchanged=counted["hccl_bytes"] / layer_bytes,
        operators=operators,
    )
    if result.exchanged != 1:
        raise RuntimeError(f"{side} exchanged {result.exchanged:g} times the bytes of a layer between the ranks")
    return result


def measure(layer: Callable[[], None]) -> tuple[Counter[str], dict[str, int]]:
    import torch

    layer()  # connects the ranks
    torch.npu.synchronize()
    cann_on_host.reset_counters()
    layer()
    torch.npu.synchronize()
    return Counter(cann_on_host.counters()), cann_on_host.launches()


# --- ours -------------------------------------------------------------------------------------------------


def ours(rank: int, tokens: int, library: Path | None) -> tuple[Counter[str], dict[str, int]]:
    import torch

    from vllm_ascend_pd.device.npu import NpuDevice

    use_kernels(library)
    of = Layer(RANKS, tokens)
    device = NpuDevice()
    caches = [cache.npu() for cache in of.caches(rank)]
    run, ring = our_side(of, rank, device, caches, TIMEOUT_S)

    def layer() -> None:
        slot = None

        def regroup() -> None:
            nonlocal slot
            slot = run()

        device.submit(regroup, after=device.record_event()).wait(TIMEOUT_S)
        ring.release(slot)

    counted = measure(layer)
    check_bytes("ours", ring.buffer.view(torch.bfloat16), of.expected(rank, of.blocks()))
    return counted


def use_kernels(library: Path | None) -> None:
    """Makes the compiled kernels in `library` the NPU's implementations, or torch_npu's operators."""
    import torch

    from vllm_ascend_pd.device import ops, ops_fallback

    if ops_fallback._library is None:
        raise RuntimeError(f"{ops.NPU_LIBRARY} is in use: it cannot be exchanged for what is to be counted")
    if library is not None:
        ops_fallback._library._destroy()
        torch.ops.load_library(library)


@contextmanager
def kernels_on_the_twin() -> Iterator[Path]:
    """The NPU's library as setup.py builds it, with the toolkit of tests/ascendc_twin for CANN."""
    with tempfile.TemporaryDirectory() as folder:
        library, _ = build_kernels(make_toolkit(Path(folder, "cann")), Path(folder, "build"), Path(folder))
        yield library


# --- vllm-ascend's ----------------------------------------------------------------------------------------


class PagedLoad:
    """`npu_paged_cache_load`, counted as the one kernel that it is on an NPU."""

    def __init__(self, emulated: Callable[..., Any]) -> None:
        self._emulated = emulated
        self.reset()

    def reset(self) -> None:
        self.calls, self.nbytes = 0, 0
        self._instead: Counter[str] = Counter()
        self._operators: Counter[str] = Counter()

    def __call__(self, *args: Any, key: Any, value: Any, **kwargs: Any) -> Any:
        import torch

        torch.npu.synchronize()
        before = Counter(cann_on_host.counters()), Counter(cann_on_host.launches())
        result = self._emulated(*args, key=key, value=value, **kwargs)
        torch.npu.synchronize()
        self._instead += Counter(cann_on_host.counters()) - before[0]
        self._operators += Counter(cann_on_host.launches()) - before[1]
        self.calls += 1
        self.nbytes += key.nbytes + value.nbytes
        return result

    def corrected(self, counted: Counter[str], operators: dict[str, int]) -> tuple[Counter[str], dict[str, int]]:
        counted.subtract(self._instead)
        counted.update(launches=self.calls, kernel_bytes=self.nbytes)
        left = Counter(operators) - self._operators
        return counted, {**left, "npu_paged_cache_load": self.calls}


def reference(rank: int, tokens: int, _library: None) -> tuple[Counter[str], dict[str, int]]:
    import torch
    import torch.distributed as dist
    import torch_npu
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm_ascend.distributed import parallel_state
    from vllm_ascend.distributed.kv_transfer.kv_p2p import mooncake_layerwise_connector as layerwise

    parallel_state._P_TP = SimpleNamespace(device_group=dist.group.WORLD)
    load = torch_npu.atb.npu_paged_cache_load = PagedLoad(torch_npu.atb.npu_paged_cache_load)
    of = Layer(RANKS, tokens)
    caches = [cache.npu() for cache in of.caches(rank)]
    blocks = of.blocks()
    block_bytes = caches[0][0].nbytes
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=of.heads, head_size=HEAD_SIZE, dtype=torch.bfloat16)

    def metadata(heads: int) -> Any:
        return layerwise.LayerMetadata([0, 0], [c.data_ptr() for c in caches], 2 * [block_bytes * heads], [1, 1])

    worker = vllm_ascend_producer.worker(
        tp=RANKS,
        rank=rank,
        ratio=RANKS,
        total_heads=HEADS,
        spec=spec,
        layers={LAYER: metadata(1)},
        resharding_stream=torch.npu.Stream(),
        k_buffer=torch.zeros_like(caches[0]).view(-1, HEAD_SIZE),
        v_buffer=torch.zeros_like(caches[1]).view(-1, HEAD_SIZE),
    )
    thread = object.__new__(layerwise.KVCacheSendingLayerThread)
    inherited = ("kv_cache_specs", "layer_metadata", "total_layers", "tp_size", "tp_rank", "pd_head_ratio")
    buffers = ("num_head_replica", "k_buffer", "v_buffer", "enable_kv_quant", "enable_c8_quant", "resharding_stream")
    vars(thread).update({name: getattr(worker, name) for name in inherited + buffers})
    vars(thread).update(
        engine=vllm_ascend_producer.NoTransfer(), failed_reqs=set(), callback_func=lambda *args, **kwargs: None
    )

    step = layerwise.MooncakeLayerwiseConnectorMetadata()
    ticket = vllm_ascend_producer.ticket(blocks, BLOCK, remote_tp=1)
    step.add_new_req(
        "request", [list(blocks)], ticket, chunk_finish=True, prompt_len=tokens, local_computed_tokens=tokens
    )
    worker.start_load_kv(step)
    [request] = step.requests.values()
    worker.remote_layer_metadata = {"decode": {request.remote_port: {LAYER: metadata(RANKS)}}}
    worker.remote_te_port = {"decode": {request.remote_port: 2}}

    def layer() -> None:
        load.reset()
        worker.current_layer = 0
        worker.save_kv_layer(LAYER, caches, None, step)
        thread._transfer_kv_cache(worker.kv_send_layer_thread.send_queue.get_nowait())

    counted = load.corrected(*measure(layer))
    got = torch.stack(
        [buffer.flatten()[: tokens * of.heads * HEAD_SIZE] for buffer in (worker.k_buffer, worker.v_buffer)]
    )
    check_bytes("vllm-ascend", got, of.expected(rank, sorted(blocks)))
    return counted


SIDES: dict[str, Callable[..., tuple[Counter[str], dict[str, int]]]] = {
    "kernels": ours,
    "operators": ours,
    "reference": reference,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help=f"of one step, a multiple of {BLOCK}")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    if args.tokens <= 0 or args.tokens % BLOCK:
        parser.error(f"--tokens must be a positive multiple of {BLOCK}")

    counts = []
    for side in args.sides:
        if side == "kernels":
            with kernels_on_the_twin() as library:
                counts.append(count(side, args.tokens, library))
        else:
            counts.append(count(side, args.tokens))
    if not args.json:
        print(HEADER)
    for result in counts:
        print(json.dumps({**asdict(result), "launches": result.launches}) if args.json else result.row())
    over = [c for c in counts if c.side == "kernels" and (c.launches > MAX_LAUNCHES or c.passes > MAX_PASSES)]
    if over:
        print(f"more than {MAX_LAUNCHES} launches or {MAX_PASSES} passes over the bytes", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
