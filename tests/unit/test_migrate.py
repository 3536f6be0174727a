# SPDX-License-Identifier: Apache-2.0
"""`vllm-ascend-pd migrate` on single commands. test_migrate_scripts.py has scripts."""

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from harness.recipes import make_model
from vllm_ascend_pd.tools.migrate.changes import ChangeKind, Migration, render
from vllm_ascend_pd.tools.migrate.command import CommandError, EngineArguments, read_arguments
from vllm_ascend_pd.tools.migrate.engine import migrate_command

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

COMMAND = """\
HCCL_IF_IP=192.0.2.3 VLLM_ASCEND_ENABLE_MLAPO=1 \\
  vllm serve "/models/DeepSeek-R1" \\
    --host 0.0.0.0 --port 8201 \\
    --tensor-parallel-size=4 \\
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
    }'
"""


def read(text: str) -> EngineArguments:
    """Reads the words that a shell makes of `text`, with the variables before them set."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    variables = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    return read_arguments(words[len(variables) :], variables)


def migrated(text: str, model: Path | None = None) -> Migration:
    return migrate_command(read(text), None if model is None else str(model))


def serve(options: str = "", **changes: Any) -> str:
    return f"vllm serve m {options} --kv-transfer-config {shlex.quote(json.dumps({**OLD, **changes}))}"


def said(result: Migration) -> dict[str, ChangeKind]:
    return {change.subject: change.kind for change in result.changes}


@pytest.fixture
def mla(tmp_path: Path) -> Path:
    return model_in(tmp_path / "mla", "deepseek-v3")


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return model_in(tmp_path / "qwen", "qwen3-moe")


def model_in(folder: Path, architecture: str) -> Path:
    folder.mkdir()
    make_model(architecture, folder)
    return folder


def test_a_command(mla: Path) -> None:
    result = migrated(COMMAND, model=mla)
    assert result.ok
    assert result.kv_transfer_config == {
        "kv_connector": "LayerwisePushConnector",
        "kv_role": "kv_consumer",
        "kv_port": 36200,
    }
    assert result.command[:4] == [
        ["vllm", "serve", "/models/DeepSeek-R1"],
        ["--host", "0.0.0.0"],
        ["--port", "8201"],
        ["--tensor-parallel-size=4"],
    ]
    assert ["--max_num_batched_tokens", "256"] in result.command
    assert said(result)["secret"] is ChangeKind.CHECK, "the command does not name it, and each host needs it"
    # What it prints is a command again, and one that is left as it is.
    printed = render(result)
    back = read(printed[printed.index("Command:\n") + 9 : printed.rindex("\n\n")])
    assert back.words() == result.command


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
    entries = result.kv_transfer_config["kv_connector_extra_config"]["connectors"]
    names = [entry["kv_connector"] for entry in entries]
    ordered = ["LayerwisePushConnector", "AscendStoreConnector"]
    assert names == (ordered if role == "kv_consumer" else ordered[::-1])
    assert pool in entries


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--additional-config '{\"enable_kv_nz\": true}'", "enable_kv_nz"),
        ("--prefill-context-parallel-size 2", "prefill_context_parallel_size"),
        ("--kv-cache-dtype fp8 --calculate-kv-scales", "--calculate-kv-scales"),
    ],
)
def test_the_connector_s_refusals_stop_it(options: str, named: str, qwen: Path) -> None:
    result = migrated(serve(options), model=qwen)
    assert not result.ok
    assert named in result.stops[0].why


def test_full_graphs_with_context_parallelism_on_decode(qwen: Path, mla: Path) -> None:
    options = '-dcp 2 -cc \'{"cudagraph_mode": "FULL_DECODE_ONLY"}\''
    result = migrated(serve(options), model=qwen)
    assert result.ok
    assert said(result)["cudagraph_mode"] is ChangeKind.CHANGED
    assert "who_computes" not in said(result)
    assert ["--compilation-config", '{"cudagraph_mode": "PIECEWISE"}'] in result.command
    without_weights = migrated(serve(f"{options} --max-num-batched-tokens 256 -q ascend"), model=mla)
    assert without_weights.ok
    assert {"cudagraph_mode", "who_computes"} <= set(said(without_weights))


@pytest.mark.parametrize("tokens", [1024, 1025])
def test_mla_without_weights_for_prompts_leaves_them_to_prefill(tokens: int, mla: Path) -> None:
    result = migrated(serve(f"--max-num-batched-tokens {tokens} -q ascend"), model=mla)
    assert result.ok
    assert ("who_computes" in said(result)) is (tokens == 1024)


def test_a_model_that_cannot_be_read_stops_it(tmp_path: Path) -> None:
    result = migrated(serve(), model=tmp_path)
    assert not result.ok
    assert "give --model" in result.stops[0].why


@pytest.mark.parametrize("settings", [{}, {"recompute_scheduler_enable": True}])
@pytest.mark.parametrize("model", ["deepseek-v3-c8", "qwen3-moe"])
def test_decode_that_keeps_int8_computes_no_prompts(tmp_path: Path, model: str, settings: dict[str, bool]) -> None:
    make_model(model, tmp_path)
    if model == "qwen3-moe":
        described = {"kv_cache_type": "C8", "model.layers.0.self_attn.k_proj.kv_cache_scale": "FLOAT"}
        (tmp_path / "quant_model_description.json").write_text(json.dumps(described), encoding="utf-8")
    additional = f"--additional-config '{json.dumps(settings)}'"
    for role, never in (("kv_producer", None), ("kv_consumer", None if settings else "never")):
        result = migrated(serve(additional, kv_role=role), model=tmp_path)
        assert result.ok
        extra = result.kv_transfer_config.get("kv_connector_extra_config", {})
        assert extra.get("who_computes") == never


def test_int8_caches_with_context_parallelism_stop_it(tmp_path: Path) -> None:
    make_model("deepseek-v3-c8", tmp_path)
    result = migrated(serve("--decode-context-parallel-size 2"), model=tmp_path)
    assert [change.subject for change in result.stops] == ["--decode-context-parallel-size"]


def test_json_that_vllm_would_not_take(qwen: Path) -> None:
    loose = json.dumps(OLD)[:-1] + ",}"
    result = migrated(f"vllm serve m --kv-transfer-config '{loose}'", model=qwen)
    assert result.ok
    assert said(result)["--kv-transfer-config"] is ChangeKind.CHANGED


def test_the_older_way_to_start_a_server(qwen: Path) -> None:
    text = serve().replace("vllm serve m", "python -m vllm.entrypoints.openai.api_server --model m")
    result = migrated(text, model=qwen)
    assert result.ok
    assert result.model == "m"


def test_inputs_that_cannot_be_read() -> None:
    for text, reason in (
        ("echo hello", "there is no `vllm serve` in it"),
        ("vllm serve m --kv-transfer-config '[]'", r"--kv-transfer-config: '\[\]' is no JSON object"),
        (serve("-tp ''"), "--tensor-parallel-size: '' is no number"),
        (serve(kv_connector_extra_config="x"), "kv_connector_extra_config of MooncakeConnectorV1 is no JSON object"),
    ):
        with pytest.raises(CommandError, match=reason):
            migrated(text)
    with pytest.raises(CommandError, match="not UTF-8"):
        read_arguments(["vllm", "serve", "m\udcff"], {})


def test_ranks_of_a_model_without_experts_are_engines_of_their_own(tmp_path: Path) -> None:
    make_model("qwen2", tmp_path)
    result = migrated(serve("-dp 8 -dpn 3 --data-parallel-external-lb -dpa 192.0.2.1"), model=tmp_path)
    assert result.ok
    assert said(result)["--data-parallel-*"] is ChangeKind.CHANGED
    assert not [words for words in result.command if words[0].startswith(("--data-parallel", "-dp"))]
    together = migrated(serve("-dp 8"), model=tmp_path)
    assert ["-dp", "8"] in together.command


def test_steps_of_fewer_tokens_than_requests(qwen: Path) -> None:
    drafts = '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 3}\''
    result = migrated(serve(f"--max-num-seqs 8 --max-num-batched-tokens 4 {drafts}"), model=qwen)
    assert ["--max-num-batched-tokens", "32"] in result.command
    enough = migrated(serve(f"--max-num-seqs 8 --max-num-batched-tokens 8 {drafts}"), model=qwen)
    assert ["--max-num-batched-tokens", "8"] in enough.command


@pytest.mark.parametrize(("port", "ours"), [(20001, 18001), (21600, 19600), (21700, 21700), (30100, 30100)])
def test_decode_s_port_is_none_of_mooncake_s(port: int, ours: int, qwen: Path) -> None:
    assert migrated(serve(kv_port=port), model=qwen).kv_transfer_config["kv_port"] == ours
    prefill = migrated(serve(kv_port=port, kv_role="kv_producer"), model=qwen)
    assert "kv_port" not in prefill.kv_transfer_config


def test_compressed_caches(tmp_path: Path) -> None:
    make_model("deepseek-v4", tmp_path)
    result = migrated(serve(kv_connector="MooncakeHybridConnector"), model=tmp_path)
    assert result.ok
    assert said(result)["model"] is ChangeKind.CHECK
    shared = migrated(serve("-pcp 2", kv_role="kv_producer"), model=tmp_path)
    assert said(shared)["--prefill-context-parallel-size"] is ChangeKind.CHECK
    for options in ("-dcp 2", "--block-size 16"):
        assert len(migrated(serve(options), model=tmp_path).stops) == 1
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in migrated(serve(), model=tmp_path).stops[0].why
    for wrong in ("[]", '{"text_config": "llama"}'):
        (tmp_path / "config.json").write_text(wrong)
        assert said(migrated(serve(), model=tmp_path))["model"] in (ChangeKind.STOPS, ChangeKind.CHECK), wrong


# --- words -------------------------------------------------------------------------------------------------


def words_of(text: str) -> EngineArguments:
    return read_arguments(["vllm", "serve", "m", *shlex.split(text)], {})


def test_dotted_options_are_one_object() -> None:
    """As vLLM's parser makes it: it comes after the others, and replaces them."""
    arguments = words_of(
        '--kv-transfer-config \'{"kv_role": "kv_both"}\' --kv_transfer_config.kv_role kv_consumer '
        "--kv-transfer-config.kv_connector_extra_config.a-b.c+ x,y --kv-transfer-config.kv_port=5"
    )
    extra = {"a-b": {"c": ["x", "y"]}}
    made = {"kv_role": "kv_consumer", "kv_connector_extra_config": extra, "kv_port": 5}
    assert arguments.json("kv-transfer-config") == made
    # A cut name is another option to vLLM, and the last one counts.
    assert words_of("--kv-transfer-config.kv_port 5 --kv-transfer.kv_port 6").json("kv-transfer-config") == {
        "kv_port": 6
    }
    changed = arguments.with_json("kv-transfer-config", {"kv_port": 6})
    assert changed.words()[1:] == [["--kv-transfer-config", '{"kv_port": 6}']]


