# SPDX-License-Identifier: Apache-2.0
"""What this connector relies on in vllm-ascend, checked against the wheel that is installed.

Real classes are run: a tiny model in one process with a connector that records its calls, the platform's own
configuration, its layerwise connector's two ends of a ticket, its MultiConnector. Only which configuration keys
vllm-ascend reads is taken from its source, by parsing it. Its example proxy is not in the wheel: that a ticket is
posted to `/v1/metaserver` cannot be checked here, only that it is posted to the URL in the request, as it is.

Each assertion says what changed when it fails.
"""

import ast
import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

import offline_hooks
import vllm_ascend_pd
from harness.engines import CPU_ENV
from harness.models import TINY, make_model
from vllm_ascend_pd.config import ConfigError, ConnectorConfig, PeerParallel, TlsConfig, parse_config
from vllm_ascend_pd.core.ticket import Ticket, parse_ticket

pytestmark = pytest.mark.npu

OURS = "LayerwisePushConnector"
BLOCK = 128
ALIGNMENT = 2 << 20
MLA_CONFIG = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}

OUTSIDE_OF_STEPS = ("__init__", "register_kv_caches", "get_handshake_metadata", "shutdown")

Event = dict[str, Any]


@pytest.fixture(scope="module")
def dense_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(TINY, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def mla_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No weights: what it computes does not matter."""
    folder = tmp_path_factory.mktemp("models") / "deepseek"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MLA_CONFIG))
    return folder


# --- registration -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plugins() -> None:
    """Both packages' entry points in this process, as vLLM loads them."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def test_vllm_finds_the_plugins_of_both_packages() -> None:
    general = {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    platforms = {point.name: point.value for point in importlib.metadata.entry_points(group="vllm.platform_plugins")}
    assert general.get("vllm_ascend_pd") == "vllm_ascend_pd:register"
    assert general.get("ascend_kv_connector") == "vllm_ascend:register_connector", "vllm-ascend registers otherwise"
    assert platforms == {"ascend": "vllm_ascend:register"}, "another platform would be in use"


def test_our_connector_is_found_by_name_beside_vllm_ascends(plugins: None) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.platforms import current_platform
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector
    from vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_layerwise_connector import MooncakeLayerwiseConnector

    from vllm_ascend_pd.connector import LayerwisePushConnector

    assert current_platform.device_type == "npu"
    found = KVConnectorFactory.get_connector_class_by_name
    assert found(OURS) is LayerwisePushConnector
    assert found("MooncakeLayerwiseConnector") is MooncakeLayerwiseConnector
    assert found("MultiConnector") is AscendMultiConnector, "vllm-ascend no longer replaces vLLM's MultiConnector"


def test_registering_twice_is_harmless(plugins: None) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    before = dict(KVConnectorFactory._registry)
    vllm_ascend_pd.register()
    vllm_ascend_pd.register()
    assert KVConnectorFactory._registry == before


def test_vllm_ascend_registers_no_connector_of_our_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm_ascend.distributed.kv_transfer import register_connector

    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    register_connector()
    theirs = set(KVConnectorFactory._registry)
    assert OURS not in theirs, "vllm-ascend registers a connector of our name: its plugin or ours cannot be loaded"
    assert theirs == {
        "AscendStoreConnector",
        "LMCacheAscendConnector",
        "MooncakeConnectorStoreV1",
        "MooncakeConnectorV1",
        "MooncakeHybridConnector",
        "MooncakeLayerwiseConnector",
        "MultiConnector",
        "RecomputeCPUOffloadConnector",
        "SimpleCPUOffloadConnector",
        "UCMConnector",
    }, "vllm-ascend registers other connectors"
    vllm_ascend_pd.register()
    assert KVConnectorFactory._registry.keys() == theirs | {OURS}


def test_every_hook_we_implement_is_one_vllm_calls() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

    newer = {"has_pending_push_work", "get_loaded_kv_cache_group_ids", "get_transfer_results"}  # vLLM 0.32
    for name in our_hooks() - newer:
        base = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        assert base is not None, f"vLLM's connector interface has no `{name}` any more"
        if name in {"shutdown"}:
            continue
        theirs = [p for p in inspect.signature(base).parameters.values() if p.kind is not p.VAR_KEYWORD]
        ours = inspect.signature(getattr(connector_class(), name)).parameters.values()
        assert len(theirs) == len([p for p in ours if p.kind is not p.VAR_KEYWORD]), f"`{name}` takes other arguments"


def connector_class() -> type:
    from vllm_ascend_pd.connector import LayerwisePushConnector

    return LayerwisePushConnector


def our_hooks() -> set[str]:
    return {
        name
        for name, member in vars(connector_class()).items()
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, classmethod))
    }


