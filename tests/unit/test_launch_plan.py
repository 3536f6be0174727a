# SPDX-License-Identifier: Apache-2.0
"""hosts.yaml to commands: what each host is told, what is refused and under which key, and that nothing of the file can
become more than a word of a command."""

import json
import shlex
import subprocess
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.main import get_command

from vllm_ascend_pd import cli
from vllm_ascend_pd.tools.launch.cluster import dry_run
from vllm_ascend_pd.tools.launch.hosts import HostsError, parse_hosts
from vllm_ascend_pd.tools.launch.plan import LaunchedProcess, LaunchPlan, make_plan
from vllm_ascend_pd.tools.launch.shape import EngineOptionsError, ParallelSizes

PYTHON, REPOSITORY = "/opt/python", "/opt/pd"

TWO_NODES = """\
model: /models/m
device: a3
hosts:
  a: {address: 10.0.0.1, interface: eth0}
  b: {address: 10.0.0.2, ssh: user@b}
prefill:
  - hosts: [a]
    tp: 8
decode:
  - hosts: [a, b]
    tp: 4
    dp: 4
proxy:
  host: a
"""


def plan(text: str) -> LaunchPlan:
    return make_plan(parse_hosts(text), PYTHON, REPOSITORY)


def options(process: LaunchedProcess) -> dict[str, str]:
    """Of its launch script, without what goes to vLLM."""
    words = list(process.command)
    start = next(i for i, word in enumerate(words) if word.endswith(".sh")) + 1
    words = words[start : words.index("--")] if "--" in words else words[start:]
    return dict(zip(words[::2], words[1::2], strict=True))


def test_two_nodes() -> None:
    made = plan(TWO_NODES)
    assert [process.name for process in made.processes] == ["prefill-0", "decode-0-node-0", "decode-0-node-1", "proxy"]
    prefill, first, second, proxy = made.processes
    assert options(prefill)["--devices"] == "0,1,2,3,4,5,6,7"
    assert options(prefill)["--decode-host"] == "10.0.0.2"  # the last of two; each is named
    assert options(first)["--devices"] == "8,9,10,11,12,13,14,15"  # what prefill has left
    assert options(second)["--devices"] == "0,1,2,3,4,5,6,7"
    assert [options(node).get("--node-rank") for node in (first, second)] == [None, "1"]
    assert {options(node)["--head-address"] for node in (first, second)} == {"10.0.0.1"}
    assert {options(node)["--metaserver"] for node in (first, second)} == {"http://10.0.0.1:8000"}
    assert [process.ssh for process in made.processes] == ["10.0.0.1", "10.0.0.1", "user@b", "10.0.0.1"]
    assert proxy.command[-2:] == ("--decode", "http://10.0.0.1:8200")
    assert made.endpoint == "http://10.0.0.1:8000"


def test_ray_runs_on_all_nodes_and_vllm_on_the_first() -> None:
    made = plan(TWO_NODES.replace("    dp: 4\n", "    dp: 4\n    executor: ray\n"))
    commands = {process.name: process.command for process in made.processes}
    assert list(commands) == ["prefill-0", "decode-0-ray-0", "decode-0", "decode-0-ray-1", "proxy"]
    assert [name for name, command in commands.items() if "--ray-node" in command] == [
        "decode-0-ray-0",
        "decode-0-ray-1",
    ]


def test_the_proxys_command_is_one_that_it_takes() -> None:
    text = TWO_NODES.replace("10.0.0.1", "fd00::1").replace("a: {address: fd00::1", "a: {address: 'fd00::1'")
    text += "  listen: '::'\n  args: [--read-timeout, '9']\nmetaserver_token: /k/token\n"
    *_, proxy = plan(text).processes
    assert proxy.command[:4] == (PYTHON, "-m", "vllm_ascend_pd.cli", "proxy")
    words = list(proxy.command[4:])
    taken = get_command(cli.app).commands["proxy"].make_context("proxy", list(words)).params
    assert {name: taken[name] for name in ("host", "port", "read_timeout")} == {
        "host": "::", "port": 8000, "read_timeout": 9.0,
    }  # fmt: skip
    assert (taken["metaserver_url"], taken["decode"]) == ("http://[fd00::1]:8000", ["http://[fd00::1]:8200"])
    assert taken["metaserver_token_file"] == "/k/token"
    for option in {word for word in words if word.startswith("--")} - {"--read-timeout"}:
        with pytest.raises(HostsError, match=f"{option} is not for proxy.args"):
            plan(TWO_NODES + f"  args: ['{option}=1']\n")


