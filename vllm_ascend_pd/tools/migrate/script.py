# SPDX-License-Identifier: Apache-2.0
"""Finds `vllm serve` in a launch script, with the environment that the script exports. Runs nothing."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath


class MigrateError(ValueError):
    """The input cannot be understood."""


@dataclass(frozen=True)
class ServeCommand:
    """One `vllm serve` command of a script. `words` follow after `serve`."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


_SEPARATORS = "();<>|&\n"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|([A-Za-z_]\w*|\d))")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_OPENAI_SERVER = "vllm.entrypoints.openai.api_server"


def serve_commands(text: str, arguments: Sequence[str] = ()) -> list[ServeCommand]:
    """Returns the `vllm serve` commands of a script or of a command line.

    text: a shell script. Quotes, line continuations, comments, assignments and `export` are understood. Loops,
        functions and the output of other commands are not: what they would fill in stays as it is written.
    arguments: the script's arguments, for `$1` and so on.

    Raises MigrateError if a quote is not closed.
    """
    variables = {str(number): value for number, value in enumerate(arguments, 1)}
    exported: dict[str, str] = {}
    found = []
    for command in _commands(text):
        words = [_expand(word, variables) for word in command]
        own = dict(exported)
        while words and (assignment := _ASSIGNMENT.fullmatch(words[0])):
            own[assignment[1]] = assignment[2]
            del words[0]
        if not words:
            variables |= own
            exported |= {name: own[name] for name in exported}
        elif words[0] == "export":
            for assignment in map(_ASSIGNMENT.fullmatch, words[1:]):
                if assignment:
                    variables[assignment[1]] = exported[assignment[1]] = assignment[2]
        elif (start := _start(words)) is not None:
            found.append(ServeCommand(tuple(words[start:]), own))
    return found


def unfilled(text: str) -> list[str]:
    """Returns the variables that `text` still has, as `$NAME`, in order."""
    return ["$" + (match[1] or match[3]) for match in _VARIABLE.finditer(text)]


def _start(words: Sequence[str]) -> int | None:
    """Returns the index of the first word after `vllm serve` or `python -m vllm.entrypoints.openai.api_server`."""
    for index, word in enumerate(words[:-1]):
        if PurePosixPath(word).name == "vllm" and words[index + 1] == "serve":
            return index + 2
        if word == "-m" and words[index + 1] == _OPENAI_SERVER:
            return index + 2
    return None


def _commands(text: str) -> list[list[str]]:
    """Splits a script into simple commands of words. Redirections are left out."""
    joined = text.replace("\\\r\n", "").replace("\\\n", "")
    lexer = shlex.shlex(_Script(re.sub(r"(?<=\s)[012](?=[<>])", "", joined)), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    redirected = False
    try:
        for word in lexer:
            if word and not word.strip(_SEPARATORS):
                redirected = "<" in word or ">" in word
                if not redirected:
                    commands.append([])
            elif redirected:
                redirected = False
            else:
                commands[-1].append(word)
    except ValueError as error:
        raise MigrateError(f"line {lexer.lineno}: {error}".lower()) from None
    return [command for command in commands if command]


class _Script:
    """Text for shlex, which reads a comment as a line: the end of the line must still end the command."""

    def __init__(self, text: str) -> None:
        self._text = io.StringIO(text)

    def read(self, size: int) -> str:
        return self._text.read(size)

    def readline(self) -> str:
        line = self._text.readline()
        if line.endswith("\n"):
            self._text.seek(self._text.tell() - 1)
        return line

    def close(self) -> None:
        self._text.close()


def _expand(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    return _VARIABLE.sub(value, word)
