# SPDX-License-Identifier: Apache-2.0
"""Numbers that the proxy cannot use are refused, with the name of their option; the defaults are patient, and share the
limit of open files so that no kind of connection runs out of them."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command
from typer.testing import CliRunner

from vllm_ascend_pd import __version__
from vllm_ascend_pd.cli import REMOVED, REMOVED_OF_MIGRATE, app, main
from vllm_ascend_pd.decode.metaserver_allowlist import Allowlist
from vllm_ascend_pd.proxy import settings
from vllm_ascend_pd.proxy.server import Capacity, capacity
from vllm_ascend_pd.proxy.settings import ProxySettings

ENGINES = ("--prefill", "http://127.0.0.1:1", "--decode", "http://127.0.0.1:2")
OPTIONS = [
    option
    for param in get_command(app).commands["proxy"].params  # type: ignore[attr-defined]
    for option in (*param.opts, *param.secondary_opts)
]
NUMBERS = [
    option
    for option in OPTIONS
    if option.endswith(("-timeout", "--attempts", "-mib", "-concurrent", "-waiting")) or "-per-" in option
]


@pytest.mark.parametrize("option", NUMBERS)
def test_a_negative_number_is_refused_by_its_option(option: str) -> None:
    done = CliRunner().invoke(app, ["proxy", "--port", "0", *ENGINES, option, "-1"])
    assert done.exit_code == 2
    assert f"{option} must " in " ".join(done.output.split())


def test_the_proxys_source_names_options_that_exist() -> None:
    """In errors and in docstrings."""
    package = Path(settings.__file__).parent
    named = {
        (path.name, word)
        for path in package.rglob("*.py")
        for word in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", path.read_text())
    }
    assert len(named) >= 5
    assert {(file, word) for file, word in named if word not in OPTIONS} == set()


COMMANDS = get_command(app).commands  # type: ignore[attr-defined]


MOST_LINES = 34
"""Of a command's help, so that it fits on a screen."""


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_at_80_columns_fits_on_a_screen_and_shows_every_option_whole(command: str | None) -> None:
    at, params = ([], get_command(app).params) if command is None else ([command], COMMANDS[command].params)
    done = CliRunner().invoke(app, [*at, "--help"], env={"COLUMNS": "80"}, terminal_width=80)
    assert done.exit_code == 0
    assert all(len(line) <= 80 for line in done.output.splitlines())
    assert len(done.output.splitlines()) <= MOST_LINES
    shown = re.findall(r"^  (--[a-z0-9-]+)(?: / (--[a-z0-9-]+))?", done.output, re.MULTILINE)
    options = [option for param in params for option in (*param.opts, *param.secondary_opts) if option[:2] == "--"]
    assert sorted(filter(None, sum(shown, ()))) == sorted({*options, "--version", "--help"})
    assert not re.search(r"\u2026|--[a-z-]+-$", done.output, re.MULTILINE), "an option that is cut"


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_every_command_says_its_version(command: str | None) -> None:
    """Also without what it requires."""
    done = CliRunner().invoke(app, [*([] if command is None else [command]), "--version"])
    assert (done.exit_code, done.output) == (0, f"vllm-ascend-pd {__version__}\n")


@pytest.mark.parametrize(
    ("command", "removed"),
    [(["proxy", *ENGINES], REMOVED), (["migrate"], REMOVED_OF_MIGRATE)],
    ids=["proxy", "migrate"],
)
def test_each_option_that_is_gone_is_refused_by_name(
    command: list[str],
    removed: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, instead in removed.items():
        monkeypatch.setattr("sys.argv", ["vllm-ascend-pd", *command, f"{name}=1"])
        with pytest.raises(SystemExit) as end:
            main()
        said = f"vllm-ascend-pd: there is no option {name} any more: {instead}\n"
        assert (end.value.code, capsys.readouterr().err) == (2, said)


def test_there_are_25_options_and_none_that_is_gone() -> None:
    assert len(settings.options()) <= 25
    assert not {*REMOVED} & {*OPTIONS}


def test_defaults_are_as_patient_as_gateways_and_vllms_router() -> None:
    """vllm-router 0.1.17 serves 32,768 requests at a time, and lets 100 more wait for 60 s. nginx keeps its connections
    to servers for 60 s, some gateways for an hour. They must close one first: a request may be on its way on it."""
    settings = ProxySettings(prefill=[ENGINES[1]], decode=[ENGINES[3]], metaserver_url="http://127.0.0.1:3")
    assert settings.keep_alive_timeout > 3600
    assert settings.max_concurrent + settings.max_waiting >= 32768 + 100
    assert settings.queue_timeout >= 60
    assert settings.silence_timeout >= 1800  # vllm-router's for a whole request


@pytest.mark.parametrize("url", ["http://p:8700", "http://p:8700/", "http://[fd00::1]", "https://p"])
def test_a_metaserver_url_without_a_path_gets_the_default(url: str) -> None:
    """Decode posts to no other path, unless its allow-list names one."""
    assert metaserver_url(url) == url.rstrip("/") + "/v1/metaserver"
    assert metaserver_url(other := url.rstrip("/") + "/pd/metaserver") == other


@pytest.mark.parametrize(
    "url", ["p:8700", "ftp://p/v1/metaserver", "http://p/v1/metaserver?x=1", "http://u@p", "http://p#x", "http://p/%41"]
)
def test_a_metaserver_url_that_decode_refuses_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the metaserver URL"):
        metaserver_url(url)
    assert Allowlist(["http://p/"], "p").refusal(url) not in (None, "matches no URL in peers")


def test_an_engine_is_the_same_however_its_host_is_spelled() -> None:
    twice = ["http://LOCALHOST:1", "HTTP://localhost:1/"]
    with pytest.raises(ValueError, match="the same prefill engine is given twice"):
        ProxySettings(prefill=twice, decode=[ENGINES[3]], metaserver_url="http://p")
    with pytest.raises(ValueError, match="as a prefill and as a decode engine"):
        ProxySettings(prefill=twice[:1], decode=twice[1:], metaserver_url="http://p")


def metaserver_url(url: str) -> str:
    return ProxySettings(prefill=[ENGINES[1]], decode=[ENGINES[3]], metaserver_url=url).metaserver_url


# --- open files ------------------------------------------------------------------------------------------------


def test_45312_files_are_enough_for_the_defaults() -> None:
    """As docs/proxy.md says."""
    assert capacity(45_312, 1024, 32768) == Capacity(1024, 32768, 36_864, 4096)
    assert capacity(45_311, 1024, 32768) == Capacity(1024, 32767, 36_863, 4096)


def test_the_queue_shrinks_before_the_number_of_served_requests() -> None:
    assert capacity(20_000, 1024, 32768) == Capacity(1024, 9052, 13_148, 2500)
    assert capacity(1024, 1024, 32768) == Capacity(80, 0, 320, 128)


@given(st.integers(300, 100_000), st.integers(1, 10_000), st.integers(0, 100_000))
def test_connections_never_need_more_files_than_there_are(files: int, concurrent: int, waiting: int) -> None:
    found = capacity(files, concurrent, waiting)
    assert 1 <= found.concurrent <= concurrent
    assert 0 <= found.waiting <= waiting
    # Beside the line, a request that is served has room for its client and its tickets.
    assert found.connections - found.waiting >= 2 * found.concurrent
    assert found.connections + 2 * found.concurrent + found.backlog <= files
