# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd migrate`, from scripts as people write them."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.recipes import make_model
from vllm_ascend_pd.tools.migrate.changes import ChangeKind, Migration
from vllm_ascend_pd.tools.migrate.command import migrate_commands, read_input, result_text, with_values
from vllm_ascend_pd.tools.migrate.script import MigrateError, serve_commands

OLD = {
    "kv_connector": "MooncakeConnectorV1",
    "kv_role": "kv_consumer",
    "kv_port": "36200",
    "engine_id": "1",
    "kv_connector_extra_config": {
        "use_ascend_direct": True,
        "prefill": {"dp_size": 2, "tp_size": 8},
        "decode": {"dp_size": 4, "tp_size": 4},
    },
}

SCRIPT = """\
#!/bin/bash
# A comment that isn't closed by a quote.
nic_name="eth0"
local_ip=$(hostname -I | awk '{print $1}')
export HCCL_IF_IP=$local_ip   # the NIC's
export VLLM_USE_V1=1 VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT=480
export VLLM_ASCEND_ENABLE_MLAPO=1
if [ $# -ne 2 ]; then echo "2 arguments"; exit 1; fi
MODEL=/models/DeepSeek-R1
nohup vllm serve "$MODEL" \\
    --host 0.0.0.0 --port ${1:-8200} \\
    --tensor-parallel-size=$2 \\
    --max_num_batched_tokens 256 --quantization ascend \\
    --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' \\
    --additional-config '{"recompute_scheduler_enable": true}' \\
    --kv-transfer-config \\
    '{"kv_connector": "MooncakeConnectorV1",
      "kv_role": "kv_consumer",
      "kv_port": "36200",
      "kv_connector_extra_config": {
        "prefill": {"dp_size": 2, "tp_size": 8},
        "decode": {"dp_size": 4, "tp_size": 4}
      }
    }' > decode.log 2>&1 &
"""


def migrated(
    text: str, *others: str, model: Path | None = None, arguments: tuple[str, ...] = (), proxy: str | None = None
) -> Migration:
    commands = [command for each in (text, *others) for command in serve_commands(each, arguments)]
    return migrate_commands(commands, None if model is None else str(model), proxy)


def serve(options: str = "", **changes: Any) -> str:
    return f"vllm serve m {options} --kv-transfer-config {shlex.quote(json.dumps({**OLD, **changes}))}"


def said(result: Migration) -> dict[str, ChangeKind]:
    return {change.subject: change.kind for change in result.engines[0].changes}


@pytest.fixture
def mla(tmp_path: Path) -> Path:
    make_model("deepseek-v3", tmp_path)
    return tmp_path


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    make_model("qwen3-moe", tmp_path)
    return tmp_path


def test_a_script_with_quotes_comments_exports_and_continuations(mla: Path) -> None:
    result = migrated(SCRIPT, model=mla, arguments=("8201", "4"), proxy="http://192.0.2.1:8000")
    assert result.ok
    [engine] = result.engines
    assert (
        engine.kv_transfer_config
        == {
            "kv_connector": "LayerwisePushConnector",
            "kv_role": "kv_consumer",
            "kv_port": 36200,
            "kv_connector_extra_config": {"metaserver_allowlist": ["http://192.0.2.1:8000"]},
        }
        or engine.kv_transfer_config["kv_connector_extra_config"].get("who_computes") == "never"
    )
    assert engine.command[0] == ["vllm", "serve", "/models/DeepSeek-R1"]
    assert ["--port", "8201"] in engine.command
    assert ["--tensor-parallel-size", "4"] in engine.command
    assert ["--max-num-batched-tokens", "256"] in engine.command
    assert "decode.log" not in json.dumps(engine.command)
    assert set(engine.environment) == {"HCCL_IF_IP", "VLLM_ASCEND_ENABLE_MLAPO"}
    assert result.proxy[-2:] == ["--decode", "http://HOST:8201"]
    # What it prints is a command again, and one that is left as it is.
    printed = result_text(result, as_json=False)
    again = printed[printed.index("Command:") : printed.index("== proxy ==")]
    [back] = serve_commands(again)
    assert json.loads(back.words[-1]) == engine.kv_transfer_config
    assert back.environment == {"VLLM_ASCEND_ENABLE_MLAPO": "1"}


def test_arguments_that_a_script_leaves_open(mla: Path) -> None:
    result = migrated(SCRIPT, model=mla)
    assert not result.ok
    assert [change.subject for change in result.engines[0].stops] == ["--tensor-parallel-size"]
    assert "--set 2=..." in result.engines[0].stops[0].why
    [command] = serve_commands(SCRIPT)
    filled = migrate_commands([with_values(command, {"2": "4"})], str(mla), None)
    assert filled.ok