# --- caches, specs and hooks: a model in one process -------------------------------------------------------


@functools.cache
def offline_run(model: Path, role: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **CPU_ENV, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = Path(__file__).with_name("offline_hooks.py")
    command = [sys.executable, str(program), str(model), role]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)


def recorded(model: Path, role: str) -> tuple[Event, ...]:
    """How vllm-ascend called a connector while one request was computed."""
    result = offline_run(model, role)
    for line in result.stdout.splitlines():
        if line.startswith("EVENTS "):
            return tuple(json.loads(line.removeprefix("EVENTS ")))
    pytest.fail(f"the engine did not get through a request; the end of its errors:\n{result.stderr[-4000:]}")


@pytest.fixture(params=["dense", "mla"])
def prefill_events(request: pytest.FixtureRequest) -> tuple[Event, ...]:
    return recorded(request.getfixturevalue(f"{request.param}_model"), "kv_producer")


@pytest.fixture
def decode_events(dense_model: Path) -> tuple[Event, ...]:
    return recorded(dense_model, "kv_consumer")


def only(events: tuple[Event, ...], *hooks: str) -> list[Event]:
    return [event for event in events if event["hook"] in hooks]


def worker_steps(events: tuple[Event, ...]) -> list[list[Event]]:
    """What each step called on the worker's side; `clear_connector_metadata` ends one."""
    steps: list[list[Event]] = []
    step: list[Event] = []
    for event in events:
        if event["side"] == "worker" and event["hook"] not in OUTSIDE_OF_STEPS:
            step.append(event)
        if event["hook"] == "clear_connector_metadata":
            steps.append(step)
            step = []
    assert len(steps) > offline_hooks.OUTPUT_TOKENS, "steps no longer end with clear_connector_metadata"
    return steps


def computes(step: list[Event]) -> bool:
    return any(event["hook"] == "save_kv_layer" for event in step)


def test_dense_caches_are_k_and_v_by_token(dense_model: Path) -> None:
    events = recorded(dense_model, "kv_producer")
    [registered] = only(events, "register_kv_caches")
    assert list(registered["caches"]) == [f"model.layers.{i}.self_attn.attn" for i in range(TINY.layers)]
    for layer, cache in registered["caches"].items():
        k, v = cache["shapes"]
        assert k == v, f"{layer}: K {k} and V {v} have different shapes"
        assert k[1:] == [BLOCK, TINY.kv_heads, TINY.head_size], (
            f"{layer}: not [num_blocks, block size, KV heads, head size] but {k}"
        )
    # The prompt repeats one token, so in the first layer V is equal in all rows and K, rotated by position, is not.
    first = only(events, "save_kv_layer")[0]
    assert first["constant"] == [False, True], "a layer's cache is no longer the tuple (K, V)"


def test_mla_caches_are_latent_and_rope(mla_model: Path) -> None:
    events = recorded(mla_model, "kv_producer")
    [registered] = only(events, "register_kv_caches")
    for layer, cache in registered["caches"].items():
        assert [shape[1:] for shape in cache["shapes"]] == [[BLOCK, 1, 512], [BLOCK, 1, 64]], (
            f"{layer}: not the latent and the rope part, but {cache['shapes']}"
        )
    assert only(events, "save_kv_layer")[0]["constant"] == [True, False], "the order is no longer (latent, rope)"