def test_words_that_are_not_known_stay(qwen: Path) -> None:
    result = migrated(serve("--brand-new 5 6 -tp 2 extra --data-parallel"), model=qwen)
    assert result.ok
    command = result.command
    assert command[1:5] == [["--brand-new", "5", "6"], ["-tp", "2"], ["extra"], ["--data-parallel"]]


def test_a_model_that_transformers_does_not_know_may_start(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of-its-own", **sizes}))
    result = migrated(serve(), model=tmp_path)
    assert result.ok
    [change] = [change for change in result.changes if change.subject == "model"]
    assert (change.kind, "does not say layer_types" in change.why) == (ChangeKind.CHECK, True)


def test_what_is_before_vllm_stays(qwen: Path) -> None:
    words = ["numactl", "-N", "0", "env", "VLLM_PLUGINS=ascend", "/opt/bin/vllm", *shlex.split(serve())[1:]]
    result = migrate_command(read_arguments(words, {}), str(qwen))
    env = ["env", "VLLM_PLUGINS=ascend,vllm_ascend_pd"]
    assert result.command[0] == ["numactl", "-N", "0", *env, "/opt/bin/vllm", "serve", "m"]
    assert result.environment == {}


# --- what vLLM would do without a word ---------------------------------------------------------------------


def test_base_ports_without_room_are_named(qwen: Path) -> None:
    def engine(base: str, port: int) -> Any:
        return migrated(f"ASCEND_BASE_PORT={base} {serve(kv_port=port)}", model=qwen)

    [stop] = engine("1000", 1500).stops
    assert stop.subject == "kv_port"
    assert "ASCEND_BASE_PORT is 1000" in stop.why
    for base in ("0", "99999", "abc", ""):
        assert [change.subject for change in engine(base, 20001).stops] == ["ASCEND_BASE_PORT"]
    assert engine("30000", 30001).kv_transfer_config["kv_port"] == 28001
    for port in (0, 80, 65536, "x", None):
        assert [change.subject for change in migrated(serve(kv_port=port), model=qwen).stops] == ["kv_port"]
    last = migrated(serve("-dp 2", kv_port=65535), model=qwen)
    assert [change.subject for change in last.stops] == ["kv_port"]


@pytest.mark.parametrize("given", ["ascend", "", "ascend,other", "ascend, vllm_ascend_pd"])
def test_vllm_plugins_without_ours_gets_it(given: str, qwen: Path) -> None:
    right = f"{given},vllm_ascend_pd".removeprefix(",")
    result = migrated(f"VLLM_PLUGINS='{given}' {serve()}", model=qwen)
    assert said(result)["VLLM_PLUGINS"] is ChangeKind.CHANGED
    assert result.environment == {"VLLM_PLUGINS": right}
    exported = migrate_command(read_arguments(shlex.split(serve()), {"VLLM_PLUGINS": given}), str(qwen))
    assert exported.environment == {"VLLM_PLUGINS": right}
    assert f"VLLM_PLUGINS={shlex.quote(right)} \\\n" in render(exported)
    assert "VLLM_PLUGINS" not in said(migrated(f"VLLM_PLUGINS='{right}' {serve()}", model=qwen))


@pytest.mark.parametrize("option", ["--kv-offloading-size 10", "--kv_offloading_size=10", "--kv-offloading-s 10"])
def test_offloading_that_replaces_the_connector_is_refused(option: str, qwen: Path) -> None:
    [stop] = migrated(serve(option), model=qwen).stops
    assert stop.subject == "--kv-offloading-size"
    assert "MultiConnector" in stop.why


@pytest.mark.parametrize("role", ["kv_consumer", "kv_producer"])
def test_a_pool_beside_linear_attention_is_refused_with_the_remedy_that_helps(
    role: str, tmp_path: Path, qwen: Path
) -> None:
    linear = model_in(tmp_path / "linear", "qwen3.5")
    pool = {"kv_connector": "AscendStoreConnector", "kv_role": role}
    listed = {"connectors": [{**OLD, "kv_role": role}, pool]}
    config = {"kv_connector": "MultiConnector", "kv_role": role, "kv_connector_extra_config": listed}
    text = f"vllm serve m --no-enable-prefix-caching --kv-transfer-config {shlex.quote(json.dumps(config))}"
    [stop] = migrated(text, model=linear).stops
    assert stop.subject == "AscendStoreConnector"
    assert "Leave the pool out" in stop.why
    assert migrated(text, model=qwen).ok
    assert migrated(serve("--no-enable-prefix-caching", kv_role=role), model=linear).ok
