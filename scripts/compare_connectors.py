# SPDX-License-Identifier: Apache-2.0
"""Runs the same load by turns with vllm-ascend's own layerwise connector and with this one, and prints both.

    python3 scripts/compare_connectors.py [--model FOLDER] [--emulate] [--result FILE]

Both run behind this package's proxy, with the same engines and prompts: `vllm bench serve` at three lengths. Each
connector has two turns, in the order A B B A, so that what grows warm helps both alike.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness import ascend
from harness.clusters import ClusterConfig, running_cluster
from harness.engines import EngineConfig, Role, script
from harness.models import DEMO, TINY, for_npu, make_model
from harness.processes import StartupError, interrupt_on_sigterm

OURS, THEIRS = "LayerwisePushConnector", "MooncakeLayerwiseConnector"
TURNS = (OURS, THEIRS, THEIRS, OURS)
LENGTHS = (128, 1024, 4096)
SHORT_LENGTHS = (64, 256, 1024)
"""Of the emulated engines, whose context is 4,096 tokens."""
OUTPUT_TOKENS = 64
PROMPTS, AT_ONCE = 32, 4
FIGURES = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "request_throughput")
"""Of `vllm bench serve`, with its names."""
KV_BYTES = 16 << 30


@dataclasses.dataclass(frozen=True)
class TheirConfig(EngineConfig):
    """An engine with vllm-ascend's layerwise connector, as its guide to prefill/decode disaggregation configures it."""

    sizes: tuple[int, int] = (1, 1)
    """Tensor-parallel sizes of prefill and decode, which both sides have to know."""

    def transfer_config(self, kv_port: int | None) -> dict[str, object]:
        sides = {
            side: {"dp_size": 1, "tp_size": tp} for side, tp in zip(("prefill", "decode"), self.sizes, strict=True)
        }
        return {
            "kv_connector": THEIRS,
            "kv_role": self.role.value,
            "kv_port": str(kv_port),
            "engine_id": "0" if self.role is Role.PREFILL else "1",
            "kv_connector_extra_config": sides,
        }


def cluster(connector: str, prefill_tp: int, decode_tp: int, *, tiny: bool, emulate: bool) -> ClusterConfig:
    """Returns one prefill and one decode engine with a connector."""
    both = []
    firsts = ascend.first_devices([EngineConfig(tp=prefill_tp), EngineConfig(tp=decode_tp)])
    for role, tp, first in zip((Role.PREFILL, Role.DECODE), (prefill_tp, decode_tp), firsts, strict=True):
        if connector == OURS:
            config = EngineConfig(role, tp=tp, device="npu")
        else:
            config = TheirConfig(role, tp=tp, device="npu", sizes=(prefill_tp, decode_tp))
        if not tiny:
            config = dataclasses.replace(
                config,
                dtype="auto",
                max_model_len=None,
                max_num_batched_tokens=None,
                block_size=None,
                kv_cache_bytes=KV_BYTES,
            )
        if emulate:
            config = ascend.emulated(config, first)
        else:
            environment = tuple(ascend.engine_env(first, tp).items())
            dtype = ascend.DTYPE if tiny else config.dtype
            config = dataclasses.replace(config, dtype=dtype, env=environment)
        both.append(config)
    return ClusterConfig(connector, prefill=(both[0],), decode=(both[1],))


def load(url: str, model: Path, length: int, prompts: int) -> dict[str, float]:
    """Returns the figures of one run. Raises RuntimeError."""
    with tempfile.TemporaryDirectory() as folder:
        command = [script("vllm"), "bench", "serve", "--backend", "vllm", "--base-url", url, "--model", str(model)]
        command += [
            "--dataset-name",
            "random",
            "--random-input-len",
            str(length),
            "--ignore-eos",
            "--seed",
            str(length),
        ]
        command += ["--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(prompts)]
        command += ["--max-concurrency", str(AT_ONCE), "--save-result", "--result-dir", folder, "--disable-tqdm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = list(Path(folder).glob("*.json"))
        if done.returncode or not files:
            raise RuntimeError(f"vllm bench serve ended with {done.returncode}: {done.stderr[-500:]}")
        result: dict[str, Any] = json.loads(files[0].read_text())
    if result["completed"] != prompts:
        raise RuntimeError(f"{result['completed']} of {prompts} requests of {length} tokens succeeded")
    return {name: round(float(result[name]), 3) for name in FIGURES}


def table(turns: list[dict[str, Any]], lengths: tuple[int, ...]) -> str:
    """Returns both connectors side by side: for each length the mean of a figure over the turns."""
    lines = [f"{'tokens':>6}  {'figure':<20} {'vllm-ascend':>12} {'this one':>12}"]
    for length in lengths:
        for name in FIGURES:
            means = [
                statistics.fmean(turn["lengths"][str(length)][name] for turn in turns if turn["connector"] == connector)
                for connector in (THEIRS, OURS)
            ]
            lines.append(f"{length:>6}  {name:<20} {means[0]:>12.2f} {means[1]:>12.2f}")
    return "\n".join(lines)


def main(
    model: Annotated[Path | None, typer.Option(exists=True, file_okay=False, resolve_path=True)] = None,
    emulate: Annotated[bool, typer.Option("--emulate", help="On emulated NPUs, where no time means anything.")] = False,
    prefill_tp: Annotated[int, typer.Option(min=1)] = 2,
    decode_tp: Annotated[int, typer.Option(min=1)] = 1,
    result: Annotated[Path, typer.Option(dir_okay=False)] = Path("comparison.json"),
) -> None:
    """Compare vllm-ascend's layerwise connector with this one, under the same load."""
    interrupt_on_sigterm()
    lengths, prompts = (SHORT_LENGTHS, 4) if emulate else (LENGTHS, PROMPTS)
    turns: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="compare-connectors-") as scratch:
        logs = Path(scratch)
        path = model or make_model(for_npu(TINY if emulate else DEMO), logs)
        for place, connector in enumerate(TURNS[:2] if emulate else TURNS):
            folder = logs / str(place)
            folder.mkdir()
            config = cluster(connector, prefill_tp, decode_tp, tiny=model is None, emulate=emulate)
            try:
                with running_cluster(path, config, folder) as running:
                    load(running.url, path, lengths[0], AT_ONCE)  # to warm up
                    figures: Mapping[str, Any] = {
                        str(length): load(running.url, path, length, prompts) for length in lengths
                    }
            except (StartupError, RuntimeError) as error:
                print(f"{connector}: {error}", file=sys.stderr)
                for log in folder.glob("*.log"):
                    print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
                raise typer.Exit(1) from None
            turns.append({"connector": connector, "lengths": figures})
            print(f"turn {place + 1}: {connector}", flush=True)
    result.write_text(json.dumps({"emulated": emulate, "turns": turns}, indent=2) + "\n")
    print(table(turns, lengths))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
