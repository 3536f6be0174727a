# SPDX-License-Identifier: Apache-2.0
"""Finds `vllm serve` in a launch script, with the environment that the script exports. Runs nothing."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath


class MigrateError(ValueError):
    """The input cannot be understood."""


@dataclass(frozen=True)
class ServeCommand:
    """One `vllm serve` command of a script."""

    words: tuple[str, ...]
    """After `serve`."""
    environment: Mapping[str, str]
    """What the script exports, as far as that can be seen without a shell."""
    uncertain: frozenset[str] = frozenset()
    """Variables of `environment` to which a shell may give other values."""


_SEPARATORS = "();<>|&\n"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|([A-Za-z_]\w*|\d))")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_EXPORTS = re.compile(r"-\w*x")  # an option of `declare`
_UP_TO_A_QUOTE = r"(?:(?!\s#)[^\n])*(?:'|\\(?!\r?\n))"  # not in a comment, and no continuation of the line
_FOR_A_SHELL = re.compile(r"[$`]|(?:^|:)~")
_OPENING = ("if", "for", "while", "until", "case", "select", "{")
_CLOSING = ("fi", "done", "esac", "}")
_KEYWORDS = (*_OPENING, *_CLOSING, "then", "else", "elif", "do")
_CONDITIONAL = ("&&", "|", "(")
"""In the separator before a command that may not run, or that runs in another shell."""
_OPENAI_SERVER = "vllm.entrypoints.openai.api_server"


def serve_commands(text: str, arguments: Sequence[str] = ()) -> list[ServeCommand]:
    """Returns the `vllm serve` commands of a script or of a command line.

    text: a shell script. Quotes, line continuations, comments, assignments and `export` are understood. Loops,
        functions and the output of other commands are not: what they would fill in stays as it is written.
    arguments: the script's arguments, for `$1` and so on.

    Raises MigrateError if a quote is not closed.
    """
    shell = _Shell(text, {str(number): _Value(value) for number, value in enumerate(arguments, 1)})
    found = []
    depth = 0  # of blocks that may run once, often or never
    for separator, words in _commands(text):
        depth = max(0, depth + (words[0] in _OPENING) - (words[0] in _CLOSING))
        if words[0] in _KEYWORDS:
            words = words[1:]
        shell.surely = depth == 0 and not any(sign in separator for sign in _CONDITIONAL)
        if (start := _start(words)) is not None:
            found.append(shell.started(words, start))
        elif words:
            shell.run(words)
    return found


@dataclass(frozen=True)
class _Value:
    """Of a variable. `certain`: every shell gives it this text."""

    text: str
    certain: bool = True


@dataclass
class _Shell:
    """The variables of a script while its commands are read one after the other."""

    script: str
    variables: dict[str, _Value]
    surely: bool = True
    """Whether the command that is read now runs exactly once."""
    exported: dict[str, None] = field(default_factory=dict)
    """Names, in order."""

    def run(self, words: Sequence[str]) -> None:
        """Carries out assignments and exports."""
        name, *rest = words
        if name == "export" or (name in ("declare", "typeset") and any(_EXPORTS.match(word) for word in rest)):
            self.exported |= dict.fromkeys(self._assign(rest))
        elif name in ("declare", "typeset", "readonly", "local") or all(map(_ASSIGNMENT.match, words)):
            self._assign(words)

    def started(self, words: Sequence[str], start: int) -> ServeCommand:
        """The command whose arguments begin at `start`. Assignments before it hold for it alone."""
        after = tuple(self._expanded(word).text for word in words[start:])
        own = _Shell(self.script, dict(self.variables), self.surely)
        names = {**self.exported, **dict.fromkeys(own._assign(filter(_ASSIGNMENT.match, words[:start])))}
        values = {name: own.variables.get(name, _Value("", certain=False)) for name in names}
        uncertain = frozenset(name for name, value in values.items() if not value.certain)
        return ServeCommand(after, {name: value.text for name, value in values.items()}, uncertain)

    def _assign(self, words: Iterable[str]) -> list[str]:
        """Returns the names that `words` assign to or name."""
        names = []
        in_command = False  # between backticks
        for word in words:
            in_command ^= word.count("`") % 2 == 1
            if assignment := _ASSIGNMENT.fullmatch(word):
                name, plus, text = assignment.groups()
                value = self._expanded(text)
                # shlex has taken the quotes, and a shell fills in nothing between some of them.
                quoted = "$" in text and re.search(rf"\b{name}={_UP_TO_A_QUOTE}", self.script) is not None
                self.variables[name] = _Value(value.text, value.certain and self.surely and not plus and not quoted)
                names.append(name)
            elif _NAME.fullmatch(word) and not in_command:
                if (known := self.variables.get(word)) is not None and not self.surely:
                    self.variables[word] = replace(known, certain=False)
                names.append(word)
        return names

    def _expanded(self, word: str) -> _Value:
        certain = True

        def text_of(match: re.Match[str]) -> str:
            nonlocal certain
            known, default = self.variables.get(match[1] or match[3]), match[2]
            certain = certain and known is not None and known.certain and bool(known.text or default is None)
            return known.text if known is not None else match[0] if default is None else default

        text = _VARIABLE.sub(text_of, word)
        return _Value(text, certain and not _FOR_A_SHELL.search(text))


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


def _commands(text: str) -> list[tuple[str, list[str]]]:
    """Splits a script into simple commands of words, each with the separator before it. Redirections are left out."""
    joined = text.replace("\\\r\n", "").replace("\\\n", "")
    lexer = shlex.shlex(_Script(re.sub(r"(?<=\s)[012](?=[<>])", "", joined)), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    commands: list[tuple[str, list[str]]] = [("", [])]
    redirected = False
    try:
        for word in lexer:
            if word and not word.strip(_SEPARATORS):
                redirected = "<" in word or ">" in word
                if not redirected:
                    commands.append((word, []))
            elif redirected:
                redirected = False
            else:
                commands[-1][1].append(word)
    except ValueError as error:
        raise MigrateError(f"line {lexer.lineno}: {error}".lower()) from None
    return [(separator, words) for separator, words in commands if words]


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