def test_caches_can_be_registered_for_transfer(prefill_events: tuple[Event, ...]) -> None:
    [registered] = only(prefill_events, "register_kv_caches")
    for layer, cache in registered["caches"].items():
        assert cache["type"] == "tuple", f"{layer}: its cache is a {cache['type']}"
        assert all(cache["contiguous"]), f"{layer}: its tensors are not contiguous"
        assert set(cache["devices"]) == {"npu"}
        assert [address % ALIGNMENT for address in cache["addresses"]] == [0, 0], (
            f"{layer}: with P/D its tensors no longer begin at multiples of 2 MiB, which HCCS needs"
        )


def test_specs_have_what_we_read(prefill_events: tuple[Event, ...]) -> None:
    [registered] = only(prefill_events, "register_kv_caches")
    assert registered["specs"].keys() == registered["caches"].keys(), "layers with a cache but without a cache group"
    mla = registered["caches"]["model.layers.0.self_attn.attn"]["shapes"][0][-1] == 512
    heads = 1 if mla else TINY.kv_heads
    for layer, spec in registered["specs"].items():
        assert spec["num_kv_heads"] == heads, f"{layer}: {spec['kind']}.num_kv_heads is {spec['num_kv_heads']}"
        assert spec["block_size"] == BLOCK, f"{layer}: blocks of {spec['block_size']}, although P/D has 128 only"
        assert ("MLA" in spec["kind"]) == mla, f"compat.layer_specs tells MLA by the name, which is {spec['kind']}"
    assert set(map(tuple, registered["ours"].values())) == {(0, BLOCK, heads, heads)}


def test_the_start(prefill_events: tuple[Event, ...]) -> None:
    start = [
        (event["hook"], event["side"]) for event in prefill_events if event["hook"] != "get_num_new_matched_tokens"
    ]
    assert start[: start.index(("build_connector_meta", "scheduler")) - 1] == [
        ("__init__", "worker"),
        ("register_kv_caches", "worker"),
        ("__init__", "scheduler"),
        ("get_finished_count", "scheduler"),
        ("get_handshake_metadata", "worker"),
    ], "the connector is set up in another order"
    worker, scheduler = only(prefill_events, "__init__")
    assert worker["engine_id"] == scheduler["engine_id"], "scheduler and ranks have different engine ids"
    assert worker["engine_id"].startswith("an-engine"), "the configured engine id is not used at all"


def test_hooks_of_a_step_that_computes(prefill_events: tuple[Event, ...]) -> None:
    check_forward_steps(prefill_events)


def test_hooks_of_a_step_that_computes_on_decode(decode_events: tuple[Event, ...]) -> None:
    check_forward_steps(decode_events)


def check_forward_steps(events: tuple[Event, ...]) -> None:
    [registered] = only(events, "register_kv_caches")
    forwards = [step for step in worker_steps(events) if computes(step)]
    assert len(forwards) >= offline_hooks.OUTPUT_TOKENS, "save_kv_layer is not called in every step that computes"
    for step in forwards:
        called = [(event["hook"], event.get("layer")) for event in step if event["hook"] != "on_kv_cache_written"]
        loads = [layer for hook, layer in called if hook == "wait_for_layer_load"]
        # MLA does not wait for what it loads in steps that only decode. We load nothing.
        assert loads in ([], list(registered["caches"])), "wait_for_layer_load is not called layer by layer"
        layers = [
            (hook, layer)
            for layer in registered["caches"]
            for hook in (("wait_for_layer_load", "save_kv_layer") if loads else ("save_kv_layer",))
        ]
        assert called == [
            ("handle_preemptions", None),
            ("bind_connector_metadata", None),
            ("start_load_kv", None),
            *layers,
            ("wait_for_save", None),
            ("get_finished", None),
            ("get_block_ids_with_load_errors", None),
            ("build_connector_worker_meta", None),
            ("clear_connector_metadata", None),
        ], "vllm-ascend calls a step's hooks in another order"
        assert not step[0]["bound"], "handle_preemptions now comes with the step's metadata bound"


