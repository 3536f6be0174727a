# SPDX-License-Identifier: Apache-2.0
"""Turns what is given to `vllm-ascend-pd migrate` into its result."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
from yarl import URL

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.core.text import UNREADABLE
from vllm_ascend_pd.tools.migrate.arguments import EngineArguments, read_arguments
from vllm_ascend_pd.tools.migrate.changes import (
    SCHEMA,
    Change,
    ChangeKind,
    EngineMigration,
    MigrateError,
    Migration,
    stopping,
)
from vllm_ascend_pd.tools.migrate.engine import migrate_engine
from vllm_ascend_pd.tools.migrate.fits import check_pair, read_facts
from vllm_ascend_pd.tools.vllm_serve import KV_ROLES, table


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
    good = not stopping(pair) and not any(engine.stops for engine in engines)
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
        read_arguments([word for part in engine.command for word in part], table(), engine.environment, {})
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
    for side, role in KV_ROLES.items():
        urls = [engine.url for engine in engines if engine.role == role] or [f"http://{side.upper()}_HOST:PORT"]
        words += [f"--{side}", urls[0]]
    return words
