# SPDX-License-Identifier: Apache-2.0
"""Turns what is given to `vllm-ascend-pd migrate` into its result: for one engine, or for a pair of them.

A pair fits as far as both commands and the model's shape tell.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from yarl import URL

from vllm_ascend_pd.core.config import ConnectorConfig
from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.tools.migrate.arguments import EngineArguments, read_arguments
from vllm_ascend_pd.tools.migrate.engine import ModelFacts, migrate_engine, read_facts
from vllm_ascend_pd.tools.migrate.result import SCHEMA, Change, ChangeKind, EngineMigration, MigrateError, Migration
from vllm_ascend_pd.tools.plan.engine import Layout, PlannedEngine, default_block_size
from vllm_ascend_pd.tools.plan.exchange import make_plan
from vllm_ascend_pd.tools.plan.model import ModelShape, PlanError
from vllm_ascend_pd.tools.vllm_serve import table

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def migrate_command(arguments: EngineArguments, model: str | None, proxy_url: str | None) -> Migration:
    """Raises MigrateError. `model`: folder or file of the model's config.json, None for where the command says."""
    _check_proxy(proxy_url)
    served = read_facts(model or arguments.model, arguments.text("kv-cache-dtype"))
    engine = migrate_engine(arguments, served, proxy_url)
    return Migration(SCHEMA, not engine.stops, (engine,), (), _proxy([engine], proxy_url))


def migrate_pair(results: Sequence[Migration], model: str | None, proxy_url: str | None) -> Migration:
    """Checks whether the engines of two results fit together. Raises MigrateError."""
    _check_proxy(proxy_url)
    engines = tuple(engine for result in results for engine in result.engines)
    pair = _pair(engines, model)
    good = not any(change.kind is ChangeKind.STOPS for change in pair) and not any(engine.stops for engine in engines)
    return Migration(SCHEMA, good, engines, tuple(pair), _proxy(engines, proxy_url))


def read_result(file: Path) -> Migration:
    """Reads what `--save` has written. Raises MigrateError or OSError."""
    try:
        result = msgspec.json.decode(file.read_bytes(), type=Migration)
    except UNREADABLE as error:
        raise MigrateError(f"{file} is not what --save writes: {error}") from None
    if result.schema != SCHEMA or len(result.engines) != 1:
        raise MigrateError(f"{file} is not what this version's --save writes for one engine")
    return result


def encoded(result: Migration) -> str:
    """Returns the result as JSON."""
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"


def start(engine: EngineMigration, environment: Mapping[str, str]) -> NoReturn:
    """Becomes the engine's process. Raises OSError if there is no such program."""
    words = [word for part in engine.command for word in part]
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the engine would inherit that
    os.execvpe(words[0], words, {**environment, **engine.environment})


def _pair(engines: Sequence[EngineMigration], model: str | None) -> list[Change]:
    roles = sorted(engine.role for engine in engines)
    if "" in roles:
        return []
    if roles != ["kv_consumer", "kv_producer"]:
        return [Change(ChangeKind.STOPS, "kv_role", "a pair is one kv_producer and one kv_consumer")]
    decode, prefill = (
        read_arguments([word for part in engine.command for word in part], table(), engine.environment)
        for engine in sorted(engines, key=lambda engine: engine.role)
    )
    return check_pair(prefill, decode, read_facts(model or prefill.model, prefill.text("kv-cache-dtype")))


def _check_proxy(url: str | None) -> None:
    """`url` is a root URL: paths are appended."""
    if url is None:
        return
    is_root = not set("/?#@") & set(url.partition("://")[2])
    if not (is_root and URL(url).host and URL(url).scheme in ("http", "https")):
        raise MigrateError(f"--proxy {url}: not http://HOST:PORT")


def _proxy(engines: Sequence[EngineMigration], url: str | None) -> list[str]:
    words = ["vllm-ascend-pd", "proxy"]
    if url is not None:
        words += ["--host", "0.0.0.0", "--port", str(URL(url).port or 80)]
        words += ["--metaserver-url", f"{url}{METASERVER_PATH}"]
    for role, side in _ROLES.items():
        urls = [engine.url for engine in engines if engine.role == role] or [f"http://{side.upper()}_HOST:PORT"]
        words += [f"--{side}", urls[0]]
    return words


# Options that must be the same on both sides, because they change what KV means.
_SAME = ("kv-cache-dtype", "quantization", "dtype", "hf-overrides")


def check_pair(prefill: EngineArguments, decode: EngineArguments, served: ModelFacts) -> list[Change]:
    """`served`: what is known of the model."""
    found, model = [], served.shape
    if prefill.model.rstrip("/") != decode.model.rstrip("/"):
        why = f"prefill serves {prefill.model}, decode {decode.model}: weights that differ are refused at first contact"
        if served.media:
            why += ". Prompts with images are refused: vLLM's hash of an image includes the path. Use one path"
        found.append(Change(ChangeKind.CHECK, "model", why))
    for name in _SAME:
        if (left := _value(prefill, name)) != (right := _value(decode, name)):
            why = f"prefill has {left or 'none'}, decode {right or 'none'}: KV would be of another model"
            found.append(Change(ChangeKind.STOPS, f"--{name}", why))
    found += _drafts(prefill, decode)
    most = [side.number("max-model-len", 0) for side in (prefill, decode)]
    if all(most) and most[0] < most[1]:
        why = f"prefill takes {most[0]} tokens, decode {most[1]}: longer prompts than prefill's fail"
        found.append(Change(ChangeKind.CHECK, "--max-model-len", why))
    if model is not None:
        try:
            _plan(prefill, decode, model)
        except PlanError as error:
            found.append(Change(ChangeKind.STOPS, "parallel sizes", str(error)))
    return found


def _drafts(prefill: EngineArguments, decode: EngineArguments) -> list[Change]:
    methods = [side.speculation.get("method") for side in (prefill, decode)]
    if methods[0] == methods[1]:
        return []
    why = (
        f"prefill speculates with {methods[0]}, decode with {methods[1]}: the draft's KV of prompts is not sent, so "
        "fewer of its tokens are accepted. Answers are the same"
    )
    return [Change(ChangeKind.CHECK, "--speculative-config", why)]


def _plan(prefill: EngineArguments, decode: EngineArguments, model: ModelShape) -> None:
    sides = [_planned(name, side, model) for name, side in (("prefill", prefill), ("decode", decode))]
    tokens = prefill.number("max-num-batched-tokens", 2048)
    make_plan(model, Layout.VLLM_ASCEND, *sides, step_tokens=tokens, staging_slots=ConnectorConfig().slots(tokens))


def _planned(name: str, side: EngineArguments, model: ModelShape) -> PlannedEngine:
    return PlannedEngine(
        name,
        side.number("tensor-parallel-size", 1),
        side.number("pipeline-parallel-size", 1),
        side.number("data-parallel-size", 1),
        side.number("block-size", default_block_size(model, Layout.VLLM_ASCEND)),
    )


def _value(side: EngineArguments, name: str) -> object:
    """Returns what must be the same on both sides, JSON as an object."""
    return side.json(name) if name == "hf-overrides" else side.text(name)