def test_hooks_of_a_step_that_computes_nothing(decode_events: tuple[Event, ...]) -> None:
    """As long as a request waits for its KV, and once after the last one ended."""
    idle = [step for step in worker_steps(decode_events) if not computes(step)]
    assert len(idle) >= 2, "no step runs while a request waits for its KV"
    for step in idle:
        assert [event["hook"] for event in step] == [
            "handle_preemptions",
            "bind_connector_metadata",
            "start_load_kv",
            "get_finished",
            "get_block_ids_with_load_errors",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ], "a step without tokens calls other hooks"


def test_a_layer_is_written_when_it_is_saved(prefill_events: tuple[Event, ...]) -> None:
    """An event recorded on the current stream in `save_kv_layer` comes after the writing of the layer's cache."""
    for step in worker_steps(prefill_events):
        streams = {event["stream"] for event in step if "stream" in event}
        assert len(streams) == 1, "save_kv_layer is not called on the stream that computes"
        written = False
        for event in step:
            if event["hook"] == "on_kv_cache_written":
                written = True
            elif event["hook"] == "save_kv_layer":
                assert written, f"{event['layer']} is saved before vllm-ascend says that it is written"
                assert all(event["same"]), f"{event['layer']}: save_kv_layer gets other tensors than were registered"
                assert all(event["written"]), f"{event['layer']}: {event['tokens']} tokens were not all written"
                written = False


def test_prompts_come_in_chunks_that_fill_the_step(prefill_events: tuple[Event, ...]) -> None:
    tokens = [event["tokens"] for event in only(prefill_events, "build_connector_meta")]
    whole, rest = divmod(offline_hooks.PROMPT_TOKENS, offline_hooks.STEP_TOKENS)
    assert tokens[: whole + 1] == [*whole * [offline_hooks.STEP_TOKENS], rest]


def test_reports_reach_the_scheduler_in_order(prefill_events: tuple[Event, ...]) -> None:
    reported = [event["step"] for event in only(prefill_events, "update_connector_output")]
    assert reported == list(range(1, len(reported) + 1)), "worker metadata is lost or out of order"
    assert len(reported) > offline_hooks.OUTPUT_TOKENS


def test_requests_end_by_all_groups(prefill_events: tuple[Event, ...], decode_events: tuple[Event, ...]) -> None:
    for events in (prefill_events, decode_events):
        assert [event["groups"] for event in only(events, "request_finished_all_groups")] == [1]
        assert only(events, "request_finished") == []


