# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd migrate --exec`, and words as the installed vLLM reads them."""

import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from page_commands import ENVIRONMENT

from harness.recipes import make_model
from harness.serve_options import serve_parser
from vllm_ascend_pd.tools.migrate.command import read_arguments, split_words

CONFIG = json.dumps({"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer", "kv_port": "20001"})
ENGINE = """\
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(json.dumps([os.getpid(), sys.argv[1:], os.environ["VLLM_PLUGINS"]]), flush=True)
signal.pause()
"""


def migrate(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Starts `migrate --exec` for a command with a stand-in for vLLM."""
    make_model("qwen3-moe", folder)
    (folder / "vllm").write_text(f"#!{sys.executable}\n{ENGINE}")
    (folder / "vllm").chmod(0o755)
    command = [str(folder / "vllm"), "serve", str(folder), "-ep", "-O3", *more, "--kv-transfer-config", CONFIG]
    return subprocess.Popen(
        ["vllm-ascend-pd", "migrate", "--exec", "--", *command],
        env=ENVIRONMENT | {"VLLM_PLUGINS": "ascend"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_with_exec_migrate_becomes_the_engine(tmp_path: Path) -> None:
    with migrate(tmp_path, "--seed", "1") as process:
        try:
            assert process.stdout is not None
            pid, words, plugins = json.loads(process.stdout.readline())
            ours = json.dumps({"kv_connector": "LayerwisePushConnector", "kv_role": "kv_producer"})
            assert words == ["serve", str(tmp_path), "-ep", "-O3", "--seed", "1", "--kv-transfer-config", ours]
            assert (pid, plugins) == (process.pid, "ascend,vllm_ascend_pd")
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 7
            assert process.stderr is not None
            assert "works with these changes" in process.stderr.read()
        finally:
            process.kill()


def test_words_mean_what_vllms_parser_makes_of_them() -> None:
    """Short forms, abbreviations, joined values, dotted keys, repeated options, switches, several values."""
    words = shlex.split(
        "m -tp 2 -tp 4 -dp=8 -n2 -dpl 2 -dpa 192.0.2.1 --max_model_len=32K --max-num-seq 20 --max-num-batched 2k "
        "--no-enable-prefix-caching --enforce-eag "
        "--enable-expert-par --seed -1 -O3 --served-model-name a b --port 8001 --hf-token --dtype=float16 "
        "--kv-transfer-config.kv_role kv_consumer --kv_transfer_config.kv_connector=X "
        "--kv-transfer-config.kv_connector_extra_config.a-b.c+ x,y --kv-transfer-config.kv_port 20k "
        "--middleware x --middleware y "
        "--additional-config '{\"a\": 1e3}' --hf-overrides.x.y 5 --hf-over.z 6 --allowed-origins '[\"*\"]' -qfp8"
    )
    theirs = serve_parser().parse_args(words)
    ours = read_arguments(["vllm", "serve", *words], {})
    assert [word for part in ours.words() for word in part] == ["vllm", "serve", *words]
    assert ours.model == theirs.model_tag == "m"
    for name in ("tensor-parallel-size", "data-parallel-size", "max-num-batched-tokens", "max-num-seqs"):
        assert ours.number(name, 0) == getattr(theirs, name.replace("-", "_")), name
    for name in ("data-parallel-address", "quantization"):
        assert ours.text(name) == getattr(theirs, name.replace("-", "_")), name
    assert ours.text("data-parallel-size-local") == str(theirs.data_parallel_size_local)
    assert ours.switch("enforce-eager") is theirs.enforce_eager is True
    assert ours.switch("calculate-kv-scales") is None
    transfer = ours.json("kv-transfer-config")
    assert {name: getattr(theirs.kv_transfer_config, name) for name in transfer} == transfer
    assert transfer["kv_connector_extra_config"] == {"a-b": {"c": ["x", "y"]}}
    assert ours.json("additional-config") == theirs.additional_config


def test_every_short_form_is_vllms() -> None:
    """And no other option of this vLLM is taken for one that is known here."""
    for word, action in serve_parser()._option_string_actions.items():
        name = max(action.option_strings, key=len).removeprefix("--").removeprefix("no-")
        [part] = split_words([word])
        assert part.name in ("", name), word
