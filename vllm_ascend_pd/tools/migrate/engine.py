# SPDX-License-Identifier: Apache-2.0
"""Plans the changes of one engine's command, from its words and from what the model's files say.

The connector's own checks tell whether it would refuse the engine.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vllm_ascend_pd.connector.model import unsupported, unsupported_weights
from vllm_ascend_pd.core.hosts import authority
from vllm_ascend_pd.tools.doctor.configuration import DEFAULT_KV_PORT
from vllm_ascend_pd.tools.doctor.machine import ascend_ports
from vllm_ascend_pd.tools.migrate.arguments import EngineArguments
from vllm_ascend_pd.tools.migrate.connectors import translate
from vllm_ascend_pd.tools.migrate.result import Change, ChangeKind, EngineMigration
from vllm_ascend_pd.tools.plan.model import BLOCK_SIZES, Cached, CacheDtype, ModelShape, PlanError, read_model
from vllm_ascend_pd.tools.vllm_serve import PLUGIN, PLUGINS, REPLACES_CONNECTOR, plugins_with_ours, whole_number

_QUANTIZATION = "quant_model_description.json"  # ModelSlim's, as vllm-ascend reads it

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")


@dataclass(frozen=True)
class ModelFacts:
    shape: ModelShape | None  # None if it cannot be described
    problem: str | None = None  # why not, if that means that the engine may be refused
    int8_caches: str | None = None  # the setting by which vllm-ascend keeps decode's caches in int8
    experts: bool = True  # whether it has experts (MoE)
    media: bool = False  # whether it takes images

    @property
    def compressed(self) -> bool:
        """Whether its caches have one entry for several tokens."""
        return self.shape is not None and bool(self.shape.compressed)


def read_facts(path: str, kv_cache_dtype: str | None) -> ModelFacts:
    """`path`: a folder with config.json, or that file. `kv_cache_dtype`: of the engine."""
    given = Path(path)
    folder = given if given.is_dir() else given.parent
    shape, problem = None, None
    try:
        shape = read_model(given, _dtype(kv_cache_dtype))
    except OSError:
        return ModelFacts(None, f"there is no config.json at {path!r} on this host: give --model FOLDER")
    except PlanError as error:
        problem = str(error)
    try:
        config = json.loads((given / "config.json" if given.is_dir() else given).read_text(encoding="utf-8"))
    except ValueError:
        return ModelFacts(None, problem)
    text = config.get("text_config") or config
    experts = any(isinstance(text.get(field), int) and text[field] > 1 for field in _EXPERTS)
    int8 = _int8_caches(folder / _QUANTIZATION)
    return ModelFacts(shape, problem, int8, experts, "vision_config" in config)


def _dtype(name: str | None) -> CacheDtype:
    if name is None:
        return CacheDtype.AUTO
    if name.startswith("fp8"):
        return CacheDtype.FP8
    try:
        return CacheDtype(name)
    except ValueError:
        raise PlanError(f"--kv-cache-dtype {name}: not known to this command") from None


def _int8_caches(file: Path) -> str | None:
    """vllm-ascend: `quantization/modelslim_config.py`."""
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    names = [name for name in ("fa_quant_type", "kv_cache_type") if described.get(name)]
    return f"{names[0]} {described[names[0]]} in {file.name}" if names else None


_OPTION = "kv-transfer-config"
_DEFAULT_PORT = 8000  # vLLM's
_RECOMPUTE = "recompute_scheduler_enable"
_NPUS = 16  # of a server at most
_BELOW = 2000  # more than the ports that Mooncake takes for so many NPUs
_BASE_PORT = "ASCEND_BASE_PORT"
_FIRST_PORT = 1024
_STORE = "AscendStoreConnector"

_ENVIRONMENT_LEFT_OUT = {
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "only Mooncake's pulling connectors read it; here KV is pushed under leases",
    "VLLM_USE_V1": "vLLM 0.23 has nothing else and does not read it",
}


def migrate_engine(old: EngineArguments, served: ModelFacts, proxy_url: str | None) -> EngineMigration:
    """Returns the new command of an engine. `proxy_url`: where decode engines reach the proxy. Raises MigrateError."""
    translated = translate(old.json(_OPTION), proxy_url)
    changes = list(translated.changes)
    arguments, config = old, translated.config
    if config:
        if not old.is_json(_OPTION):
            why = "was no valid JSON, perhaps for a comma too many: the new one is"
            changes.append(Change(ChangeKind.CHANGED, f"--{_OPTION}", why))
        ours = _own_entry(config)
        changes += [*_of_words(old), *_of_model(served), *_compressed(old, served)]
        arguments, apart = _external_engines(arguments, served)
        changes += apart
        arguments, raised = _too_few_tokens(arguments)
        changes += raised
        arguments, stated = _states(arguments, served.shape, translated.was)
        changes += stated
        ours, moved = _clear_of_mooncake(ours, arguments)
        changes += moved
        arguments, changed, said = _accepted(arguments, ours, served.shape)
        changes += said
        config = _with_own_entry(config, changed)
        arguments = arguments.with_json(_OPTION, config)
        if (plugins := plugins_with_ours(old.environment)) is not None:
            why = f"{plugins}: vLLM loads no other plugins, and {PLUGIN} brings the connector"
            changes.append(Change(ChangeKind.CHANGED, PLUGINS, why))
            arguments = arguments.with_variable(PLUGINS, plugins)
    for name, why in _ENVIRONMENT_LEFT_OUT.items():
        if config and name in old.environment:
            changes.append(Change(ChangeKind.LEFT_OUT, name, why))
    return EngineMigration(
        role=str(_own_entry(config).get("kv_role") or "") if config else "",
        model=old.model,
        was=translated.was,
        kv_transfer_config=config,
        command=arguments.words() if config else [],
        environment=dict(arguments.assigned),
        url=_url(old),
        changes=tuple(changes),
    )


def _own_entry(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this connector's entry of a new configuration."""
    listed = (config.get("kv_connector_extra_config") or {}).get("connectors")
    if listed is None:
        return dict(config)
    return next(dict(entry) for entry in listed if entry["kv_connector"] == "LayerwisePushConnector")


