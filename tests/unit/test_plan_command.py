# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan` as people run it."""

import subprocess
import sys
from pathlib import Path

import pytest
from planned import DEEPSEEK, LLAMA

TRAFFIC = """
--link-gbit 100 --compute-ms-per-1000-tokens 90
--prompt-tokens 4096 --output-tokens 500 --decode-step-ms 20 --decode-requests 32 --decode-kv-gib 20
""".split()  # noqa: SIM905  one option after the other
PROGRAM = """
import sys
from vllm_ascend_pd.cli import main
try:
    main()
finally:
    print("imported", *sorted({"torch", "vllm", "numpy"} & sys.modules.keys()), file=sys.stderr)
"""


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_starts_without_anything_heavy():
    done = run("--help")
    assert done.returncode == 0
    assert "--prefill-tp" in done.stdout
    assert done.stderr == "imported\n"


def test_tables():
    done = run(
        DEEPSEEK, "--prefill-tp", 16, "--decode-tp", 4, "--decode-dp", 4, "--compute-ms-per-1000-tokens", 61,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "imported numpy\n")
    for shown in (
        "70,272 bytes per token, 1,152 of them per layer",
        "prefill TP 16 -> decode TP 4 DP 4",
        "68.62 MiB; 4 ranks take turns",
        "3,904; 488 if all blocks are neighbours",
        "a layer's writes; prefill computes it in 1.00 ms",
        "- speculating with",
    ):
        assert shown in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_tables_of_groups():
    done = run(LLAMA, "--prefill-tp", 8, "--decode-tp", 4, "--decode-pp", 2)
    assert done.returncode == 0
    for shown in (
        "exchanged",
        "[0, 1] [2, 3] [4, 5] [6, 7] (7 created",
    ):
        assert shown in done.stdout
    assert "requests/s of one engine" not in done.stdout, "which docs/plan.md shows, as it is printed"


def test_options_that_change_figures():
    done = run(
        LLAMA, "--block-size", 64, "--decode-block-size", 128, "--kv-cache-dtype", "fp8",
        "--max-num-batched-tokens", 1000, "--decode-tp", 2,
    )  # fmt: skip
    assert done.returncode == 0
    for shown in (
        "163,840 bytes per token",
        "16 of 64 tokens",
        f"4 slots of {(1000 + 2 * 64) * 8 * 256 / 2**20:.4g} MiB for 1000 tokens",
        "prefill: vllm-ascend makes the block size 128",
    ):
        assert shown in done.stdout


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
def test_errors(options, code, line):
    done = run(LLAMA, *options.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert line in done.stderr
    assert done.stderr.startswith("vllm-ascend-pd: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("there", [True, False])
def test_no_model_is_a_wrong_option(tmp_path, there):
    done = run(tmp_path if there else tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "config.json" in done.stderr or "nowhere" in done.stderr
