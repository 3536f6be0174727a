# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm serve`, commands that start it, and settings with which vLLM silently runs without this
package's connector.

Launch scripts, `migrate` and `doctor` share this.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
"""vLLM's name for each side."""
KV_PORT = 14579
"""vLLM's default (`vllm/config/kv_transfer.py`)."""
PLUGIN = "vllm_ascend_pd"
PLUGINS = "VLLM_PLUGINS"
REPLACES_CONNECTOR = "kv-offloading-size"
"""The option with which vLLM replaces every connector, without a word (`VllmConfig._post_init_kv_transfer_config`)."""
_TABLE = Path(__file__).with_name("serve_options.txt")
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Option:
    """One option of `vllm serve`. `takes`: its number of values, as argparse's `nargs`: 0, 1, ?, + or *."""

    name: str  # without dashes
    takes: str


@dataclass(frozen=True)
class Word:
    """A word of a command line that begins like an option."""

    option: Option | None  # None: not known, or a short form of several
    perhaps: tuple[Option, ...] = ()  # those of which it is a short form
    value: str | None = None  # behind a `=`, or behind the letter as in -n2
    keys: tuple[str, ...] = ()  # KEY of --NAME.KEY
    off: bool = False  # --no-NAME


@dataclass(frozen=True)
class CommandPart:
    """Words that belong together: an option with its values, or what is no option."""

    words: tuple[str, ...]
    option: Word | None = None
    values: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "" if self.option is None or self.option.option is None else self.option.option.name


@cache
def _options() -> Mapping[str, Option]:
    """Returns the options of vLLM 0.23 to 0.32, by each of their names with the dashes."""
    options: dict[str, Option] = {}
    for line in _TABLE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            takes, *names = line.split()
            options |= dict.fromkeys(names, Option(names[0].removeprefix("--"), takes))
    return options


def read_word(word: str) -> Word | None:
    """Reads a word as vLLM's parser does (`vllm/utils/argparse_utils.py`). Returns None for a value, or the model."""
    options = _options()
    if not word.startswith("-") or word in ("-", "--") or re.fullmatch(r"-\d+|-\d*\.\d+", word):
        return None
    if word[:2] == "-O" and word != "-O":  # -O3
        return Word(options.get("--optimization-level"), value=word[2:].removeprefix("="))
    head, equals, text = word.partition("=")
    value = text if equals else None
    name, *keys = head.split(".")
    name = name.replace("_", "-") if name.startswith("--") else name
    longer = [name] if name in options else [each for each in options if each.startswith(name)]
    perhaps = tuple(dict.fromkeys(options[each] for each in longer))
    option = perhaps[0] if len(perhaps) == 1 else None
    if option is None and (found := options.get(word[:2])) is not None and not word.startswith("--"):
        return Word(found, value=word[2:])  # -n2
    if option is None and " " in word:
        return None  # as argparse says
    off = option is not None and longer[0].startswith("--no-") and not option.name.startswith("no-")
    return Word(option, perhaps, value, tuple(keys), off)


def split_words(words: Sequence[str]) -> Iterator[CommandPart]:
    """Groups each option with its values. Keeps all words in their order."""
    at = 0
    while at < len(words):
        begin, word = at, words[at]
        at += 1
        read = read_word(word)
        if word == "-O" and words[at : at + 1] and words[at] in ("0", "1", "2", "3"):
            read = read_word("--optimization-level")
        if word == "--":  # no options behind it
            at = len(words)
        elif read is None:  # the model
            pass
        elif read.value is not None:
            yield CommandPart((word,), read, (read.value,))
            continue
        elif read.keys:  # takes the next word, whatever it is
            at = min(at + 1, len(words))
        else:
            takes = "*" if read.option is None else read.option.takes
            most = {"0": 0, "1": 1, "?": 1}.get(takes, len(words))
            while at < len(words) and at - begin - 1 < most and words[at] != "--" and read_word(words[at]) is None:
                at += 1
        yield CommandPart(tuple(words[begin:at]), read, tuple(words[begin + 1 : at]))


def plugins_with_ours(environment: Mapping[str, str]) -> str | None:
    """Returns what VLLM_PLUGINS must be, None if it is right: unset, or with this package's plugin."""
    given = environment.get(PLUGINS)
    if given is None or PLUGIN in given.split(","):
        return None
    return f"{given},{PLUGIN}" if given else PLUGIN


def nested(parts: Iterable[CommandPart]) -> dict[str, Any]:
    """Returns the object that `--NAME.KEY VALUE` options make together."""
    whole: dict[str, Any] = {}
    for part in parts:
        assert part.option is not None
        *path, last = part.option.keys
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


# A command that starts `vllm serve`, and the same command with some of its options changed. Words that are not changed
# stay as they are, in their order, whether they are understood or not.

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