def _with_own_entry(config: Mapping[str, Any], entry: dict[str, Any]) -> dict[str, Any]:
    extra = dict(config.get("kv_connector_extra_config") or {})
    if "connectors" not in extra:
        return entry
    listed = [entry if each["kv_connector"] == entry["kv_connector"] else each for each in extra["connectors"]]
    return {**config, "kv_connector_extra_config": {**extra, "connectors": listed}}


def _of_words(arguments: EngineArguments) -> list[Change]:
    """Returns what the words and options themselves need, whatever the connector."""
    found = []
    if unknown := arguments.unknown:
        kind, where = ChangeKind.CHECK, "this command's table of vLLM 0.23 and 0.32"
        if arguments.options.of_installed_vllm:
            kind, where = ChangeKind.STOPS, "the installed vLLM"
        found.append(Change(kind, shlex.join(unknown)[:300], f"is not known to {where}. It stays as it is"))
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
    if served.problem is not None:
        changes.append(Change(ChangeKind.STOPS, "model", served.problem))
    if served.compressed:
        why = (
            "of engines with its compressed caches, only vLLM's on a CPU has run with this connector yet: compare some "
            "answers first"
        )
        changes.append(Change(ChangeKind.CHECK, "model", why))
    if served.int8_caches is not None:
        why = (
            f"{served.int8_caches}: only decode keeps these caches in int8, and prefill quantizes nothing, so the "
            "sides do not fit. Serve the checkpoint without it"
        )
        changes.append(Change(ChangeKind.STOPS, "int8 caches", why))
    return changes


def _compressed(arguments: EngineArguments, served: ModelFacts) -> list[Change]:
    """DeepSeek V4's caches of one entry for several tokens are refused with some settings."""
    if not served.compressed:
        return []
    changes = []
    if arguments.number("decode-context-parallel-size", 1) > 1:
        why = "with context parallelism the compressed caches are refused: ranks hold copies, not shares"
        changes.append(Change(ChangeKind.STOPS, "--decode-context-parallel-size", why))
    if (size := arguments.number("block-size", 128)) not in BLOCK_SIZES:
        why = f"is {size}: the compressed caches need {', '.join(map(str, BLOCK_SIZES))}"
        changes.append(Change(ChangeKind.STOPS, "--block-size", why))
    return changes


def _external_engines(arguments: EngineArguments, served: ModelFacts) -> tuple[EngineArguments, list[Change]]:
    """vLLM refuses --data-parallel-rank for models without experts, whose data-parallel engines share nothing."""
    names = [name for name in arguments.names if name.startswith("data-parallel-")]
    if served.experts or "data-parallel-rank" not in names:
        return arguments, []
    why = "left out: vLLM refuses --data-parallel-rank for models without experts. Each rank is an engine of its own"
    return arguments.without(*names), [Change(ChangeKind.CHANGED, "--data-parallel-*", f"{why}, with its own kv_port")]


