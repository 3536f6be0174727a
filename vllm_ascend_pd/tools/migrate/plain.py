# SPDX-License-Identifier: Apache-2.0
"""Reads a pasted command of which no shell would change a word.

Everything else is a shell's work: with `vllm-ascend-pd migrate --` before `vllm serve`, the script itself does it.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import NoReturn

from vllm_ascend_pd.tools.migrate.changes import MigrateError

ADVICE = "put `vllm-ascend-pd migrate --` before `vllm serve` in the script, and run the script"

_TOKENS = re.compile(
    r"""
    (?P<blank> [ \t]+ )
  | (?P<joined> \\\n )
  | (?P<end> \n )
  | (?P<hash> \# )
  | (?P<single> ' [^']* ' )
  | (?P<double> " (?: [^"\\$`] | \\[\s\S] )* " )
  | (?P<escaped> \\ [^\n] )
  | (?P<bare> [^\x00-\x20\x7f'"\\#$`*?~;&|<>!()\[\]{}]+ )
    """,
    re.VERBOSE,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=", re.ASCII)


@dataclass
class _Word:
    assigns: bool  # NAME=VALUE
    text: str = ""


def read_plain(text: str) -> tuple[dict[str, str], list[str]]:
    """Returns the variables that are set before a command, and its words.

    Raises MigrateError for more or less than one command, and for what a shell would expand, branch on or redirect.
    """
    commands: list[list[_Word]] = [[]]
    at, word = 0, None
    while at < len(text):
        token = _TOKENS.match(text, at)
        if token is None:
            _refuse(text, at)
        kind, at = token.lastgroup, token.end()
        if kind == "hash" and word is None:  # a comment
            line_end = text.find("\n", at)
            at = len(text) if line_end < 0 else line_end
        elif kind in ("blank", "end"):
            word = None
            if kind == "end" and commands[-1]:
                commands.append([])
        elif kind != "joined":
            if word is None:
                word = _Word(assigns=_ASSIGNMENT.match(text, token.start()) is not None)
                commands[-1].append(word)
            word.text += _unquoted(kind, token[0])
    found = [command for command in commands if command]
    if len(found) != 1:
        raise MigrateError(f"{len(found)} commands are given, not one: {ADVICE}")
    [words] = found
    assigned = list(itertools.takewhile(lambda each: each.assigns, words))
    pairs = (each.text.partition("=") for each in assigned)
    return {name: value for name, _, value in pairs}, [each.text for each in words[len(assigned) :]]


def _unquoted(kind: str | None, text: str) -> str:
    if kind == "single":
        return text[1:-1]
    if kind == "double":  # where a backslash quotes only these
        return re.sub(r"\\(?:\n|([\\\"$`]))", lambda match: match[1] or "", text[1:-1])
    return text[1:] if kind == "escaped" else text


def _refuse(text: str, at: int) -> NoReturn:
    line = text.count("\n", 0, at) + 1
    sign = text[at]
    if sign == '"':
        opened = re.compile(r'"(?:[^"\\$`]|\\[\s\S])*').match(text, at)
        sign = text[opened.end()] if opened is not None and opened.end() < len(text) else sign
    if sign in "'\"\\":
        raise MigrateError(f"line {line}: a quote is not closed")
    raise MigrateError(f"line {line}: a shell would interpret {sign!r}, and this is none: {ADVICE}")
