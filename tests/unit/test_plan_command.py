# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan` as people run it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from planned import DEEPSEEK, LLAMA

from vllm_ascend_pd.cli import main

TRAFFIC = """
--link-gbit 100 --compute-ms-per-1000-tokens 90
--prompt-tokens 4096 --output-tokens 500 --decode-step-ms 20 --decode-requests 32 --decode-kv-gib 20
""".split()  # noqa: SIM905  one option after the other


@dataclass
class Done:
    code: int
    out: str
    err: str


Plan = Callable[..., Done]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs the command without a process of its own."""

    def run(*arguments: str | Path | int) -> Done:
        monkeypatch.setattr(sys, "argv", ["vllm-ascend-pd", "plan", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code or 0, *capsys.readouterr())

    return run


def test_it_starts_without_anything_heavy() -> None:
    program = "import sys; from vllm_ascend_pd.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    command = [sys.executable, "-c", program, "plan", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert {"torch", "transformers", "vllm"}.isdisjoint(done.stdout.splitlines()[-1].split())


def test_tables(plan: Plan) -> None:
    done = plan(
        DEEPSEEK, "--prefill-tp", 16, "--decode-tp", 4, "--decode-dp", 4, "--compute-ms-per-1000-tokens", 61,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    for shown in (
        "70,272 bytes per token, 1,152 of them per layer",
        "prefill TP 16 -> decode TP 4 DP 4",
        "68.62 MiB; 4 ranks take turns",
        "3,904; 488 if all blocks are neighbours",
        "a layer's writes; prefill computes it in 1.00 ms",
        "- speculating with",
    ):
        assert shown in done.out
    assert max(map(len, done.out.splitlines())) <= 120
    assert "requests/s of one engine" not in done.out, "which docs/plan.md shows, as it is printed"


def test_options_that_change_figures(plan: Plan) -> None:
    done = plan(
        LLAMA, "--block-size", 64, "--decode-block-size", 128, "--kv-cache-dtype", "fp8",
        "--max-num-batched-tokens", 1000, "--decode-tp", 2,
    )  # fmt: skip
    assert done.code == 0
    for shown in (
        "163,840 bytes per token",
        "16 of 64 tokens",
        f"4 slots of {(1000 + 2 * 64) * 8 * 256 / 2**20:.4g} MiB for 1000 tokens",
        "prefill: vllm-ascend makes the block size 128",
    ):
        assert shown in done.out


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ("--prefill-tp 5", 1, "vllm-ascend-pd: prefill: tensor parallel size 5 does not divide 64 attention heads"),
        ("--prefill-tp 0", 2, "--prefill-tp"),
        ("--kv-cache-dtype fp7", 2, "--kv-cache-dtype"),
        ("--prompt-tokens 5", 2, "need each other and --compute-ms-per-1000-tokens"),
        (
            " ".join(TRAFFIC).replace("gib 20", "gib 1"),
            1,
            "a request of 4608 tokens does not fit into 1 GiB of KV cache",
        ),
        ("--prefill-cp 2", 2, "--prefill-cp"),
    ],
)
def test_errors(options: str, code: int, line: str, plan: Plan) -> None:
    done = plan(LLAMA, *options.split())
    assert (done.code, done.out) == (code, "")
    assert line in done.err
    assert done.err.startswith("vllm-ascend-pd: ")
    assert "Traceback" not in done.err


@pytest.mark.parametrize("there", [True, False])
def test_no_model_is_a_wrong_option(tmp_path: Path, there: bool, plan: Plan) -> None:
    done = plan(tmp_path if there else tmp_path / "nowhere")
    assert (done.code, done.out) == (2, "")
    assert "config.json" in done.err or "nowhere" in done.err