def test_decode_waits_until_kv_is_reported_as_received(decode_events: tuple[Event, ...]) -> None:
    hooks = ("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta", "get_finished")
    called = only(decode_events, *hooks)
    matched, allocated = called[:2]
    prompt = offline_hooks.PROMPT_TOKENS
    assert (matched["hook"], matched["computed"]) == ("get_num_new_matched_tokens", 0)
    assert (allocated["hook"], allocated["external"]) == ("update_state_after_alloc", prompt)
    assert [len(group) for group in allocated["blocks"]] == [-(-prompt // BLOCK)], "not all of the prompt's blocks"
    received = next(i for i, event in enumerate(called) if event.get("received"))
    assert all(e["tokens"] == 0 for e in called[:received] if e["hook"] == "build_connector_meta"), (
        "a request whose KV is on its way was computed"
    )
    again = next(event for event in called[received:] if event["hook"] == "update_state_after_alloc")
    assert (again["external"], again["blocks"]) == (0, allocated["blocks"]), (
        "when decode starts, update_state_after_alloc comes a second time, with the same blocks"
    )
    first = next(e for e in called[received:] if e["hook"] == "build_connector_meta" and e["tokens"])
    assert first["tokens"] == 1, "more than the prompt's last token is computed"


# --- configuration ----------------------------------------------------------------------------------------


def engine_config(model: Path, tp: int = 1, **transfer: Any) -> Any:
    """The configuration as the platform completes and checks it."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    transfer = {"kv_connector": OURS, "kv_role": "kv_producer", "engine_id": "an-engine", **transfer}
    additional = {"weight_nz_mode": 0, **transfer.pop("additional_config", {})}
    return EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=512,
        tensor_parallel_size=tp,
        additional_config=additional,
        kv_transfer_config=KVTransferConfig(**transfer),
    ).create_engine_config()


@pytest.mark.parametrize(
    ("role", "tp", "prefill_tp", "decode_tp"),
    [("kv_producer", 1, 1, 1), ("kv_producer", 2, 2, 1), ("kv_consumer", 1, 2, 1), ("kv_consumer", 2, 2, 2)],
)
def test_declared_sizes(plugins: None, dense_model: Path, role: str, tp: int, prefill_tp: int, decode_tp: int) -> None:
    """`prefill` and `decode` as vllm-ascend's guides have them are taken by both."""
    extra = {
        "prefill": {"tp_size": prefill_tp, "dp_size": 1},
        "decode": {"tp_size": decode_tp, "dp_size": 1},
    }
    config = engine_config(dense_model, tp, kv_role=role, kv_connector_extra_config=extra)
    parsed = parse_config(config.kv_transfer_config.kv_connector_extra_config)
    assert parsed.prefill == PeerParallel(tp_size=prefill_tp, dp_size=1)
    assert parsed.decode == PeerParallel(tp_size=decode_tp, dp_size=1)
    suffix = config.kv_transfer_config.engine_id.removeprefix("an-engine-")
    assert len(suffix) == 32, f"the platform makes another engine id: {config.kv_transfer_config.engine_id}"


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_sizes_may_be_left_out(plugins: None, dense_model: Path, role: str, tp: int) -> None:
    config = engine_config(dense_model, tp, kv_role=role)
    assert parse_config(config.kv_transfer_config.kv_connector_extra_config) == ConnectorConfig()


def test_vllm_ascend_refuses_declared_sizes_that_do_not_divide(plugins: None, dense_model: Path) -> None:
    """Why they must be left out where prefill's TP is smaller than decode's."""
    extra = {"prefill": {"tp_size": 1}, "decode": {"tp_size": 2}}
    with pytest.raises(Exception, match="Prefill TP size must be divisible by Decode TP size"):
        engine_config(dense_model, 1, kv_connector_extra_config=extra)


def test_vllm_ascend_refuses_sizes_that_are_not_the_engines(plugins: None, dense_model: Path) -> None:
    extra = {"prefill": {"tp_size": 2}, "decode": {"tp_size": 1}}
    with pytest.raises(Exception, match="conflicting tensor parallel size"):
        engine_config(dense_model, 1, kv_connector_extra_config=extra)


def constants(module: str, method: str, receiver: str | None = None) -> set[str]:
    """The first arguments of all calls `x.method("...")` in a module's source, `x` being named `receiver` if given."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    return {
        str(call.args[0].value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == method
        and (receiver is None or (isinstance(call.func.value, ast.Name) and call.func.value.id == receiver))
        and call.args
        and isinstance(call.args[0], ast.Constant)
    }


LAYERWISE = "vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_layerwise_connector"


def test_every_key_vllm_ascend_reads_is_one_of_ours() -> None:
    read = {
        key
        for module in ("vllm_ascend.ascend_config", "vllm_ascend.utils", LAYERWISE)
        for key in constants(module, "get_from_extra_config")
    }
    assert read == {"prefill", "decode", "tls_config"}, "vllm-ascend reads other keys of kv_connector_extra_config"
    assert read <= set(ConnectorConfig.__struct_fields__)


TLS_KEYS = {"ssl_enable", "ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "ssl_ca_certs"}


def test_keys_of_vllm_ascends_tls_config() -> None:
    assert constants(LAYERWISE, "get", "tls_config") == TLS_KEYS, "vllm-ascend's tls_config has other keys"


def test_our_tls_config_has_vllm_ascends_keys() -> None:
    assert set(TlsConfig.__struct_fields__) >= TLS_KEYS


def test_a_cache_in_nz_order_is_refused(plugins: None, mla_model: Path) -> None:
    """It looks like any other from outside: what prefill writes into it would be read as something else."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm_ascend.ascend_config import get_ascend_config

    config = engine_config(mla_model, kv_role="kv_consumer", additional_config={"enable_kv_nz": True})
    assert get_ascend_config().enable_kv_nz
    with pytest.raises(ConfigError, match="enable_kv_nz"):
        connector_class()(config, KVConnectorRole.SCHEDULER, cache_config()).shutdown()


# --- the ticket on the wire -------------------------------------------------------------------------------

REQUEST_ID = "cmpl-5b1e0c2e4d3f4f0f8f5a7c9d1e2f3a4b-0-1a2b3c4d"
OUR_FIELDS = {"ticket_id", "attempt", "num_tokens"}


@pytest.fixture
def posted() -> dict[str, Any]:
    """URL and body of what vllm-ascend's decode side posts for a request of 300 tokens, 128 of them cached."""
    layerwise = importlib.import_module(LAYERWISE)
    scheduler = object.__new__(layerwise.MooncakeLayerwiseConnectorScheduler)
    sent: list[dict[str, Any]] = []

    def submit(call: Callable[..., None], **kwargs: Any) -> Future[None]:
        call(**kwargs)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    vars(scheduler).update(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=2, prefill_context_parallel_size=1, decode_context_parallel_size=1
            )
        ),
        block_size=[BLOCK],
        engine_id="decode",
        side_channel_host="192.0.2.1",
        side_channel_port=20001,
        need_truncate=False,
        _reqs_need_recv={},
        _reqs_need_send_layerwise={},
        executor=SimpleNamespace(submit=submit),
        metaserver_client=SimpleNamespace(post=lambda url, json: sent.append({"url": url, "json": json})),
    )
    request = SimpleNamespace(
        request_id=REQUEST_ID,
        prompt_token_ids=list(range(300)),
        num_computed_tokens=128,
        kv_transfer_params={"do_remote_prefill": True, "metaserver": "http://192.0.2.2:9000/v1/metaserver"},
    )
    blocks = SimpleNamespace(get_block_ids=lambda: ([5, 6, 7],))
    scheduler.update_state_after_alloc(request, blocks, 172)
    assert len(sent) == 1, "vllm-ascend's decode side no longer posts one ticket per request"
    return sent[0]


