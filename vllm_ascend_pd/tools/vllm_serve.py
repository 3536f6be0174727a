# SPDX-License-Identifier: Apache-2.0
"""The options of `vllm serve`, and settings with which vLLM silently runs without this package's connector.

Launch scripts, `migrate` and `doctor` share this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

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


class ServeOptions:
    """Tells what the words of a command line are, as vLLM's parser would (`vllm/utils/argparse_utils.py`)."""

    def __init__(self, lines: Iterable[str]) -> None:
        """`lines`: those of `serve_options.txt`."""
        self._options: dict[str, Option] = {}
        for line in lines:
            takes, *names = line.split()
            option = Option(names[0].removeprefix("--"), takes)
            self._options |= dict.fromkeys(names, option)

    def read(self, word: str) -> Word | None:
        """Returns None for a word that is no option: a value, or the model."""
        if not word.startswith("-") or word in ("-", "--") or re.fullmatch(r"-\d+|-\d*\.\d+", word):
            return None
        if word[:2] == "-O" and word != "-O":  # -O3
            return Word(self._options.get("--optimization-level"), value=word[2:].removeprefix("="))
        head, equals, text = word.partition("=")
        value = text if equals else None
        name, *keys = head.split(".")
        name = name.replace("_", "-") if name.startswith("--") else name
        longer = [name] if name in self._options else [each for each in self._options if each.startswith(name)]
        perhaps = tuple(dict.fromkeys(self._options[each] for each in longer))
        option = perhaps[0] if len(perhaps) == 1 else None
        if option is None and (found := self._options.get(word[:2])) is not None and not word.startswith("--"):
            return Word(found, value=word[2:])  # -n2
        if option is None and " " in word:
            return None  # as argparse says
        off = option is not None and longer[0].startswith("--no-") and not option.name.startswith("no-")
        return Word(option, perhaps, value, tuple(keys), off)

    def split(self, words: Sequence[str]) -> Iterator[CommandPart]:
        """Groups each option with its values. Keeps all words in their order."""
        at = 0
        while at < len(words):
            begin, word = at, words[at]
            at += 1
            read = self.read(word)
            if word == "-O" and words[at : at + 1] and words[at] in ("0", "1", "2", "3"):
                read = self.read("--optimization-level")
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
                while at < len(words) and at - begin - 1 < most and words[at] != "--" and self.read(words[at]) is None:
                    at += 1
            yield CommandPart(tuple(words[begin:at]), read, tuple(words[begin + 1 : at]))


@cache
def table() -> ServeOptions:
    """Returns the options of vLLM 0.23 to 0.32."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    return ServeOptions(line for line in lines if not line.startswith("#"))


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
