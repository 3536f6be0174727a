# SPDX-License-Identifier: Apache-2.0
"""Plans the changes of one engine's command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vllm_ascend_pd.connector.unsupported import has_recompute_scheduler
from vllm_ascend_pd.core.ascend import ascend_ports
from vllm_ascend_pd.tools.migrate.changes import Change, ChangeKind, Migration
from vllm_ascend_pd.tools.migrate.command import EngineArguments, whole_number
from vllm_ascend_pd.tools.migrate.connectors import translate
from vllm_ascend_pd.tools.migrate.refusal import ModelFacts, read_facts, refusal
from vllm_ascend_pd.tools.plan.layers import BLOCK_SIZES, ModelShape
from vllm_ascend_pd.tools.vllm_names import KV_PORT, PLUGIN, PLUGINS, REPLACES_CONNECTOR, plugins_with_ours

_OPTION = "kv-transfer-config"
_RECOMPUTE = "recompute_scheduler_enable"
_NPUS = 16  # of a server at most
_BELOW = 2000  # more than the ports that Mooncake takes for so many NPUs
_BASE_PORT = "ASCEND_BASE_PORT"
_FIRST_PORT = 1024
_STORE = "AscendStoreConnector"


def migrate_command(old: EngineArguments, model: str | None) -> Migration:
    """Raises CommandError.

    model: folder or file of the model's config.json, None for where the command says.
    """
    served = read_facts(model or old.model, old.text("kv-cache-dtype"))
    translated = translate(old.json(_OPTION))
    changes = list(translated.changes)
    arguments, ours, config = old, translated.ours, translated.ours
    if ours:
        if not old.is_json(_OPTION):
            why = "was no valid JSON, perhaps for a comma too many: the new one is"
            changes.append(Change(ChangeKind.CHANGED, f"--{_OPTION}", why))
        changes += [*_of_words(old), *_of_model(served), *_compressed(old, served), *_int8_caches(old, served)]
        arguments = _external_engines(arguments, served, changes)
        arguments = _too_few_tokens(arguments, changes)
        arguments = _states(arguments, served.shape, translated.was, changes)
        ours = _clear_of_mooncake(ours, arguments, changes)
        arguments, entry = _accepted(arguments, ours, served, changes)
        config = translated.whole(entry)
        arguments = arguments.with_json(_OPTION, config)
        if (plugins := plugins_with_ours(old.environment)) is not None:
            why = f"{plugins}: vLLM loads no other plugins, and {PLUGIN} brings the connector"
            changes.append(Change(ChangeKind.CHANGED, PLUGINS, why))
            arguments = arguments.with_variable(PLUGINS, plugins)
    return Migration(
        ok=all(change.kind is not ChangeKind.STOPS for change in changes),
        role=str(ours.get("kv_role") or ""),
        model=old.model,
        was=translated.was,
        kv_transfer_config=config,
        command=arguments.words() if ours else [],
        environment=dict(arguments.assigned),
        changes=tuple(changes),
    )


def _of_words(arguments: EngineArguments) -> list[Change]:
    """Returns what the words and options themselves need, whatever the connector."""
    found = []
    if REPLACES_CONNECTOR in arguments.names:
        why = (
            "vLLM would replace this connector by OffloadingConnector without a word. Leave it out. To offload, too, "
            "list both connectors in a MultiConnector"
        )
        found.append(Change(ChangeKind.STOPS, f"--{REPLACES_CONNECTOR}", why))
    if "config" in arguments.names:
        why = "names a file with more options, which this command does not read: see that none of them contradicts"
        found.append(Change(ChangeKind.CHECK, "--config", why))
    return found


def _of_model(served: ModelFacts) -> list[Change]:
    changes = []
    if served.unsaid:
        changes.append(Change(ChangeKind.CHECK, "model", f"{served.problem}. Nothing here is checked against it"))
    elif served.problem is not None:
        changes.append(Change(ChangeKind.STOPS, "model", served.problem))
    if served.compressed:
        why = (
            "of engines with its compressed caches, only vLLM's on a CPU has run with this connector yet: compare some "
            "answers first"
        )
        changes.append(Change(ChangeKind.CHECK, "model", why))
    return changes


def _int8_caches(arguments: EngineArguments, served: ModelFacts) -> list[Change]:
    """Caches that decode keeps in int8 are refused with context parallelism."""
    names = [f"{which}-context-parallel-size" for which in ("prefill", "decode")]
    if not served.int8_caches:
        return []
    why = "context parallelism is not supported where decode keeps caches in int8 (C8, FAKQuant)"
    return [Change(ChangeKind.STOPS, f"--{name}", why) for name in names if arguments.number(name, 1) > 1]


def _compressed(arguments: EngineArguments, served: ModelFacts) -> list[Change]:
    """DeepSeek V4's caches of one entry for several tokens are refused with some settings."""
    if not served.compressed:
        return []
    changes = []
    if arguments.number("decode-context-parallel-size", 1) > 1:
        why = "vLLM has no decode context parallelism for windows, which this model has"
        changes.append(Change(ChangeKind.STOPS, "--decode-context-parallel-size", why))
    if arguments.number("prefill-context-parallel-size", 1) > 1:
        why = "needs vllm-ascend 0.30: 0.23 has no prefill context parallelism for this model"
        changes.append(Change(ChangeKind.CHECK, "--prefill-context-parallel-size", why))
    if (size := arguments.number("block-size", 128)) not in BLOCK_SIZES:
        why = f"is {size}: the compressed caches need {', '.join(map(str, BLOCK_SIZES))}"
        changes.append(Change(ChangeKind.STOPS, "--block-size", why))
    return changes