@pytest.mark.parametrize("name", ["MooncakeLayerwiseConnector", "MooncakeConnectorV1", "MooncakeConnector"])
def test_every_connector_that_is_replaced(name: str, qwen: Path) -> None:
    result = migrated(serve(kv_connector=name), model=qwen)
    assert result.ok
    assert result.engines[0].was == (name,)
    kinds = said(result)
    assert kinds["use_ascend_direct"] is kinds["engine_id"] is kinds["prefill"] is ChangeKind.LEFT_OUT
    assert kinds[name] is kinds["kv_port"] is ChangeKind.MEANING


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_a_pool_beside_it_comes_second_on_decode(role: str, qwen: Path) -> None:
    pool = {
        "kv_connector": "AscendStoreConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"backend": "mooncake"},
    }
    listed = {"connectors": [pool, {**OLD, "kv_role": role}]}
    config = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": listed}
    result = migrated(f"vllm serve m --kv-transfer-config {shlex.quote(json.dumps(config))}", model=qwen)
    entries = result.engines[0].kv_transfer_config["kv_connector_extra_config"]["connectors"]
    names = [entry["kv_connector"] for entry in entries]
    ordered = ["LayerwisePushConnector", "AscendStoreConnector"]
    assert names == (ordered if role == "kv_consumer" else ordered[::-1])
    assert pool in entries


def test_what_has_no_counterpart_is_named(qwen: Path) -> None:
    result = migrated(serve(kv_connector="UCMConnector", kv_role="kv_both"), model=qwen)
    assert not result.ok
    assert [change.subject for change in result.engines[0].stops] == ["UCMConnector (a KV pool)"]
    assert result.engines[0].command == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--enable-sleep-mode", "--enable-sleep-mode"),
        ("--additional-config '{\"enable_kv_nz\": true}'", "enable_kv_nz"),
        ("--prefill-context-parallel-size 2", "prefill_context_parallel_size"),
        ("--kv-cache-dtype fp8 --calculate-kv-scales", "--calculate-kv-scales"),
    ],
)
def test_the_connector_s_refusals_stop_it(options: str, named: str, qwen: Path) -> None:
    result = migrated(serve(options), model=qwen)
    assert not result.ok
    assert named in result.engines[0].stops[0].why


def test_full_graphs_with_context_parallelism_on_decode(qwen: Path) -> None:
    options = '-dcp 2 -O \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\''
    result = migrated(serve(options), model=qwen)
    assert result.ok
    assert said(result).get("cudagraph_mode", said(result).get("who_computes")) is ChangeKind.CHANGED


def test_a_model_that_cannot_be_read_stops_it(tmp_path: Path) -> None:
    result = migrated(serve(), model=tmp_path)
    assert not result.ok
    assert "give --model" in result.engines[0].stops[0].why


def test_int8_caches_of_the_latent_stop_it(tmp_path: Path) -> None:
    make_model("deepseek-v3-c8", tmp_path)
    assert [change.subject for change in migrated(serve(), model=tmp_path).engines[0].stops] == ["int8 caches"]


@pytest.mark.parametrize(("host", "url"), [("::1", "http://[::1]:8200"), ("::", "http://HOST:8200")])
def test_an_engine_at_an_ipv6_address(host: str, url: str, qwen: Path) -> None:
    result = migrated(serve(f"-tp 4 --host {host} --port 8200"), model=qwen)
    assert result.engines[0].url == url


def test_a_pair_that_fits(qwen: Path) -> None:
    prefill = serve("-tp 8 --port 8100", kv_role="kv_producer")
    result = migrated(prefill, serve("-tp 4 -dp 4 --port 8200"), model=qwen)
    assert result.ok
    assert not result.pair
    assert result.proxy == ["vllm-ascend-pd", "proxy", "--prefill", "http://HOST:8100", "--decode", "http://HOST:8200"]


@pytest.mark.parametrize(
    ("prefill", "decode", "subject"),
    [
        ("-tp 8 --kv-cache-dtype fp8", "-tp 4", "--kv-cache-dtype"),
        ("-tp 7", "-tp 4", "parallel sizes"),
        ("-tp 8 -q ascend", "-tp 4", "--quantization"),
    ],
)
def test_a_pair_that_does_not_fit(prefill: str, decode: str, subject: str, qwen: Path) -> None:
    result = migrated(serve(prefill, kv_role="kv_producer"), serve(decode), model=qwen)
    assert not result.ok
    assert subject in [change.subject for change in result.pair if change.kind is ChangeKind.STOPS]


