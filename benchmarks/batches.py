# SPDX-License-Identifier: Apache-2.0
"""What prefill hands to the network between NPUs for each layer of a step: ours and vllm-ascend's layerwise connector.

$ CANN_ON_HOST=1 .venv-npu/bin/python benchmarks/batches.py [--cases CASE ...] [--layers 4] [--slow-ms 50] [--json]

Cases are those of benchmarks/plan.py, of one rank. Both sides run in one process, one after the other, on one engine of
Mooncake's wheel for NPUs, and write real bytes into the registered caches of a decode rank in another process. CANN's
libraries are emulated, so counts are exact, and times are not an NPU's.

For each layer: `calls` into Mooncake that begin a write, `polls` that ask it whether one is over, `batches` that
Mooncake gives to CANN's HIXL, their `descriptors`, and `kernels`: HIXL launches one on the AI CPU for every 128
descriptors of a batch, or part of them. `KiB`: bytes. `sending`: CPU milliseconds of the sending thread, with a
link that takes SLOW_MS longer for each batch. A thread that waits inside Mooncake polls without a pause. These polls
cannot be counted, and the thread takes as much of a core as it gets.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "cann_on_host")]

from helpers.plan_sides import Ours, Reference  # noqa: E402
from helpers.plan_step import BLOCK, HEAD_SIZE, PARTS, Case, Decode, layer_names, thread_cpu_s  # noqa: E402

import cann_on_host  # noqa: E402

DEFAULT = ("8x8-contiguous", "8x8-scattered", "32x2-scattered", "1x64-scattered")
DESCRIPTORS_OF_A_KERNEL = 128
SENDERS = {"ours": "pd-sender", "reference": "KVCacheSendingLayerThread"}


class SmallCase(Case):
    """A case whose caches are as small as possible, because they are allocated."""

    @property
    def cache_blocks(self) -> int:
        return 2 * self.requests * self.blocks + 1


@dataclass(frozen=True)
class Count:
    """The counts of one layer."""

    case: str
    side: str
    calls: float
    polls: float
    batches: float
    descriptors: float
    kernels: float
    kib: float
    sending_ms: float

    def row(self) -> str:
        return (
            f"{self.case:<18}{self.side:<11}{self.calls:>7.2f}{self.polls:>8.1f}{self.batches:>9.2f}"
            f"{self.descriptors:>13.1f}{self.kernels:>9.2f}{self.kib:>9.0f}{self.sending_ms:>9.2f}"
        )


HEADER = f"{'case':<18}{'side':<11}{'calls':>7}{'polls':>8}{'batches':>9}{'descriptors':>13}"
HEADER += f"{'kernels':>9}{'KiB':>9}{'sending':>9}"


@contextmanager
def counting_mooncake() -> Iterator[Any]:
    """Yields vllm-ascend's engine, which counts its calls."""
    from mooncake import engine as mooncake
    from vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine import global_te

    class CountingEngine(mooncake.TransferEngine):  # type: ignore[misc]
        def begin_counting(self) -> None:
            self.calls, self.polls, self.kernels = 0, 0, 0

        def batch_transfer_sync_write(self, session: str, src: Any, dst: Any, lengths: Any) -> int:
            self._count(lengths)
            return int(super().batch_transfer_sync_write(session, src, dst, lengths))

        def batch_transfer_async_write(self, session: str, src: Any, dst: Any, lengths: Any) -> int:
            self._count(lengths)
            return int(super().batch_transfer_async_write(session, src, dst, lengths))

        def transfer_check_status(self, batch: int) -> int:
            self.polls += 1
            return int(super().transfer_check_status(batch))

        def get_batch_transfer_status(self, batches: list[int]) -> int:
            self.polls += 1
            return int(super().get_batch_transfer_status(batches))

        def wait(self, layer: int) -> None:
            """The next layer is computed meanwhile."""
            time.sleep(0.005)

        def _count(self, lengths: Any) -> None:
            self.calls += 1
            self.kernels += -(-len(lengths) // DESCRIPTORS_OF_A_KERNEL)

    with mock.patch.object(mooncake, "TransferEngine", CountingEngine):
        engine = global_te.get_transfer_engine("127.0.0.1", None)
        engine.begin_counting()
        yield engine


def measure(case: Case, layers: int, slow_ms: int, mooncake: Any) -> list[Count]:
    import torch

    shape = (case.cache_blocks, BLOCK, case.heads, HEAD_SIZE)
    from vllm_ascend_pd.device.npu import NpuDevice

    device = NpuDevice()
    nbytes = 2 * torch.Size(shape).numel()
    tensors = {
        name: tuple(device.allocate(nbytes)[:nbytes].view(torch.bfloat16).view(shape) for _ in range(PARTS))
        for name in layer_names(layers)
    }
    addresses = [part.data_ptr() for parts in tensors.values() for part in parts]
    if mooncake.batch_register_memory(addresses, [nbytes] * len(addresses)) != 0:
        raise RuntimeError("the caches were not registered")
    with ExitStack() as stack:
        stack.callback(mooncake.batch_unregister_memory, addresses)
        decode = stack.enter_context(closing(Decode(layers, case, "npu")))
        process = decode.process
        ours = stack.enter_context(closing(Ours(tensors, decode, case, mooncake)))
        sides: dict[str, Ours | Reference] = {"ours": ours, "reference": Reference(tensors, decode, case, mooncake)}
        found = []
        for name, side in sides.items():
            side.step()  # connects
            mooncake.begin_counting()
            before = cann_on_host.counters()
            side.step()
            after = cann_on_host.counters()
            calls, polls, kernels = mooncake.calls, mooncake.polls, mooncake.kernels
            moved = {each: (after[each] - before[each]) / layers for each in after if each.startswith("adxl_")}
            wanted = case.requests * case.blocks * PARTS * case.block_bytes
            if moved["adxl_bytes"] != wanted:
                raise RuntimeError(f"{case}, {name}: {moved['adxl_bytes']:.0f} bytes of a layer, not {wanted}")
            with cann_on_host.link_fault(process, f"slow {slow_ms}"):
                begun_s = thread_cpu_s(SENDERS[name])
                side.step()
                slow_s = thread_cpu_s(SENDERS[name]) - begun_s
            found.append(
                Count(
                    str(case),
                    name,
                    calls / layers,
                    polls / layers,
                    moved["adxl_transfers"],
                    moved["adxl_descriptors"],
                    kernels / layers,
                    wanted / 1024,
                    1000 * slow_s / layers,
                )
            )
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=SmallCase.parse, default=[SmallCase.parse(text) for text in DEFAULT])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--slow-ms", type=int, default=50)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    args = parser.parse_args()
    if any(case.ratio > 1 for case in args.cases):
        parser.error("cases with -tp2 need several ranks")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")  # vLLM logs to standard output
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    import torch

    torch.set_num_threads(1)
    torch.npu.set_device(0)
    if not args.json:
        print(HEADER)
    with counting_mooncake() as mooncake:
        for case in args.cases:
            for count in measure(case, args.layers, args.slow_ms, mooncake):
                print(json.dumps(asdict(count)) if args.json else count.row(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
