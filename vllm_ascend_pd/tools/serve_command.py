# SPDX-License-Identifier: Apache-2.0
"""A command that starts `vllm serve`: its options, and the same command with some of them changed.

`migrate` and the launch scripts read such commands.
Words that are not changed stay as they are, in their order, whether they are understood or not.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import yaml

from vllm_ascend_pd.tools.vllm_serve import CommandPart, Option, Word, nested, table, whole_number

_MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)


class CommandError(ValueError):
    """A command cannot be understood, or its options contradict each other. The message is for the operator."""


@dataclass(frozen=True)
class EngineArguments:
    """The command of one engine.

    start: its first words, such as `vllm serve`.
    environment: the engine's variables.
    assigned: variables to set before the command.
    """

    start: tuple[str, ...]
    parts: tuple[CommandPart, ...]
    environment: Mapping[str, str]
    assigned: Mapping[str, str] = field(default_factory=dict)

    @property
    def model(self) -> str:
        return next(iter(self._loose), None) or self.text("model") or ""

    @property
    def unknown(self) -> list[str]:
        """Words that are neither a known option with its values nor the model."""
        options = [word for part in self.parts if part.option is not None and not part.name for word in part.words]
        return options + self._loose[1:]

    @property
    def _loose(self) -> list[str]:
        """Words that belong to no option."""
        return [word for part in self.parts if part.option is None for word in part.words if word != "--"]

    def text(self, name: str) -> str | None:
        """Returns the last value of an option, None if it is not given."""
        return next((part.values[-1] for part in reversed(self._given(name)) if part.values), None)

    def number(self, name: str, default: int) -> int:
        """Raises CommandError for a value that is no number. Returns `default` for auto."""
        text = self.text(name)
        if text is None or text.strip() in ("auto", "-1"):
            return default
        number = whole_number(text.strip())
        if number is None:
            raise CommandError(f"--{name}: {text[:80]!r} is no number")
        return number

    def json(self, name: str) -> dict[str, Any]:
        """Returns the value of an option that is a JSON object, {} if it is not given. Raises CommandError."""
        dotted = [part for part in self._given(name) if part.option is not None and part.option.keys]
        if dotted:  # vLLM puts these behind all others, by their name as it is cut; the last is what counts
            spelled = [part.words[0].partition(".")[0].replace("_", "-") for part in dotted]
            last = list(dict.fromkeys(spelled))[-1]
            return nested(part for part, name in zip(dotted, spelled, strict=True) if name == last)
        text = self.text(name)
        if text is None:
            return {}
        try:
            # YAML is JSON with fewer rules: a comma too many is read, too.
            value = json.loads(text if self.is_json(name) else json.dumps(yaml.safe_load(text.replace("\t", " "))))
        except (yaml.YAMLError, RecursionError, TypeError, ValueError) as error:
            raise CommandError(f"--{name}: {' '.join(str(error).split())[:300]}") from None
        if not isinstance(value, dict):
            raise CommandError(f"--{name}: {text[:80]!r} is no JSON object")
        return value

    def is_json(self, name: str) -> bool:
        """Whether the value is JSON as it stands."""
        try:
            json.loads(self.text(name) or "{}")
        except (ValueError, RecursionError):
            return False
        return True

    @property
    def speculation(self) -> dict[str, Any]:
        """The settings of speculative decoding, {} without it."""
        short = {"method": "spec-method", "model": "spec-model", "num_speculative_tokens": "spec-tokens"}
        given = {key: self.text(name) for key, name in short.items() if self.text(name) is not None}
        return {**given, **self.json("speculative-config")}

    @property
    def names(self) -> list[str]:
        """The options that are given, without dashes."""
        return [part.name for part in self.parts if part.name]

    def switch(self, name: str) -> bool | None:
        """Returns whether a flag is on; None if it is not given."""
        return next((not part.option.off for part in reversed(self._given(name)) if part.option is not None), None)

    def without(self, *names: str) -> EngineArguments:
        return replace(self, parts=tuple(part for part in self.parts if part.name not in names))

    def with_option(self, name: str, *words: str) -> EngineArguments:
        """Sets an option, in its place if it is there. `words`: the option and its value."""
        places = [index for index, part in enumerate(self.parts) if part.name == name]
        ends = [index for index, part in enumerate(self.parts) if part.words[0] == "--"]
        place = (places or ends or [len(self.parts)])[0]
        option = Word(Option(name, "1"), off=words[0].startswith("--no-"))
        others = [part for part in self.parts[place:] if part.name != name]
        return replace(self, parts=(*self.parts[:place], CommandPart(words, option, words[1:]), *others))

    def with_json(self, name: str, value: Mapping[str, Any]) -> EngineArguments:
        """Sets an option to JSON, or leaves it out if that is empty."""
        return self.with_option(name, f"--{name}", json.dumps(value)) if value else self.without(name)

    def with_variable(self, name: str, value: str) -> EngineArguments:
        """Sets a variable where the command sets it, else before the command."""
        environment = {**self.environment, name: value}
        start = tuple(f"{name}={value}" if word.startswith(f"{name}=") else word for word in self.start)
        if start != self.start:
            return replace(self, start=start, environment=environment)
        return replace(self, environment=environment, assigned={**self.assigned, name: value})

    def words(self) -> list[list[str]]:
        """Returns the command's words, one list per option. The model is in the first one."""
        parts = [list(part.words) for part in self.parts]
        leading = parts.pop(0) if self.parts and self.parts[0].option is None else []
        return [[*self.start, *leading], *parts]

    def _given(self, name: str) -> list[CommandPart]:
        return [part for part in self.parts if part.name == name]


def read_arguments(words: Sequence[str], environment: Mapping[str, str]) -> EngineArguments:
    """Reads the words of a command. `environment` are variables that it gets.

    Raises CommandError if it is no `vllm serve`.
    """
    if any("\ud800" <= sign <= "\udfff" for word in words for sign in word):  # what Python could not decode
        raise CommandError("the command has a word that is not UTF-8")
    start = _first_argument(words)
    own = dict(word.split("=", 1) for word in words[:start] if _ASSIGNMENT.match(word))
    return EngineArguments(tuple(words[:start]), tuple(table().split(words[start:])), {**environment, **own})


def _first_argument(words: Sequence[str]) -> int:
    """Returns the index of the first word after `vllm serve` or `python -m vllm.entrypoints.openai.api_server`."""
    for index, (word, after) in enumerate(itertools.pairwise(words)):
        if PurePosixPath(word).name == "vllm" and after == "serve":
            return index + 2
        if word == "-m" and after in _MODULES:
            return index + 2 + (words[index + 2 : index + 3] == ["serve"])
    raise CommandError(
        "there is no `vllm serve` in it: put `vllm-ascend-pd migrate --` before `vllm serve` in the script, and run it"
    )