def test_other_paths_of_a_model_with_images(tmp_path: Path, qwen: Path) -> None:
    """vLLM's hash of an image includes the path, so prefill could not tell whether it has decode's image."""
    vision = tmp_path / "vision"
    vision.mkdir()
    make_model("qwen3-vl-moe", vision)
    prefill = serve(kv_role="kv_producer")
    decode = serve().replace("vllm serve m ", "vllm serve elsewhere/m ")
    for model, refused in ((vision, True), (qwen, False)):
        [change] = [each for each in migrated(prefill, decode, model=model).pair if each.subject == "model"]
        assert change.kind is ChangeKind.CHECK
        assert ("images are refused" in change.why) == refused


def test_two_engines_of_one_side_are_no_pair(qwen: Path) -> None:
    assert [change.subject for change in migrated(serve(), serve(), model=qwen).pair] == ["kv_role"]


def test_sizes_that_the_old_configuration_has_otherwise(qwen: Path) -> None:
    result = migrated(serve("-tp 2", kv_role="kv_producer"), serve("-tp 4"), model=qwen)
    assert result.ok
    assert [change.kind for change in result.pair] == [ChangeKind.CHECK] * 2


def test_json_that_vllm_would_not_take(qwen: Path) -> None:
    loose = json.dumps(OLD)[:-1] + ",}"
    result = migrated(f"vllm serve m --kv-transfer-config '{loose}'", model=qwen)
    assert result.ok
    assert said(result)["--kv-transfer-config"] is ChangeKind.CHANGED


def test_options_with_dots(qwen: Path) -> None:
    dotted = (
        "vllm serve m --kv-transfer-config.kv_connector MooncakeConnectorV1 --kv-transfer-config.kv_role kv_producer"
    )
    assert migrated(dotted, model=qwen).engines[0].role == "kv_producer"


def test_the_older_way_to_start_a_server(qwen: Path) -> None:
    text = serve().replace("vllm serve m", "python -m vllm.entrypoints.openai.api_server --model m")
    result = migrated(text, model=qwen)
    assert result.ok
    assert result.engines[0].model == "m"


def test_inputs_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MigrateError, match="no closing quotation"):
        read_input("vllm serve 'm")
    with pytest.raises(MigrateError, match="has 0 `vllm serve` commands"):
        read_input("echo hello")
    for missing in ("missing.sh 8", "bash missing.sh", f"{tmp_path}/missing"):
        with pytest.raises(MigrateError, match=r"missing(\.sh)?: no such file$"):
            read_input(missing)
    script = tmp_path / "run.sh"
    script.write_text("vllm serve $1 --port $2\n")
    assert read_input(f"bash {script} m 8200").words == ("m", "--port", "8200")
    with pytest.raises(MigrateError, match="not http://HOST:PORT"):
        migrated(serve(), proxy="192.0.2.1:8000")
    with pytest.raises(MigrateError, match="is no JSON object"):
        migrated("vllm serve m --kv-transfer-config '[]'")


def test_ranks_of_a_model_without_experts_are_engines_of_their_own(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path)
    result = migrated(serve("-dp 8 --data-parallel-rank 3 --data-parallel-address 192.0.2.1"), model=tmp_path)
    assert result.ok
    assert said(result)["--data-parallel-*"] is ChangeKind.CHANGED
    assert not [words for words in result.engines[0].command if words[0].startswith("--data-parallel")]
    together = migrated(serve("-dp 8"), model=tmp_path)
    assert ["--data-parallel-size", "8"] in together.engines[0].command


def test_models_with_images_are_told_of_the_proxy_s_option(tmp_path: Path, qwen: Path) -> None:
    vision = tmp_path / "vision"
    vision.mkdir()
    make_model("qwen3-vl-moe", vision)
    assert said(migrated(serve(), model=vision))["--media-hosts"] is ChangeKind.CHECK
    assert "--media-hosts" not in said(migrated(serve(), model=qwen))


def test_steps_of_fewer_tokens_than_requests(qwen: Path) -> None:
    drafts = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
    result = migrated(serve(f"--max-num-seqs 8 --max-num-batched-tokens 4 {drafts}"), model=qwen)
    assert ["--max-num-batched-tokens", "32"] in result.engines[0].command
    enough = migrated(serve(f"--max-num-seqs 8 --max-num-batched-tokens 8 {drafts}"), model=qwen)
    assert ["--max-num-batched-tokens", "8"] in enough.engines[0].command


