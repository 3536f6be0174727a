# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd plan` as people run it."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from planned import DEEPSEEK, LLAMA, plan_for

from vllm_ascend_pd.tools.plan.figures import PlanFigures

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
        DEEPSEEK, "--prefill-tp", 16, "--decode-tp", 4, "--decode-dp", 4, "--link-gbit", 200,
        "--compute-ms-per-1000-tokens", 61,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "imported numpy\n")
    for shown in (
        "70,272 bytes per token, 1,152 of them per layer",
        "prefill TP 16 -> decode TP 4 DP 4",
        "one of 3, 7, 11, 15",
        "128 KiB + 16 KiB to 3",
        "3,904; 488 if all blocks are neighbours",
        "2.88 ms",
        "the links keep up (1% busy)",
        "- speculating with",
    ):
        assert shown in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_tables_of_stages_and_groups():
    done = run(LLAMA, "--prefill-tp", 8, "--decode-tp", 4, "--decode-pp", 2)
    assert done.returncode == 0
    for shown in (
        "pipeline stages",
        "40-79",
        "all-to-all of [6, 7], of 1/2 of the units",
        "[0, 1] [2, 3] [4, 5] [6, 7] (7 created",
    ):
        assert shown in done.stdout
    assert "Gbit/s" not in done.stdout


def test_links_that_do_not_keep_up_are_said_so():
    done = run(LLAMA, "--link-gbit", 1, "--compute-ms-per-1000-tokens", 90)
    assert "the links DO NOT keep up" in done.stdout
    assert "prefill engines per decode engine" not in done.stdout, "which docs/plan.md shows, as it is printed"


def test_json_is_the_plan():
    sizes = "--prefill-tp 4 --prefill-pp 2 --prefill-dp 3 --decode-tp 8 --decode-pp 5 --decode-dp 6"
    done = run(LLAMA, *sizes.split(), "--json")
    assert done.returncode == 0
    assert msgspec.json.decode(done.stdout, type=PlanFigures) == plan_for(LLAMA, (4, 2, 3), (8, 5, 6))


def test_json_schema():
    """The names that scripts rely on."""
    done = run(LLAMA, "--prefill-tp", 8, "--decode-tp", 4, "--json", *TRAFFIC)
    plan = msgspec.json.decode(done.stdout)
    names = {name: " ".join(value) if isinstance(value, dict) else type(value) for name, value in plan.items()}
    assert names == {
        "model": (
            "name layers cached_layers kv_heads mla dtype widths bytes_per_token bytes_per_token_and_layer layer_kinds"
        ),
        "prefill": "tp pp dp block_size stages bytes_per_token",
        "decode": "tp pp dp block_size stages bytes_per_token",
        "unit_tokens": int,
        "senders": list,
        "readers": list,
        "all_to_all": list,
        "groups_created": int,
        "staging": "step_tokens slots slot_bytes total_bytes groups communicator_bytes",
        "prompt": "tokens units flows nbytes busiest_sender busiest_reader descriptors descriptors_contiguous",
        "write_times": list,
        "timing": "link_gbit transfer_ms layer_ms prefill_link_ms decode_link_ms compute_ms after_prefill_ms",
        "rates": (
            "prompt_tokens output_tokens prefill_compute prefill_link decode_steps decode_kv decode_link "
            "prefill_per_decode"
        ),
        "notes": list,
    }
    assert plan["senders"][1] == {
        "tp_rank": 1,
        "first_head": 1,
        "stop_head": 2,
        "lane": 0,
        "lanes": 1,
        "regroup": "gather",
        "exchanges_with": [0, 1],
        "pieces": [{"tensor": tensor, "to": 0, "nbytes": 65536} for tensor in (0, 1)],
    }
    assert plan["readers"][3] == {"tp_rank": 3, "first_head": 6, "stop_head": 8, "writers": [[6, 7]]}
    assert plan["prompt"]["flows"][0] == {
        "source": [0, 0],
        "target": [0, 0],
        "lane": 0,
        "first_layer": 0,
        "last_layer": 79,
        "layers": 80,
        "nbytes": 80 * 2 * 4 * 65536,
        "descriptors": 80 * 2 * 4,
        "descriptors_contiguous": 80 * 2,
        "layer_writes": [[65536, 2 * 4]],
        "layer_writes_contiguous": [[4 * 65536, 2]],
    }
    assert " ".join(plan["write_times"][0]) == "chip link engine contiguous_ms scattered_ms exchange_ms limited_by"


def test_options_that_change_figures():
    plan = msgspec.json.decode(
        run(
            LLAMA, "--json", "--block-size", 64, "--decode-block-size", 128, "--kv-cache-dtype", "fp8",
            "--max-num-batched-tokens", 1000, "--decode-tp", 2,
        ).stdout,
        type=PlanFigures,
    )  # fmt: skip
    assert (plan.prefill.block_size, plan.decode.block_size, plan.unit_tokens) == (64, 128, 64)
    assert plan.model.bytes_per_token == 327_680 // 2
    assert plan.staging.slot_bytes == (1000 + 2 * 64) * 8 * 256
    assert any("prefill: vllm-ascend makes the block size 128" in note for note in plan.notes)


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ("--prefill-tp 5", 1, "vllm-ascend-pd: prefill: tensor parallel size 5 does not divide 64 attention heads"),
        ("--prefill-tp 0", 2, "--prefill-tp"),
        ("--kv-cache-dtype fp7", 2, "--kv-cache-dtype"),
        ("--compute-ms-per-1000-tokens 5", 2, "--compute-ms-per-1000-tokens needs --link-gbit"),
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
