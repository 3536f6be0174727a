# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan` as people run it."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from planned import DATA, DEEPSEEK, LLAMA

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


def test_transformers_is_asked_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; from vllm_ascend_pd.cli import main; main()"
    command = [sys.executable, "-c", program, "plan", str(LLAMA)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "327,680 bytes per token" in done.stdout


def test_tables(plan: Plan) -> None:
    done = plan(
        DEEPSEEK, "--prefill-tp", 16, "--decode-tp", 4, "--decode-dp", 4, "--compute-ms-per-1000-tokens", 61,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "")
    for shown in (
        "DeepseekV3ForCausalLM: 70,272 bytes per token",
        "61 x attn │ 512+64 bfloat16",
        "prefill TP 16 -> decode TP 4 DP 4: a prompt of 1000 tokens",
        "68.62 MiB; 4 ranks take turns",
        "3,904; 488 if blocks are neighbours",
        "a layer's writes in ms, blocks near or apart; computed in 1.00",
        "- speculating with",
    ):
        assert shown in done.out
    assert "requests/s of one engine" not in done.out, "which docs/plan.md shows, as it is printed"


@pytest.mark.parametrize("model", ["deepseek-v4-pro.json", "llama-3.1-70b.json"])
def test_tables_fit_80_columns(model: str, plan: Plan) -> None:
    done = plan(DATA / model, "--prefill-tp", 8, "--decode-tp", 4, "--prompt-tokens", 1_000_000)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80


def test_windows_and_states_have_figures(tmp_path: Path, plan: Plan) -> None:
    """Of any file, not only of one that is named config.json."""
    kinds = ["linear_attention", "sliding_attention", "chunked_attention", "full_attention"]
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    state = {"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4}
    state |= {"linear_value_head_dim": 16, "linear_conv_kernel_dim": 4}
    windows = {"sliding_window": 128, "attention_chunk_size": 8192}
    file = tmp_path / "of-mine.json"
    file.write_text(json.dumps({"model_type": "of-mine", "dtype": "bfloat16", "layer_types": kinds}
                               | sizes | state | windows))  # fmt: skip
    done = plan(file, "--prompt-tokens", 32_000)
    assert (done.code, done.err) == (0, "")
    for shown in (
        "128 bytes per token, and 1.016 MiB per prompt for windows, and 1.562 KiB per prompt for states",
        "a state with 4 heads",
        "2 heads, 16+16 bfloat16, window of 128",
        "2 heads, 16+16 bfloat16, chunk of 8192",
        "a prompt of 32000 tokens",
    ):
        assert shown in " ".join(done.out.split())


def test_options_that_change_figures(plan: Plan) -> None:
    done = plan(
        LLAMA, "--block-size", 64, "--decode-block-size", 128, "--kv-cache-dtype", "fp8",
        "--max-num-batched-tokens", 1000, "--decode-tp", 2,
    )  # fmt: skip
    assert done.code == 0
    for shown in (
        "163,840 bytes per token",
        "16 of 64 tokens",
        f"4 slots of {(1000 + 2 * 64) * 8 * 256 / 2**20:.4g} MiB",
        "prefill: vllm-ascend makes the block size 128",
    ):
        assert shown in done.out


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ("--prefill-tp 5", 1, "vllm-ascend-pd: prefill: tensor parallel size 5 does not divide 64 attention heads"),
        ("--prefill-tp 0", 2, "--prefill-tp"),
        ("--kv-cache-dtype fp7", 2, "--kv-cache-dtype"),
        ("--prompt-tokens 1", 2, "--prompt-tokens"),
        ("--output-tokens 5", 2, "need each other and --compute-ms-per-1000-tokens"),
        (
            " ".join(TRAFFIC).replace("gib 20", "gib 1"),
            1,
            "a request of 4596 tokens does not fit into 1 GiB of KV cache",
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
