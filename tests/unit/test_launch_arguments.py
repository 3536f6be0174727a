# SPDX-License-Identifier: Apache-2.0
"""What launch scripts refuse to hand on behind `--`: what they set themselves, under every name that it has."""

from pathlib import Path

import pytest
from test_launch_scripts import CPU, base_environment, launch

from vllm_ascend_pd.tools.launch.arguments import refused_argument


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("--tensor-parallel", "--tensor-parallel-size is set here: use --tp"),
        ("--tensor_par=8", "--tensor-parallel-size is set here: use --tp"),
        ("-dpl", "--data-parallel-size-local is set here: use --nodes"),
        ("-t", "--tensor-parallel-size is set here: use --tp"),
        ("-tp=8", "--tensor-parallel-size is set here: use --tp"),
        ("-n", "--nnodes is set here: use --nodes"),
        ("-n2", "--nnodes is set here: use --nodes"),
        ("-r=1", "--node-rank is set here: use --node-rank"),
        ("--api-k", "--api-key: every user of the machine can read command lines"),
        ("--hf_tok=sesame", "--hf-token: every user of the machine"),
        ("--kv-transfer", "--kv-transfer-config is set here"),
        ("--kv-transfer-config.kv_role=kv_both", "--kv-transfer-config is set here"),
        ("--kv_transfer_config.kv_connector_extra_config.lease_s", "--kv-transfer-config is set here"),
        ("--config", "--config names a file that could contradict this script: give"),
        ("--config=/f", "--config names a file that could contradict this script: give"),
        ("--prefill", "--prefill-context-parallel-size is not supported here"),
        ("--prefill_context_parallel_size=2", "--prefill-context-parallel-size is not supported here"),
        ("-pcp", "--prefill-context-parallel-size is not supported here"),
        ("--kv-offloading-size", "--kv-offloading-size makes vLLM replace this connector"),
        ("--kv_offloading_s=10", "--kv-offloading-size makes vLLM replace this connector"),
        ("--model", "--model is set here: use --model"),
    ],
)  # fmt: skip
def test_other_names_of_what_is_set_are_refused(word: str, reason: str) -> None:
    refused = refused_argument(word)
    assert refused is not None
    assert refused.startswith(reason)
    assert "sesame" not in refused


@pytest.mark.parametrize(
    "word",
    ["--ssl-keyfile", "--api-server-count", "--model-impl=auto", "--", "-", "", "-q", "-ep", "-cc.mode=3", "-O3", "-1",
     "n", "--max-model-len", "x.y=--port", '{"a": "--port"}', "--hf-overrides"],
)  # fmt: skip
def test_other_arguments_are_handed_on(word: str) -> None:
    assert refused_argument(word) is None


@pytest.mark.parametrize("model", ["", "--help"])
def test_a_model_is_no_option(model: str, tmp_path: Path) -> None:
    done = launch("prefill", *CPU, "--model", model, env=base_environment(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"launch_prefill: --model {model!r} is empty or begins with a dash" in done.stderr


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("option", ["--dry-run", "--help"])
def test_options_of_the_script_itself_are_not_handed_on(role: str, option: str, tmp_path: Path) -> None:
    """Who adds one to the end of a command means the script: nothing must start."""
    done = launch(role, *CPU, "--", option, env=base_environment(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"launch_{role}: {option} is an option of the launch script: put it before the --" in done.stderr
