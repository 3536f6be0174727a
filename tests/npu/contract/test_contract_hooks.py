# SPDX-License-Identifier: Apache-2.0
"""Which hooks vllm-ascend calls, when, and with what."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_ascend_contract import BLOCK, Event, computes, only, statements_after, worker_steps

import offline_hooks

pytestmark = pytest.mark.npu


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


def test_a_layer_is_written_when_vllm_ascend_says_so(prefill_events: tuple[Event, ...]) -> None:
    """An event recorded in `on_kv_cache_written` comes after the writing of the next layer's cache, all of it."""
    for step in worker_steps(prefill_events):
        told = [event for event in step if event["hook"] in ("on_kv_cache_written", "save_kv_layer")]
        assert [event["hook"] for event in told[::2]] == ["on_kv_cache_written"] * (len(told) // 2)
        for written, saved in zip(told[::2], told[1::2], strict=True):
            assert saved["hook"] == "save_kv_layer", "a layer is written twice, or is not saved"
            assert written["layer"] in ("", saved["layer"]), "what is written is not the layer that is saved next"
            assert written["stream"] == saved["stream"], "on_kv_cache_written comes on another stream"
            assert all(written["written"]), f"{saved['layer']}: not all of it is written when vllm-ascend says so"


@pytest.mark.emulated
def test_attention_comes_between_writing_and_saving(prefill_events: tuple[Event, ...]) -> None:
    """Why an event recorded when the cache is written is worth having."""
    for step in worker_steps(prefill_events):
        told = [event for event in step if event["hook"] in ("on_kv_cache_written", "save_kv_layer")]
        for written, saved in zip(told[::2], told[1::2], strict=True):
            assert saved["launches"] > written["launches"], "no operator runs after the cache is written"


def test_the_event_in_attention_metadata_is_recorded_where_the_hook_is_called() -> None:
    """`reshape_cache_event`, which only sparse attention records, says nothing that the hook does not."""
    recorded = statements_after("vllm_ascend.attention.sfa_v1", "attn_metadata.reshape_cache_event.record()")
    assert recorded == ["notify_kv_cache_written(self.layer_name or '')"], "recorded elsewhere: use it"
    for module in ("attention_v1", "mla_v1", "dsa_v1"):
        found = statements_after(f"vllm_ascend.attention.{module}", "attn_metadata.reshape_cache_event.record()")
        assert found == [], f"{module} records reshape_cache_event now: see whether it is earlier than the hook"


def test_deepseek_v4_announces_a_layer_when_all_its_caches_are_written() -> None:
    """Under the name of its attention, beside which the caches are named (`connector/caches.py`)."""
    save = "maybe_save_kv_layer_to_connector(layer_name, list(kv_cache))"
    assert statements_after("vllm_ascend.attention.dsa_v1", save) == ["return output_padded"]
    for module, prefixes in {
        "ops/dsa": ("{prefix}.attn",),
        "models/deepseek_v4": ("{prefix}.swa_cache", "{prefix}.compressor", "{prefix}.indexer"),
    }.items():
        spec = find_spec("vllm_ascend")
        assert spec is not None
        assert spec.origin is not None
        source = (Path(spec.origin).parent / f"{module}.py").read_text()
        for prefix in prefixes:
            assert f'prefix=f"{prefix}"' in source, "its caches have other names: see caches_of_layers"


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