def test_a_dry_run_shows_where_and_what() -> None:
    made = plan(TWO_NODES)
    lines = dry_run(made).splitlines()
    assert lines[:-2:2] == [
        "# prefill-0 on a (ssh 10.0.0.1)",
        "# decode-0-node-0 on a (ssh 10.0.0.1)",
        "# decode-0-node-1 on b (ssh user@b)",
        "# proxy on a (ssh 10.0.0.1)",
    ]
    assert [tuple(shlex.split(line)) for line in lines[1:-2:2]] == [process.command for process in made.processes]
    assert lines[-2].startswith("# over ssh by: ssh -tt ")
    assert "# prefill-0 on a (here)" in dry_run(plan(TWO_NODES.replace("interface: eth0", "local: true")))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tp: 8", "tpp: 8", "prefill[0].tpp: unknown key"),
        ("tp: 8", "tp: eight", "prefill[0].tp: expected `int`, got `str`"),
        ("tp: 8", "tp: 0", "prefill[0].tp: expected `int` >= 1"),
        ("tp: 8", "tp: 17", "prefill[0].devices: prefill-0 needs 17 NPUs on host a, 16 of 16 are left"),
        ("tp: 8", "tp: 12", "decode[0].devices: decode-0 needs 8 NPUs on host a, 4 of 16 are left"),
        ("tp: 8", "devices: [16]", "prefill[0].devices: an A3 server has NPUs 0 to 15, not 16"),
        ("tp: 8", "tp: 8\n    tp: 4", "line 9: tp is listed twice"),
        ("tp: 8", "kv_port: 1", "prefill[0].kv_port: --kv-port: only for decode"),
        ("tp: 8", "port: 65536", "prefill[0].port: expected `int` <= 65535"),
        ("tp: 8", "devices: [0, 0]", "prefill[0].devices: prefill-0 needs 1 NPUs on host a, 2 are listed"),
        ("tp: 8", "tp: 2\n    devices: [0, 0]", "prefill[0].devices: NPU 0 of host a is already used by prefill-0"),
        ("tp: 8", "load_failure_policy: fail", "prefill[0].load_failure_policy: --load-failure-policy: only for"),
        ("tp: 8", "port: 8000", "prefill[0].port: port 8000 of host a is already used by the proxy"),
        ("tp: 8", "head_port: 9", "prefill[0].head_port: is only for engines on several hosts"),
        ("dp: 4", "dp: 3", "decode[0].hosts: a node has 6 devices, a data-parallel replica 4"),
        ("tp: 4\n    dp: 4", "tp: 7", "decode[0].hosts: tensor x pipeline x data parallel is 7 x 1 x 1 = 7"),
        ("tp: 4\n    dp: 4", "tp: 16\n    dp: 1\n    pp: 3", "decode-0 needs 24 NPUs on host a, 8 of 16 are left"),
        ("dp: 4", "dp: 4\n    kv_port: 21598", "decode[0].kv_port: --kv-port 21598: Mooncake listens on"),
        ("dp: 4", "dp: 4\n    kv_port: 8099", "decode[0].kv_port: port 8100 of host a is already"),
        ("[a, b]", "[a, c]", "decode[0].hosts[1]: no host 'c' in `hosts`"),
        ("[a, b]", "[a, a]", "decode[0].hosts: lists a host twice"),
        ("host: a", "host: z", "proxy.host: no host 'z' in `hosts`"),
        ("10.0.0.1", "node-a", "hosts.a.address: 'node-a' is not an IP address"),
        ("10.0.0.2", "10.0.0.1", "hosts.b.address: 10.0.0.1 is already the address of a: list"),
        ("10.0.0.1", "127.0.0.1", "hosts.a.address: 127.0.0.1 is a loopback address: other hosts cannot reach a"),
        ("10.0.0.2", "'::1'", "hosts.b.address: ::1 is a loopback address: other hosts cannot reach b"),
        ("user@b", "-oProxyCommand=x", "hosts.b.ssh: '-oProxyCommand=x' is empty or begins"),
        ("ssh: user@b", "ssh: b, local: true", "hosts.b.ssh: contradicts `local: true`"),
        ("device: a3", "device: a4", "device: invalid enum value 'a4'"),
        ("device: a3", "name: x\ndevice: a3", "name: was removed: clusters need no name"),
        ("device: a3", "state: /x\ndevice: a3", "state: was removed: logs go to the launcher's"),
        ("device: a3", "start_seconds: 9\ndevice: a3", "start_seconds: was removed: the launcher waits"),
        ("device: a3", "stop_seconds: 9\ndevice: a3", "stop_seconds: was removed: the launcher"),
        ("dp: 4", "dp: 4\n    engine_id: d0", "decode[0].engine_id: was removed: vLLM makes a new one"),
        ("tp: 8", "name: x", "prefill[0].name: unknown key"),
        ("proxy:\n  host: a\n", "", "proxy: is missing"),
        ("prefill:", "prefill: [", "line 7: expected the node content"),
        ("tp: 8", "env: {HF_TOKEN: abc}", "prefill[0].env.HF_TOKEN: looks like a secret"),
        ("tp: 8", "args: [--api-key=abc]", "prefill[0].args[0]: --api-key: every user"),
        ("tp: 8", "args: [-tp, '3']", "prefill[0].args[0]: --tensor-parallel-size is set here: use --tp"),
        ("tp: 8", "args: [--tensor_parallel_size=3]", "args[0]: --tensor-parallel-size is set here: use --tp"),
        ("host: a", "host: a\n  args: [--port, '8001']", "proxy.args[0]: --port is not for proxy.args: use"),
        ("host: a", "host: a\n  args: [--prefill=http://x:1]", "proxy.args[0]: --prefill is not for proxy.args"),
        ("host: a", "host: a\n  args: [--metaserver-port, '1']", "--metaserver-port is not supported here"),
        ("host: a", 'host: a\n  listen: "a\\nb"', "proxy.listen: must be one printable line"),
        ("/models/m", "''", "model: '' is empty or begins with a dash"),
        ("/models/m", "--help", "model: '--help' is empty or begins with a dash"),
        ("device: a3", "python: ''\ndevice: a3", "python: '' is empty"),
        ("device: a3", "served_model_name: ''\ndevice: a3", "served_model_name: '' is empty"),
        ("device: a3", "ticket_secret: ''\ndevice: a3", "ticket_secret: '' is empty"),
        ("tp: 8", "extra: {lease: 3}", "prefill[0].extra: kv_connector_extra_config: unknown key `lease`"),
        ("tp: 8", "extra: {write_timeout_s: -1}", "prefill[0].extra: kv_connector_extra_config: `write"),
        ("dp: 4", "extra: {metaserver_allowlist: []}", "decode[0].extra: --extra metaserver_allowlist: use the script"),
        ("tp: 8", "extra: &a {b: *a}", "a value is too deep, or within itself"),
        ("tp: 8", "extra: {a: !!python/name:os.system ''}", "could not determine a constructor"),
        ("tp: 8", 'args: ["a\\nb"]', "prefill[0].args[0]: must be one printable line"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_its_key(old: str, new: str, message: str) -> None:
    assert old in TWO_NODES
    with pytest.raises(HostsError) as caught:
        plan(TWO_NODES.replace(old, new, 1))
    assert message in str(caught.value)
    assert "abc" not in str(caught.value)


def test_one_machine_plays_several_hosts_without_npus() -> None:
    text = TWO_NODES.replace("a3", "cpu").replace("10.0.0.", "127.0.0.")
    assert {process.ssh for process in plan(text).processes} == {"127.0.0.1", "user@b"}
    with pytest.raises(HostsError, match=r"hosts\.b\.address: 127\.0\.0\.2 is a loopback"):
        plan(text.replace("127.0.0.1", "10.0.0.1"))


@given(st.integers(1, 8), st.integers(1, 3), st.integers(1, 8), st.integers(1, 6))
def test_each_replica_is_on_one_node(tp: int, pp: int, dp: int, nodes: int) -> None:
    try:
        shape = ParallelSizes(tp, pp, dp, nodes)
    except EngineOptionsError:
        assume(False)
    listeners = [shape.listeners(rank) for rank in range(nodes)]
    assert [index for node in listeners for index in node] == list(range(dp))
    for rank, node in enumerate(listeners):
        given = shape.arguments(rank, "10.0.0.1", 1)
        assert ("--headless" in given) == (rank > 0)
        if "--data-parallel-start-rank" in given:
            assert int(given[given.index("--data-parallel-start-rank") + 1]) == node.start
        if "--data-parallel-size-local" in given:
            assert int(given[given.index("--data-parallel-size-local") + 1]) == len(node)


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z"), include_characters=" "), max_size=30)


@settings(max_examples=200, deadline=None)
@given(WORDS, st.lists(WORDS, max_size=3), WORDS)
def test_every_word_of_the_file_reaches_the_other_side_as_one_word(model: str, args: list[str], value: str) -> None:
    assume(model and not model.startswith("-"))
    args = [word for word in args if not word.startswith("-")]
    quoted = partial(json.dumps, ensure_ascii=False)
    text = TWO_NODES.replace("/models/m", quoted(model)).replace(
        "tp: 8", f"args: {quoted(args)}\n    env: {{VALUE: {quoted(value)}}}"
    )
    made = plan(text)
    prefill = made.processes[0]
    *ssh, host, line = prefill.local_command
    assert (ssh[0], ssh[-1], host) == ("ssh", "--", "10.0.0.1")
    assert shlex.split(line) == list(prefill.command)
    assert options(prefill)["--model"] == model
    assert f"VALUE={value}" in prefill.command
    assert list(prefill.command[prefill.command.index("--") + 1 :]) == args


def test_a_shell_on_the_other_side_sees_the_same_words() -> None:
    hostile = ["$(touch x)", "`id`", "a;b", "it's", 'a"b', "*", "~", "!x", "\\", "a b", "", "|", "-", "--", "é"]
    process = LaunchedProcess("p", "a", "a", ("printf", "%s\\0", *hostile))
    line = process.local_command[-1]
    output = subprocess.run(["/bin/sh", "-c", line], capture_output=True, check=True, timeout=10).stdout
    assert output.decode().split("\0")[:-1] == hostile