def test_our_ticket_has_the_fields_of_vllm_ascends(posted: dict[str, Any]) -> None:
    theirs = set(posted["json"])
    ours = set(Ticket.__struct_fields__)
    assert theirs == ours - OUR_FIELDS, "vllm-ascend's ticket has other fields"


def test_their_ticket_means_what_ours_does(posted: dict[str, Any]) -> None:
    from vllm_ascend_pd import compat

    assert posted["url"] == "http://192.0.2.2:9000/v1/metaserver", "the ticket goes elsewhere than the request says"
    body = json.loads(json.dumps(posted["json"]))
    ticket = parse_ticket({**body, "ticket_id": 32 * "0", "attempt": 0, "num_tokens": 300}, 300, 1)
    assert ticket.request_id == compat.external_request_id(REQUEST_ID), "another id for the proxy"
    assert (ticket.do_remote_prefill, ticket.do_remote_decode) == (False, True)
    assert (ticket.remote_block_ids, ticket.remote_block_size) == ([[5, 6, 7]], [BLOCK])
    assert (ticket.remote_engine_id, ticket.remote_host, ticket.remote_port) == ("decode", "192.0.2.1", 20001)
    assert (ticket.remote_tp_size, ticket.remote_cached_tokens) == (2, 128)
    assert ticket.token_ids == []


def test_our_ticket_is_understood_by_their_prefill_side() -> None:
    layerwise = importlib.import_module(LAYERWISE)
    ticket = Ticket(
        request_id="cmpl-1-0",
        remote_block_ids=[[5, 6, 7]],
        remote_block_size=[BLOCK],
        remote_engine_id="decode",
        remote_host="192.0.2.1",
        remote_port=20001,
        remote_tp_size=2,
        remote_cached_tokens=128,
        ticket_id=32 * "0",
        num_tokens=300,
    )
    step = layerwise.MooncakeLayerwiseConnectorMetadata()
    step.add_new_req(REQUEST_ID, [[1, 2, 3]], msgspec.to_builtins(ticket))
    read = dataclasses.asdict(step.requests[REQUEST_ID])
    shared = {name for name in Ticket.__struct_fields__ if name.startswith("remote_")} - {"remote_cached_tokens"}
    assert {name: read[name] for name in shared} == {name: getattr(ticket, name) for name in shared}


