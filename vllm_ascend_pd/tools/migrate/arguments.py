# SPDX-License-Identifier: Apache-2.0
"""Reads the arguments of `vllm serve` that matter to a connector, and writes them again with changes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import yaml

from vllm_ascend_pd.tools.migrate.script import MigrateError, ServeCommand, unfilled

_SHORT = {
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
    "-dpn": "data-parallel-rank",
    "-dcp": "decode-context-parallel-size",
    "-pcp": "prefill-context-parallel-size",
    "-q": "quantization",
    "-O": "compilation-config",
    "-cc": "compilation-config",
    "-sc": "speculative-config",
    "-ac": "additional-config",
}
_NUMBERS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "decode-context-parallel-size",
    "prefill-context-parallel-size",
    "max-num-batched-tokens",
    "max-num-seqs",
    "max-model-len",
    "block-size",
    "port",
)
_TEXTS = ("model", "host", "quantization", "kv-cache-dtype", "data-parallel-rank", "mamba-cache-mode", "dtype")
_JSON = ("kv-transfer-config", "additional-config", "compilation-config", "speculative-config", "hf-overrides")
_FLAGS = ("enforce-eager", "enable-sleep-mode", "calculate-kv-scales", "enable-return-routed-experts")
_ON_OR_OFF = ("enable-prefix-caching",)


@dataclass(frozen=True)
class EngineArguments:
    """Arguments of `vllm serve`.

    options: option without dashes to its words, in the order of the command.
    uncertain: variables of `environment` to which a shell may give other values.
    """

    positional: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    values: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    uncertain: frozenset[str] = frozenset()

    @property
    def model(self) -> str:
        return str(self.positional[0] if self.positional else self.values["model"] or "")

    def number(self, name: str, default: int) -> int:
        """Returns the value of a numeric option, its default where a variable is not filled in."""
        value = self.values[name]
        return value if isinstance(value, int) else default

    def json(self, name: str) -> dict[str, Any]:
        return dict(self.values[name] or {})

    def has(self, flag: str) -> bool:
        return bool(self.values[flag])

    def without(self, *names: str) -> EngineArguments:
        options = {name: words for name, words in self.options.items() if name not in names}
        return _read(replace(self, options=options))

    def with_option(self, name: str, *words: str) -> EngineArguments:
        """Sets an option, in its place if it is there."""
        return _read(replace(self, options={**self.options, name: words}))

    def with_json(self, name: str, value: Mapping[str, Any]) -> EngineArguments:
        """Sets an option to JSON, or leaves it out if that is empty."""
        return self.with_option(name, json.dumps(value)) if value else self.without(name)

    def words(self) -> list[list[str]]:
        """Returns the command's words, one list per option."""
        return [["vllm", "serve", *self.positional], *([f"--{name}", *words] for name, words in self.options.items())]


def read_arguments(command: ServeCommand) -> EngineArguments:
    """Raises MigrateError for values that are no number or no JSON object."""
    positional, options = _options(command.words)
    return _read(EngineArguments(positional, options, {}, command.environment, command.uncertain))


def _read(arguments: EngineArguments) -> EngineArguments:
    flat = [word for name, words in arguments.options.items() for word in (f"--{name}", *words)]
    values, _ = _parser().parse_known_args(flat)
    return replace(arguments, values={name.replace("_", "-"): value for name, value in vars(values).items()})


def _options(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, tuple[str, ...]]]:
    positional: list[str] = []
    options: dict[str, list[str]] = {}
    nested: dict[str, dict[str, Any]] = {}
    into = positional
    for word in words:
        if not _is_option(word):
            into.append(word)
            continue
        name, equals, value = word.partition("=")
        name = _SHORT.get(name) or name.lstrip("-").replace("_", "-")
        option, dot, key = name.partition(".")
        into = [value] if equals else []
        if dot:  # --kv-transfer-config.kv_role VALUE
            nested.setdefault(option, {})[key.replace("-", "_")] = into
        else:
            options[name] = into
    for option, parts in nested.items():
        options[option] = [json.dumps(_nested(parts))]
    return tuple(positional), {name: tuple(values) for name, values in options.items()}


def _is_option(word: str) -> bool:
    return word in _SHORT or (word.startswith("--") and len(word) > 2)


def _nested(parts: Mapping[str, list[str]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for key, words in parts.items():
        *path, last = key.split(".")
        place = whole
        for name in path:
            place = place.setdefault(name, {})
        place[last] = yaml.safe_load(words[0]) if words else True
    return whole


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise MigrateError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _ArgumentParser(add_help=False, allow_abbrev=False)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=_number)
    for name in _TEXTS:
        parser.add_argument(f"--{name}")
    for name in _JSON:
        parser.add_argument(f"--{name}", type=_object)
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    for name in _ON_OR_OFF:
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    return parser


def _number(text: str) -> int | str:
    if unfilled(text):
        return text
    digits = text.lower()
    for unit, factor in (("k", 1000), ("m", 1000000)):  # vLLM's: 32k
        if digits.endswith(unit):
            return int(float(digits[:-1]) * factor)
    return int(digits)


def _object(text: str) -> dict[str, Any]:
    """YAML is JSON with fewer rules: a comma too many and variables without quotes are read, too."""
    try:
        value = yaml.safe_load(text.replace("\t", " "))
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(" ".join(str(error).split())[:300]) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("is no JSON object")
    return value


def is_json(texts: Iterable[str]) -> bool:
    try:
        for text in texts:
            json.loads(text)
    except ValueError:
        return False
    return True
