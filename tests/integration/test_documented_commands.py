# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/*.md tell a reader to run can be run: programs, options, paths, bodies and URLs exist. What
needs nothing but a moment is run by other tests; this one parses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tomllib
import typer
from starlette.routing import Match

from vllm_ascend_pd.cli import app
from vllm_ascend_pd.config import parse_config
from vllm_ascend_pd.proxy.app import create_app
from vllm_ascend_pd.proxy.settings import ProxySettings

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md"), *REPOSITORY.glob("examples/*/README.md")]
)
PROGRAMS = re.compile(r"(?:\w+=\S+ )*(vllm-ascend-pd|vllm|scripts/\S+|benchmarks/\S+|python|pip|curl|\(umask)(?: |$)")
COMMANDS = typer.main.get_command(app)


def fences(page: Path) -> Iterator[str]:
    return (body for _, body in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL))


def documented() -> Iterator[tuple[str, str]]:
    """(page, command): of fences that begin with a program of ours, or one that a reader has."""
    for page in PAGES:
        for body in fences(page):
            if PROGRAMS.match(body):
                for line in body.replace("\\\n", " ").splitlines():
                    yield page.name if page.parent == REPOSITORY else f"{page.parent.name}/{page.name}", line


CASES = sorted(set(documented()))


@cache
def help_of(*command: str) -> str:
    environment = {**os.environ, "PYTHON": sys.executable}  # launch scripts run our code
    run = subprocess.run(
        [*command, "--help"], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def options(words: list[str]) -> list[str]:
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def ours(words: list[str]) -> None:
    """Options, arguments and their number; not whether files are there or servers answer."""
    command = COMMANDS.commands[words[0]]  # type: ignore[attr-defined]
    context = command.make_context(words[0], [], resilient_parsing=True)
    command.make_parser(context).parse_args(words[1:])


def script(words: list[str]) -> None:
    path = REPOSITORY / words[0]
    assert path.is_file()
    interpreter = [sys.executable] if path.suffix == ".py" else ["bash"]
    if len(words) > 1:
        text = help_of(*interpreter, str(path))
        assert all(re.search(rf"{option}\b", text) for option in options(words)), text
    for word in words[1:]:
        if word.startswith("examples/"):
            assert (REPOSITORY / word).is_file()


def vllm(words: list[str]) -> None:
    assert words[0] == "serve"
    if "--kv-transfer-config" in words:
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        assert transfer["kv_role"] in ("kv_producer", "kv_consumer")
        parse_config(transfer.get("kv_connector_extra_config", {}))


def pip(words: list[str]) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\.\[(\w+)\]", " ".join(words)):
        assert extra in project["optional-dependencies"]
    for file in (word for word in words if word.endswith(".txt")):
        assert (REPOSITORY / file).is_file()


def curl(words: list[str], token: Path) -> None:
    """The proxy has the path, for the method; a body is JSON."""
    [url] = [word for word in words if re.match(r"(http://)?[\d.]+:\d+", word)]
    body = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "GET" if body is None else "POST"
    if body is not None:
        json.loads(body)
    settings = ProxySettings(
        prefill=("http://127.0.0.1:8100",),
        decode=("http://127.0.0.1:8200",),
        metaserver_url="http://127.0.0.1:8000/v1/metaserver",
        admin_token_file=str(token),
    )
    path = urlsplit(url if "//" in url else f"http://{url}").path
    scope = {"type": "http", "path": path, "method": method}
    assert any(route.matches(scope)[0] is Match.FULL for route in create_app(settings).routes), (method, path)


@pytest.fixture
def token(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text("an-admin-token-of-some-length-0123456789")
    file.chmod(0o600)
    return file


def test_there_are_commands() -> None:
    assert len(CASES) > 20
    assert {"README.md", "docs/operations.md", "docs/doctor.md"} <= {page for page, _ in CASES}


@pytest.mark.parametrize(("page", "line"), CASES)
def test_command(page: str, line: str, token: Path) -> None:
    assert PROGRAMS.match(line), "a line that is no command among commands"
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"\w+=\S*", words[0]):
        words = words[1:]
    match words[0]:
        case "vllm-ascend-pd":
            ours(words[1:])
        case "vllm":
            vllm(words[1:])
        case "pip":
            pip(words[1:])
        case "curl":
            curl(words[1:], token)
        case "python" if words[1:3] == ["-m", "pytest"]:
            assert (REPOSITORY / words[3]).exists()
        case "python":
            script(words[1:])
        case "(umask":
            assert "openssl rand" in line  # a token's file
        case _:
            script(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_paths_and_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert "://" in link or (page.parent / link).exists(), link
    for path in re.findall(
        r"`((?:docs|tests|scripts|examples|benchmarks|vllm_ascend_pd|csrc|requirements)/[^\s`*{]+)`", text
    ):
        assert (REPOSITORY / path).exists(), path


def test_options_that_operations_names_are_the_proxys() -> None:
    text = (REPOSITORY / "docs" / "operations.md").read_text()
    known = {name for param in COMMANDS.commands["proxy"].params for name in param.opts}  # type: ignore[attr-defined]
    known |= {name for param in COMMANDS.commands["doctor"].params for name in param.opts}  # type: ignore[attr-defined]
    known |= {"--max-num-seqs"}  # vLLM's
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) <= known
