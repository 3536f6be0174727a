# SPDX-License-Identifier: Apache-2.0
"""hosts.yaml to commands: what each host is told, what is refused and under which key, and that nothing of the file can
become more than a word of a command."""

import json
import shlex
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from vllm_ascend_pd import cli
from vllm_ascend_pd.tools.launch.cluster import local_command
from vllm_ascend_pd.tools.launch.engine import ParallelSizes
from vllm_ascend_pd.tools.launch.hosts import LaunchedProcess, make_plan, parse_hosts
from vllm_ascend_pd.tools.vllm_serve import CommandError

PYTHON, REPOSITORY = "/opt/python", "/opt/pd"

TWO_NODES = """\
hosts:
  a: {address: 10.0.0.1}
  b: {address: 10.0.0.2, ssh: user@b}
args: [--device, a3, --, /models/m]
prefill:
  - hosts: [a]
    args: [--head-port, 8, --, -tp, 8]
decode:
  - hosts: [a, b]
    args: [--, -tp, 4, -dp, 4]
secret_file: /k/secret
proxy:
  host: a
"""


def plan(text: str) -> list[LaunchedProcess]:
    return make_plan(parse_hosts(text), PYTHON, REPOSITORY)


def options(process: LaunchedProcess) -> dict[str, str]:
    """Of its launch script, without what goes to vLLM."""
    words = list(process.command)
    start = next(i for i, word in enumerate(words) if word.endswith(".sh")) + 1
    words = words[start : words.index("--")] if "--" in words else words[start:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_two_nodes() -> None:
    made = plan(TWO_NODES)
    assert [process.name for process in made] == ["prefill-0", "decode-0-node-0", "decode-0-node-1", "proxy"]
    prefill, first, second, proxy = made
    assert options(prefill) == {
        "--address": "10.0.0.1", "--secret-file": "/k/secret", "--device": "a3", "--head-port": "8",
    }  # fmt: skip
    assert prefill.command[-4:] == ("--", "/models/m", "-tp", "8")
    assert [options(node)["--node-rank"] for node in (first, second)] == ["0", "1"]
    assert {options(node)["--head-address"] for node in (first, second)} == {"10.0.0.1"}
    assert {options(node)["--secret-file"] for node in (first, second)} == {"/k/secret"}
    assert proxy.command[proxy.command.index("--secret-file") + 1] == "/k/secret"
    # Without the key, each process looks at the default path of its own host.
    plain = plan(TWO_NODES.replace("secret_file: /k/secret\n", ""))
    assert not [process.name for process in plain if "--secret-file" in process.command]
    assert [process.ssh for process in made] == ["10.0.0.1", "10.0.0.1", "user@b", "10.0.0.1"]
    assert proxy.command[-2:] == ("--decode", "http://10.0.0.1:8200")
    *_, proxy = plan(TWO_NODES.replace("-dp, 4", "-dp, 4, --port, 8300"))
    assert proxy.command[-2:] == ("--decode", "http://10.0.0.1:8300")
    assert {process.ssh for process in plan(TWO_NODES.replace("ssh: user@b", "local: true"))} == {"10.0.0.1", None}


def test_the_proxys_command_is_one_that_it_takes() -> None:
    text = TWO_NODES.replace("10.0.0.1", "'fd00::1'") + "  args: [--read-timeout, 9, --host, '::']\n"
    *_, proxy = plan(text)
    assert proxy.command[:4] == (PYTHON, "-m", "vllm_ascend_pd.cli", "proxy")
    taken = get_command(cli.app).commands["proxy"].make_context("proxy", list(proxy.command[4:])).params
    assert {name: taken[name] for name in ("host", "port", "read_timeout")} == {
        "host": "::", "port": 8000, "read_timeout": 9.0,
    }  # fmt: skip
    assert (taken["metaserver_url"], taken["decode"]) == ("http://[fd00::1]:8000", ["http://[fd00::1]:8200"])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    args: [--head", "    tp: 8\n    args: [--head", "`$.prefill[0]`; it was removed: give vLLM its own"),
        ("prefill:", "model: m\nprefill:", "`model`; it was removed: the model comes first behind the --"),
        ("prefill:", "kv_port: 1\nprefill:", "field `kv_port`; it was removed: give --kv-port in args"),
        ("prefill:", "state: /x\nprefill:", "field `state`; it was removed: the launcher keeps no files"),
        ("host: a", "host: a\n  listen: b", "field `listen` - at `$.proxy`; it was removed: give --host in args"),
        ("prefill:", "  c: {address: 10.0.0.3, interface: e}\nprefill:", "while parsing a block mapping"),
        ("ssh: user@b", "interface: eth0", "`$.hosts[...]`; it was removed: set GLOO_SOCKET"),
        ("proxy:", "proxi:", "unknown field `proxi`"),
        ("proxy:\n  host: a\n", "", "missing required field `proxy`"),
        ("[--head-port, 8", "[true", "Expected `int | float | str`, got `bool` - at `$.prefill[0].args[0]`"),
        ("host: a", "host: a\n  port: 65536", "Expected `int` <= 65535 - at `$.proxy.port`"),
        ("[a, b]", "[]", "Expected `array` of length >= 1 - at `$.decode[0].hosts`"),
        ("host: a", "host: a\n  host: b", "host is listed twice\n  in \"<unicode string>\", line 14"),
        ("prefill:", "prefill: [", "expected the node content"),
        ("[a, b]", "[a, c]", "hosts: no host 'c', which another key names"),
        ("host: a", "host: z", "hosts: no host 'z', which another key names"),
        ("[--head-port", "[--tpp", "prefill[0].args: No such option: --tpp"),
        ("[--head-port", "[--tp", "prefill[0].args: there is no option --tp any more: give vLLM its own"),
        ("[--head-port, 8", "[--head-port, eight", "prefill[0].args: Invalid value for '--head-port': "),
        ("-tp, 8", "-tp, eight", "prefill[0].args: --tensor-parallel-size: 'eight' is no number"),
        ("[--head-port, 8", "[--help", "prefill[0].args: --help and --dry-run start no engine"),
        ("[--head-port, 8", "[--kv-port, 1", "prefill[0].args: --kv-port: only for decode"),
        ("-dp, 4", "-dp, 3", "decode[0].args: a node has 6 devices, a data-parallel replica 4"),
        ("[--, -tp, 4", "[--kv-port, 21598, --, -tp, 4", "decode[0].args: --kv-port 21598: Mooncake listens on"),
        ("--device, a3", "--device, a4", "prefill[0].args: Invalid value for '--device': "),
        ("/models/m", "''", "prefill[0].args: the model comes first behind the --, not ''"),
        (", /models/m", "", "prefill[0].args: the model comes first behind the --, not '-tp'"),
        ("[--head-port, 8", "[--extra, lease=3", "prefill[0].args: kv_connector_extra_config: unknown key `lease`"),
        ("-tp, 8]", "-tp, 8]\n    env: {HF_TOKEN: abc}", "prefill[0].env.HF_TOKEN: looks like a secret"),
        ("-tp, 8]", "-tp, 8, --api-key=abc]", "prefill[0].args: --api-key: every user"),
        ("-tp, 8]", "-tp, 8, -n, 3]", "prefill[0].args: --nnodes is set here: use --nodes"),
        ("-tp, 8]", '-tp, 8, "a\\nb"]', "prefill[0].args: 'a\\nb' has more than one line"),
        ("[--head-port, 8", "&a [*a", "got `array` - at `$.prefill[0].args[0]`"),
        ("[--head-port, 8", "[!!python/name:os.system ''", "could not determine a constructor"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_its_key(old: str, new: str, message: str) -> None:
    assert old in TWO_NODES
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        plan(TWO_NODES.replace(old, new, 1))
    assert message in str(caught.value)
    assert "abc" not in str(caught.value)


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 8), st.integers(1, 6))
def test_each_replica_is_on_one_node(tp: int, pp: int, dp: int, nodes: int) -> None:
    try:
        shape = ParallelSizes(tp, pp, dp, nodes)
    except CommandError:
        assume(False)
    placed = 0
    for rank in range(nodes):
        given = shape.arguments(rank, "10.0.0.1", 1)
        values = dict(pairwise(given))
        assert ("--headless" in given) == (rank > 0)
        assert int(values.get("--data-parallel-start-rank", placed)) == placed
        placed += int(values.get("--data-parallel-size-local", 0 if shape.spans_nodes and rank else dp))
    assert placed == dp


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" "), max_size=30)


@settings(max_examples=30, deadline=None)
@given(WORDS, st.lists(WORDS, max_size=3), WORDS)
def test_every_word_of_the_file_reaches_the_other_side_as_one_word(model: str, args: list[str], value: str) -> None:
    assume(model and not model.startswith("-"))
    args = [word for word in args if not word.startswith("-")]
    quoted = partial(json.dumps, ensure_ascii=False)
    text = TWO_NODES.replace("/models/m", quoted(model)).replace(
        "-tp, 8]", f"-tp, 8, *w]\n    env: {{VALUE: {quoted(value)}}}".replace("*w", quoted(args)[1:-1])
    )
    prefill = plan(text)[0]
    *ssh, host, line = local_command(prefill)
    assert (ssh[0], ssh[-1], host) == ("ssh", "--", "10.0.0.1")
    assert shlex.split(line) == list(prefill.command)
    assert f"VALUE={value}" in prefill.command
    assert list(prefill.command[prefill.command.index("--") + 1 :]) == [model, "-tp", "8", *args]