def _clear_of_mooncake(ours: dict[str, Any], arguments: EngineArguments) -> tuple[dict[str, Any], list[Change]]:
    """Decode's ports must be none of those among which Mooncake chooses on NPUs."""
    if ours.get("kv_role") != "kv_consumer":
        return ours, []
    port, engines = ours.get("kv_port", DEFAULT_KV_PORT), arguments.number("data-parallel-size", 1)
    base = arguments.environment.get(_BASE_PORT, "20000")
    if not isinstance(port, int) or not _FIRST_PORT <= port <= 65536 - engines:
        return ours, [Change(ChangeKind.STOPS, "kv_port", f"is {port!r}: decode needs {engines} free ports from there")]
    if not re.fullmatch("[0-9]{1,5}", base) or not 0 < int(base) < 65536:
        return ours, [Change(ChangeKind.STOPS, _BASE_PORT, f"is {base!r}: no port")]
    theirs = ascend_ports(range(_NPUS), arguments.environment).values()
    if not any(each in ports for ports in theirs for each in range(port, port + engines)):
        return ours, []
    moved, why = port - _BELOW, f"{port} is one of the ports among which Mooncake chooses on NPUs"
    if moved < _FIRST_PORT:
        why += f" ({_BASE_PORT} is {base}), and there is no room below them. Choose other ports"
        return ours, [Change(ChangeKind.STOPS, "kv_port", why)]
    return {**ours, "kv_port": moved}, [Change(ChangeKind.CHANGED, "kv_port", f"{moved}: {why}")]


def _too_few_tokens(arguments: EngineArguments) -> tuple[EngineArguments, list[Change]]:
    """vLLM refuses steps of fewer tokens than requests."""
    requests = arguments.number("max-num-seqs", 1)
    if arguments.number("max-num-batched-tokens", requests) >= requests:
        return arguments, []
    tokens = requests * (1 + (whole_number(str(arguments.speculation.get("num_speculative_tokens"))) or 0))
    why = f"{tokens}: vLLM refuses fewer than --max-num-seqs, and each request may have its drafts in a step"
    changed = arguments.with_option("max-num-batched-tokens", "--max-num-batched-tokens", str(tokens))
    return changed, [Change(ChangeKind.CHANGED, "--max-num-batched-tokens", why)]


def _states(
    arguments: EngineArguments, model: ModelShape | None, connectors: Sequence[str]
) -> tuple[EngineArguments, list[Change]]:
    """States of Mamba and linear attention have no prefix cache here. `connectors`: the old ones."""
    if model is None or Cached.STATE not in model.cached:
        return arguments, []
    changes = []
    if _STORE in connectors:
        why = (
            "with it vllm-ascend keeps states of linear attention in mamba_cache_mode align, even without prefix "
            "caching, and this connector refuses that. Leave the pool out of the MultiConnector on both sides"
        )
        changes.append(Change(ChangeKind.STOPS, _STORE, why))
    if arguments.switch("enable-prefix-caching") is not False:
        why = "states of linear attention have no prefix cache here: every prompt is computed as a whole"
        changes.append(Change(ChangeKind.MEANING, "--enable-prefix-caching", why))
        arguments = arguments.with_option("enable-prefix-caching", "--no-enable-prefix-caching")
    if arguments.text("mamba-cache-mode") not in (None, "none"):
        changes.append(Change(ChangeKind.LEFT_OUT, "--mamba-cache-mode", "it is for prefix caching"))
        arguments = arguments.without("mamba-cache-mode")
    return arguments, changes


def _accepted(
    arguments: EngineArguments, ours: dict[str, Any], model: ModelShape | None
) -> tuple[EngineArguments, dict[str, Any], list[Change]]:
    """Returns the least change that the connector does not refuse, or the refusal."""
    never = {
        **ours,
        "kv_connector_extra_config": {**ours.get("kv_connector_extra_config", {}), "who_computes": "never"},
    }
    why = "the command's settings are for decode engines that compute no prompts: preempted requests go back to prefill"
    promised = [Change(ChangeKind.CHANGED, "who_computes", why)]
    for changed, graphs in ((arguments, []), _piecewise(arguments)):
        for entry, said in ((ours, _recompute(arguments, ours)), (never, promised)):
            if refusal(changed, entry, model) is None:
                return changed, entry, [*graphs, *said]
    return arguments, ours, [Change(ChangeKind.STOPS, "the engine's settings", refusal(arguments, ours, model) or "")]


