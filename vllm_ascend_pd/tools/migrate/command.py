# SPDX-License-Identifier: Apache-2.0
"""The command of an engine, and the same command with some of its options changed.

Only the options that `migrate` needs are known here. All other words stay as they are, in their order: vLLM reads them.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any

import yaml

_FLAGS = (
    "calculate-kv-scales",
    "data-parallel-external-lb",
    "data-parallel-hybrid-lb",
    "enable-return-routed-experts",
    "enforce-eager",
)
_SHORT = {
    "-cc": "compilation-config",
    "-dcp": "decode-context-parallel-size",
    "-dp": "data-parallel-size",
    "-dpa": "data-parallel-address",
    "-dpb": "data-parallel-backend",
    "-dpl": "data-parallel-size-local",
    "-dpn": "data-parallel-rank",
    "-dpp": "data-parallel-rpc-port",
    "-dpr": "data-parallel-start-rank",
    "-pcp": "prefill-context-parallel-size",
    "-q": "quantization",
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
}
_WITH_A_VALUE = (
    *_SHORT.values(),
    *("additional-config", "block-size", "config", "kv-cache-dtype", "kv-offloading-size", "kv-transfer-config"),
    *(
        "mamba-cache-mode",
        "max-num-batched-tokens",
        "max-num-seqs",
        "model",
        "spec-method",
        "spec-model",
        "spec-tokens",
    ),
)
_KNOWN = (*_FLAGS, *(f"no-{name}" for name in _FLAGS), *_WITH_A_VALUE)
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class CommandPart:
    """Words that belong together: an option with its values, or one word that is no option."""

    words: tuple[str, ...]
    is_option: bool = False
    name: str = ""  # of a known option, without dashes
    values: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()  # KEY of --NAME.KEY
    off: bool = False  # --no-NAME


def _known_name(head: str) -> str:
    """Returns the name that an option's word stands for, as vLLM's parser does; "" if it is not one of those above."""
    if not head.startswith("--"):
        return _SHORT.get(head, "")
    name = head[2:].replace("_", "-")
    found = [name] if name in _KNOWN else [each for each in _KNOWN if each.startswith(name)]
    return found[0] if len(found) == 1 else ""


def _read_word(word: str) -> CommandPart | None:
    """Reads an option's word, without values that follow. Returns None for a value, or the model."""
    if not word.startswith("-") or word in ("-", "--") or re.fullmatch(r"-\d+|-\d*\.\d+", word):
        return None
    head, equals, text = word.partition("=")
    head, *keys = head.split(".")
    name = _known_name(head)
    if not name and re.match("-q[^-]", word):  # -qfp8
        return CommandPart((word,), True, "quantization", (word[2:].removeprefix("="),))
    if not name and " " in word:
        return None  # as argparse says
    off = name.startswith("no-")
    return CommandPart((word,), True, name.removeprefix("no-"), (text,) if equals else (), tuple(keys), off)


def split_words(words: Sequence[str]) -> Iterator[CommandPart]:
    """Groups each option with its values. Keeps all words in their order."""
    at = 0
    while at < len(words):
        begin, part = at, _read_word(words[at])
        at += 1
        if words[begin] == "--":  # no options behind it
            yield from (CommandPart((word,)) for word in words[begin:])
            return
        if part is None:
            yield CommandPart((words[begin],))
            continue
        if not part.values:
            most = 1 if part.keys or part.name else len(words)
            most = 0 if part.name in _FLAGS else most
            while at < len(words) and at - begin - 1 < most and (part.keys or _is_value(words[at])):
                at += 1
            part = replace(part, words=tuple(words[begin:at]), values=tuple(words[begin + 1 : at]))
        yield part


def _is_value(word: str) -> bool:
    return word != "--" and _read_word(word) is None


def nested(parts: Iterable[CommandPart]) -> dict[str, Any]:
    """Returns the object that `--NAME.KEY VALUE` options make together."""
    whole: dict[str, Any] = {}
    for part in parts:
        *path, last = part.keys
        text = part.values[0] if part.values else "true"
        place = whole
        for key in path:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        if last.endswith("+"):
            before = place.get(last[:-1])
            place[last[:-1]] = [*(before if isinstance(before, list) else []), *text.split(",")]
        else:
            place[last] = _value(text)
    return whole


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        number = whole_number(text)
        return text if number is None else number


def whole_number(text: str) -> int | None:
    """Reads a number as vLLM does (`human_readable_int`): 32k is 32,000, 32K is 32,768."""
    match = re.fullmatch(r"(\d{1,18})(\.\d{1,9})?([kmgtKMGT]?)", text, re.ASCII)
    if match is None or (match[2] and not match[3]):
        return None
    unit = _UNITS.get(match[3], 1)
    return int(float(match[1] + match[2]) * unit) if match[2] else int(match[1]) * unit


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
    def _loose(self) -> list[str]:
        """Words that belong to no option."""
        return [word for part in self.parts if not part.is_option for word in part.words if word != "--"]

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
        dotted = [part for part in self._given(name) if part.keys]
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
        return next((not part.off for part in reversed(self._given(name))), None)

    def without(self, *names: str) -> EngineArguments:
        return replace(self, parts=tuple(part for part in self.parts if part.name not in names))

    def with_option(self, name: str, *words: str) -> EngineArguments:
        """Sets an option, in its place if it is there. `words`: the option and its value."""
        places = [index for index, part in enumerate(self.parts) if part.name == name]
        ends = [index for index, part in enumerate(self.parts) if part.words[0] == "--"]
        place = (places or ends or [len(self.parts)])[0]
        others = [part for part in self.parts[place:] if part.name != name]
        return replace(self, parts=(*self.parts[:place], CommandPart(words, True, name, words[1:]), *others))

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
        leading = parts.pop(0) if self.parts and not self.parts[0].is_option else []
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
    return EngineArguments(tuple(words[:start]), tuple(split_words(words[start:])), {**environment, **own})


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
