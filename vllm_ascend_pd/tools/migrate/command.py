# SPDX-License-Identifier: Apache-2.0
"""Turns the options of `vllm-ascend-pd migrate` into its result."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from yarl import URL

from vllm_ascend_pd.core.protocol import METASERVER_PATH
from vllm_ascend_pd.tools.migrate.arguments import EngineArguments, read_arguments
from vllm_ascend_pd.tools.migrate.changes import SCHEMA, Change, ChangeKind, EngineMigration, Migration, stopping
from vllm_ascend_pd.tools.migrate.connectors import translate
from vllm_ascend_pd.tools.migrate.engine import migrate_engine
from vllm_ascend_pd.tools.migrate.model_facts import read_facts
from vllm_ascend_pd.tools.migrate.pair import check_declared, check_pair
from vllm_ascend_pd.tools.migrate.render import render
from vllm_ascend_pd.tools.migrate.script import MigrateError, ServeCommand, serve_commands

_ROLES = {"kv_producer": "prefill", "kv_consumer": "decode"}


def read_input(given: str) -> ServeCommand:
    """Returns the command that starts an engine.

    given: a script with its arguments, or the command itself, or `-` for either on standard input.

    Raises MigrateError or OSError.
    """
    if given == "-":
        return _only(serve_commands(sys.stdin.read()), "standard input")
    words = shlex.split(given.partition("\n")[0]) if given.count("'") % 2 == 0 and given.count('"') % 2 == 0 else []
    words = words[1:] if words and Path(words[0]).name in ("bash", "sh") else words
    if words and Path(words[0]).is_file():
        return _only(serve_commands(Path(words[0]).read_text(encoding="utf-8"), words[1:]), words[0])
    commands = serve_commands(given)
    if not commands and words and ("/" in words[0] or words[0].endswith(".sh")):
        raise MigrateError(f"{words[0]}: no such file")
    return _only(commands, given)


def with_values(command: ServeCommand, values: Mapping[str, str]) -> ServeCommand:
    """Fills in variables that the script leaves open."""
    text = " ".join(shlex.quote(word) for word in command.words)
    assignments = "\n".join(f"{name}={shlex.quote(value)}" for name, value in values.items() if not name.isdecimal())
    arguments = [values.get(str(number), f"${number}") for number in range(1, 10)]
    [filled] = serve_commands(f"{assignments}\nvllm serve {text}", arguments)
    return ServeCommand(filled.words, command.environment, command.uncertain)


def migrate_commands(commands: Sequence[ServeCommand], model: str | None, proxy_url: str | None) -> Migration:
    """Raises MigrateError. `model`: folder or file of the model's config.json, None for where the commands say."""
    if proxy_url is not None and not (URL(proxy_url).host and URL(proxy_url).scheme in ("http", "https")):
        raise MigrateError(f"--proxy {proxy_url}: not http://HOST:PORT")
    sides = [read_arguments(command) for command in commands]
    engines = [
        migrate_engine(side, read_facts(model or side.model, side.values["kv-cache-dtype"]), proxy_url)
        for side in sides
    ]
    pair = _pair(engines, sides, model)
    good = not stopping(pair) and not any(engine.stops for engine in engines)
    return Migration(SCHEMA, good, tuple(engines), tuple(pair), _proxy(engines, proxy_url))


def result_text(result: Migration, as_json: bool) -> str:
    if as_json:
        return msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n"
    return render(result)


def _pair(engines: Sequence[EngineMigration], sides: Sequence[EngineArguments], model: str | None) -> list[Change]:
    if len(engines) < 2:
        return []
    roles = sorted(engine.role for engine in engines)
    if roles != ["kv_consumer", "kv_producer"]:
        if "" in roles:
            return []
        return [Change(ChangeKind.STOPS, "kv_role", "a pair is one kv_producer and one kv_consumer")]
    by_role = dict(zip([_ROLES[engine.role] for engine in engines], sides, strict=True))
    prefill, decode = by_role["prefill"], by_role["decode"]
    served = read_facts(model or prefill.model, prefill.values["kv-cache-dtype"])
    found = check_pair(prefill, decode, served)
    for whose, engine in by_role.items():
        declared = translate(engine.json("kv-transfer-config"), None).declared
        for side, other in by_role.items():
            found += check_declared(side, other, declared, whose)
    return found


def _proxy(engines: Sequence[EngineMigration], url: str | None) -> list[str]:
    words = ["vllm-ascend-pd", "proxy"]
    if url is not None:
        words += [
            "--host",
            "0.0.0.0",
            "--port",
            str(URL(url).port or 80),
            "--metaserver-url",
            f"{url}{METASERVER_PATH}",
        ]
    for role, side in _ROLES.items():
        urls = [engine.url for engine in engines if engine.role == role] or [f"http://{side.upper()}_HOST:PORT"]
        words += [f"--{side}", urls[0]]
    return words


def _only(commands: list[ServeCommand], where: str) -> ServeCommand:
    if len(commands) != 1:
        name = where if len(where) <= 80 else where[:80] + "..."
        raise MigrateError(f"{name} has {len(commands)} `vllm serve` commands, not one")
    return commands[0]