@pytest.mark.parametrize(("port", "ours"), [(20001, 18001), (21600, 19600), (21700, 21700), (30100, 30100)])
def test_decode_s_port_is_none_of_mooncake_s(port: int, ours: int, qwen: Path) -> None:
    assert migrated(serve(kv_port=port), model=qwen).engines[0].kv_transfer_config["kv_port"] == ours
    prefill = migrated(serve(kv_port=port, kv_role="kv_producer"), model=qwen)
    assert "kv_port" not in prefill.engines[0].kv_transfer_config


def test_compressed_caches(tmp_path: Path) -> None:
    make_model("deepseek-v4", tmp_path)
    result = migrated(serve(kv_connector="MooncakeHybridConnector"), model=tmp_path)
    assert result.ok
    assert said(result)["model"] is ChangeKind.CHECK
    for options in ("-dcp 2", "--block-size 16"):
        assert len(migrated(serve(options), model=tmp_path).engines[0].stops) == 1
    sides = [serve(f"-tp {tp}", kv_role=role) for tp, role in ((2, "kv_producer"), (1, "kv_consumer"))]
    assert not [change for change in migrated(*sides, model=tmp_path).pair if change.kind is ChangeKind.STOPS]
    sides[1] = serve("-tp 3", kv_role="kv_consumer")
    pair = migrated(*sides, model=tmp_path).pair
    assert [change.why for change in pair if change.kind is ChangeKind.STOPS] == [
        "decode: tensor parallel size 3 does not divide 16 attention heads"
    ]
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in migrated(serve(), model=tmp_path).engines[0].stops[0].why


PREFILL = """vllm serve m --kv-transfer-config '{"kv_connector": "MooncakeConnectorV1", "kv_role": "kv_producer"}'"""


def exports(script: str, *arguments: str) -> list[str]:
    """What is printed before the command for a script's lines before it."""
    result = migrate_commands(serve_commands(f"{script}\n{PREFILL}", arguments), None, None)
    lines = result_text(result, as_json=False).splitlines()
    return lines[lines.index("Command:") + 2 : lines.index("vllm serve m \\")]


@pytest.mark.parametrize(
    ("script", "printed"),
    [
        ("export A='1 2'", "export A='1 2'"),
        ("B=2; export A=x$B", "export A=x2"),
        ("B=2; export A=x$B  # the NIC's", "export A=x2"),
        ("B=2; export A=x$B \\\n  # more", "export A=x2"),
        ("A=1\nexport A", "export A=1"),
        ("export A=$1", "export A=first"),
        ("declare -x A=5", "export A=5"),
        ("typeset -gx A=5", "export A=5"),
        ("if true; then B=1; fi\nexport A=1", "export A=1"),
        ("export A=2\nA=1", "export A=1"),
    ],
)
def test_variables_stay_before_the_command(script: str, printed: str) -> None:
    assert exports(script, "first") == [printed]


@pytest.mark.parametrize(
    "script",
    [
        "export A=$(hostname -I)",
        "export A=$(hostname -I | cut -d ' ' -f 1)",
        "export A=`hostname -I`",
        "export A=`cat name`",
        "export A=~/x",
        "export A=/x:~/y",
        'export A="${HOME:-/root}/z"',
        "export A=$2",
        "export A",
        "export A=$A:/x",
        "export A+=:/x",
        "B=1; export A='$B'",
        "B=1; export A=\\$B",
        "B=`date`; export A=$B",
        "if test -d /x; then\nexport A=1\nfi",
        "if test -d /x; then export A=1; fi",
        "export A=1\ntest -d /x && export A=2",
        "A=1\ntest -d /x || export A",
        "for i in 1 2; do export A=$i; done",
        "case $1 in\nfirst) export A=1 ;;\nesac",
        "set_up() {\nexport A=1\n}",
    ],
)
def test_values_that_only_a_shell_knows_stay_in_the_old_script(script: str) -> None:
    assert exports(script, "first") == ["# A: as in the old script"]


def test_programs_get_no_value_that_only_a_shell_knows() -> None:
    result = migrate_commands(serve_commands(f"export A=1 B=~/x\nC=3 env D=4 {PREFILL}"), None, None)
    made = json.loads(result_text(result, as_json=True))
    assert made["engines"][0]["environment"] == {"A": "1", "B": None, "C": "3", "D": "4"}


def test_an_assignment_without_export_is_no_variable_of_the_engine() -> None:
    assert exports("A=1\ndeclare B=2\nreadonly C=3") == []