def _recompute(arguments: EngineArguments, ours: dict[str, Any]) -> list[Change]:
    """Says what vllm-ascend's recompute scheduler does with this connector, if decode has it."""
    if ours.get("kv_role") != "kv_consumer" or not arguments.json("additional-config").get(_RECOMPUTE):
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


def _url(arguments: EngineArguments) -> str:
    host = arguments.text("host") or "HOST"
    port = arguments.number("port", _DEFAULT_PORT)
    return f"http://{authority('HOST' if host in ('0.0.0.0', '::') else host, port)}"


MLAPO_TOKENS = 1024
"""vllm-ascend's MLAPO_MAX_SUPPORTED_TOKENS (`attention/mla_v1.py`)."""


class _Graphs:
    """Stands for vLLM's CUDAGraphMode."""

    def __init__(self, name: str) -> None:
        self.name = name

    def has_full_cudagraphs(self) -> bool:
        return self.name.startswith("FULL")


def refusal(arguments: EngineArguments, ours: Mapping[str, Any], model: ModelShape | None) -> str | None:
    """Returns why an engine with these arguments would be refused; None if it would not be.

    ours: this connector's entry of `--kv-transfer-config`.
    model: the model's shape, None if unknown.
    """
    config = _vllm_config(arguments, ours)
    if (reason := unsupported(config)) is not None:
        return reason
    if ours.get("kv_role") == "kv_consumer" and model is not None and _drops_prefill_weights(arguments, model):
        dropped = SimpleNamespace(impl=SimpleNamespace(fused_qkv_a_proj=SimpleNamespace(weight=None)))
        config.compilation_config.static_forward_context = {"attention (W8A8)": dropped}
        return unsupported_weights(config)
    return None


def _drops_prefill_weights(arguments: EngineArguments, model: ModelShape) -> bool:
    """Whether vllm-ascend's MLAPO may drop the weights that MLA needs for prompts, on a decode engine.

    It does so for layers in W8A8, which only the checkpoint's files tell.
    """
    mlapo = arguments.json("additional-config").get("enable_mlapo")
    if mlapo is None:
        mlapo = arguments.environment.get("VLLM_ASCEND_ENABLE_MLAPO", "1") != "0"
    tokens = arguments.number("max-num-batched-tokens", MLAPO_TOKENS + 1)
    dense_mla = model.mla and len(model.widths) == 2
    return bool(mlapo) and dense_mla and arguments.text("quantization") == "ascend" and tokens <= MLAPO_TOKENS


def _vllm_config(arguments: EngineArguments, ours: Mapping[str, Any]) -> SimpleNamespace:
    graphs = "NONE" if arguments.switch("enforce-eager") else "PIECEWISE"
    graphs = str(arguments.json("compilation-config").get("cudagraph_mode") or graphs).upper()
    consumer = ours.get("kv_role") == "kv_consumer"
    return SimpleNamespace(
        additional_config=arguments.json("additional-config"),
        model_config=SimpleNamespace(
            enable_sleep_mode=bool(arguments.switch("enable-sleep-mode")),
            enable_return_routed_experts=bool(arguments.switch("enable-return-routed-experts")),
            enforce_eager=bool(arguments.switch("enforce-eager")),
        ),
        cache_config=SimpleNamespace(
            cache_dtype=arguments.text("kv-cache-dtype") or "auto",
            calculate_kv_scales=bool(arguments.switch("calculate-kv-scales")),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=arguments.number("tensor-parallel-size", 1),
            data_parallel_size=arguments.number("data-parallel-size", 1),
            prefill_context_parallel_size=arguments.number("prefill-context-parallel-size", 1),
            decode_context_parallel_size=arguments.number("decode-context-parallel-size", 1),
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=arguments.number("max-num-batched-tokens", 2048)),
        compilation_config=SimpleNamespace(cudagraph_mode=_Graphs(graphs), static_forward_context={}),
        speculative_config=arguments.speculation or None,
        kv_transfer_config=SimpleNamespace(
            kv_role=ours.get("kv_role"),
            is_kv_consumer=consumer,
            is_kv_producer=not consumer,
            kv_connector_extra_config=ours.get("kv_connector_extra_config") or {},
        ),
    )