# --- MultiConnector ---------------------------------------------------------------------------------------


def cache_config() -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=32, dtype=torch.float32)
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def test_multi_connector_hands_on_every_hook_of_ours(plugins: None) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector

    asked = {name for name in our_hooks() if hasattr(KVConnectorBase_V1, name) or hasattr(SupportsHMA, name)}
    left_out = {
        name
        for name in asked
        if getattr(AscendMultiConnector, name) in (getattr(c, name, None) for c in (KVConnectorBase_V1, SupportsHMA))
    }
    assert left_out == set(), f"MultiConnector answers {left_out} itself, our class is never asked"


@pytest.fixture
def multi(plugins: None, dense_model: Path) -> Iterator[Any]:
    """vllm-ascend's MultiConnector on a prefill engine's scheduler with ours as its only child."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    child = {"kv_connector": OURS, "kv_role": "kv_producer", "kv_port": 20001, "kv_connector_extra_config": {}}
    config = engine_config(
        dense_model, kv_connector="MultiConnector", kv_connector_extra_config={"connectors": [child]}
    )
    connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache_config())
    yield connector
    connector.shutdown()


def test_ours_as_a_child_of_multi_connector(multi: Any) -> None:
    """A child that loads nothing is told of no blocks: they must be taken from the step that computes them."""
    from vllm_ascend.distributed.kv_transfer.ascend_multi_connector import AscendMultiConnector

    assert type(multi) is AscendMultiConnector
    [child] = multi._connectors
    assert type(child) is connector_class()
    assert multi.requires_piecewise_for_cudagraph({"connectors": [{"kv_connector": OURS, "kv_role": "kv_producer"}]})

    prompt, blocks = 300, [5, 6, 7]
    ticket = Ticket(
        request_id="cmpl-1-0",
        remote_block_ids=[[1, 2, 3]],
        remote_block_size=[BLOCK],
        remote_engine_id="decode",
        remote_host="192.0.2.1",
        remote_port=20001,
        remote_tp_size=1,
        remote_cached_tokens=0,
        ticket_id=32 * "0",
        num_tokens=prompt,
    )
    request = SimpleNamespace(
        request_id=REQUEST_ID, num_prompt_tokens=prompt, kv_transfer_params=msgspec.to_builtins(ticket)
    )
    given: list[Any] = []
    allocated = child.update_state_after_alloc
    child.update_state_after_alloc = lambda *args: (given.append(args), allocated(*args))

    def allocation(ids: list[int]) -> Any:
        return SimpleNamespace(get_block_ids=lambda: (ids,), new_empty=lambda: allocation([]))

    assert multi.get_num_new_matched_tokens(request, 0) == (0, False)
    multi.update_state_after_alloc(request, allocation(blocks), 0)
    [(_, seen, external)] = given
    assert (seen.get_block_ids(), external) == (([],), 0), (
        "MultiConnector now hands on the blocks: simplify `allocated`"
    )

    new = SimpleNamespace(req_id=REQUEST_ID, block_ids=(blocks,), num_computed_tokens=0)
    cached = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    step = multi.build_connector_meta(
        SimpleNamespace(
            scheduled_new_reqs=[new],
            scheduled_cached_reqs=cached,
            num_scheduled_tokens={REQUEST_ID: prompt},
            total_num_scheduled_tokens=prompt,
            preempted_req_ids=set(),
        )
    )
    [sent] = step.metadata[0].sends
    assert (sent.start, sent.stop, sent.last, sent.blocks) == (0, prompt, True, (blocks,))
    assert multi.request_finished_all_groups(request, (blocks,)) == (True, None)