def _external_engines(arguments: EngineArguments, served: ModelFacts, changes: list[Change]) -> EngineArguments:
    """vLLM refuses --data-parallel-rank for models without experts, whose data-parallel engines share nothing."""
    names = [name for name in arguments.names if name.startswith("data-parallel-")]
    if served.experts or "data-parallel-rank" not in names:
        return arguments
    why = "left out: vLLM refuses --data-parallel-rank for models without experts. Each rank is an engine of its own"
    changes.append(Change(ChangeKind.CHANGED, "--data-parallel-*", f"{why}, with its own kv_port"))
    return arguments.without(*names)


def _clear_of_mooncake(ours: dict[str, Any], arguments: EngineArguments, changes: list[Change]) -> dict[str, Any]:
    """Decode's ports must be none of those among which Mooncake chooses on NPUs."""
    if ours.get("kv_role") != "kv_consumer":
        return ours
    port, engines = ours.get("kv_port", KV_PORT), arguments.number("data-parallel-size", 1)
    base = arguments.environment.get(_BASE_PORT, "20000")
    if not isinstance(port, int) or not _FIRST_PORT <= port <= 65536 - engines:
        changes.append(
            Change(ChangeKind.STOPS, "kv_port", f"is {port!r}: decode needs {engines} free ports from there")
        )
        return ours
    if not re.fullmatch("[0-9]{1,5}", base) or not 0 < int(base) < 65536:
        changes.append(Change(ChangeKind.STOPS, _BASE_PORT, f"is {base!r}: no port"))
        return ours
    theirs = ascend_ports(range(_NPUS), arguments.environment).values()
    if not any(each in ports for ports in theirs for each in range(port, port + engines)):
        return ours
    moved, why = port - _BELOW, f"{port} is one of the ports among which Mooncake chooses on NPUs"
    if moved < _FIRST_PORT:
        why += f" ({_BASE_PORT} is {base}), and there is no room below them. Choose other ports"
        changes.append(Change(ChangeKind.STOPS, "kv_port", why))
        return ours
    changes.append(Change(ChangeKind.CHANGED, "kv_port", f"{moved}: {why}"))
    return {**ours, "kv_port": moved}


def _too_few_tokens(arguments: EngineArguments, changes: list[Change]) -> EngineArguments:
    """vLLM refuses steps of fewer tokens than requests."""
    requests = arguments.number("max-num-seqs", 1)
    if arguments.number("max-num-batched-tokens", requests) >= requests:
        return arguments
    tokens = requests * (1 + (whole_number(str(arguments.speculation.get("num_speculative_tokens"))) or 0))
    why = f"{tokens}: vLLM refuses fewer than --max-num-seqs, and each request may have its drafts in a step"
    changes.append(Change(ChangeKind.CHANGED, "--max-num-batched-tokens", why))
    return arguments.with_option("max-num-batched-tokens", "--max-num-batched-tokens", str(tokens))


def _states(
    arguments: EngineArguments, model: ModelShape | None, connectors: Sequence[str], changes: list[Change]
) -> EngineArguments:
    """Says what this connector does not do with states of Mamba and linear attention. `connectors`: the old ones."""
    if model is None or not model.has_states:
        return arguments
    if _STORE in connectors:
        why = (
            "with it vllm-ascend caches states of linear attention even without prefix caching, and a pool that loads "
            "states has not run beside this connector. Leave the pool out of the MultiConnector on both sides"
        )
        changes.append(Change(ChangeKind.STOPS, _STORE, why))
    if arguments.text("mamba-cache-mode") == "all":
        arguments = arguments.with_option("mamba-cache-mode", "--mamba-cache-mode", "align")
        why = "align: this connector sends no states that are cached in mode all"
        changes.append(Change(ChangeKind.CHANGED, "--mamba-cache-mode", why))
    return arguments


def _accepted(
    arguments: EngineArguments, ours: dict[str, Any], served: ModelFacts, changes: list[Change]
) -> tuple[EngineArguments, dict[str, Any]]:
    """Makes the least change that the connector does not refuse, or says why it refuses."""
    never = {
        **ours,
        "kv_connector_extra_config": {**ours.get("kv_connector_extra_config", {}), "who_computes": "never"},
    }
    why = "the command's settings are for decode engines that compute no prompts: preempted requests go back to prefill"
    promised = [Change(ChangeKind.CHANGED, "who_computes", why)]
    for changed, graphs in ((arguments, []), _piecewise(arguments)):
        for entry, said in ((ours, _recompute(arguments, ours)), (never, promised)):
            if refusal(changed, entry, served) is None:
                changes += [*graphs, *said]
                return changed, entry
    changes.append(Change(ChangeKind.STOPS, "the engine's settings", refusal(arguments, ours, served) or ""))
    return arguments, ours


def _recompute(arguments: EngineArguments, ours: dict[str, Any]) -> list[Change]:
    """Says what vllm-ascend's recompute scheduler does with this connector, if decode has it."""
    if ours.get("kv_role") != "kv_consumer" or not has_recompute_scheduler(arguments.json("additional-config")):
        return []
    why = (
        "stays: preempted requests go back to prefill and their streams go on, instead of ending for the proxy to retry"
    )
    return [Change(ChangeKind.MEANING, _RECOMPUTE, why)]


def _piecewise(arguments: EngineArguments) -> tuple[EngineArguments, list[Change]]:
    """Returns the command without full graphs, which the connector refuses with decode context parallelism."""
    compilation = {**arguments.json("compilation-config"), "cudagraph_mode": "PIECEWISE"}
    why = "PIECEWISE: a request's first step would be replayed from a graph that does not see its KV. Slower"
    return arguments.with_json("compilation-config", compilation), [Change(ChangeKind.CHANGED, "cudagraph_mode", why)]
