# SPDX-License-Identifier: Apache-2.0
"""scripts/launch_cluster.sh from start to end: the real scripts, agents and proxy, stand-ins for vLLM and for ssh.

The stand-in for ssh does what sshd does with a command, on this machine. The stand-in for vLLM serves `/health`, and
has a child of its own that ignores SIGTERM, as workers of an engine that hangs do.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from harness.documented import documented
from harness.ports import release_port, reserve_ports
from harness.waiting import wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
HOST, HOST_B = "127.0.0.1", "127.0.0.2"
WAIT_SECONDS = 120.0

SSH = """\
#!/usr/bin/env bash
while [[ $1 != -- ]]; do shift; done
printf '%s\\n' "$2" >>"$SSH_LOG"
if [[ $2 == gone ]]; then
  echo "ssh: connect to host gone port 22: No route to host" >&2
  exit 255
fi
echo "Welcome to $2" # a login shell's greeting is not the agent's
shift 2
exec bash -c "$*"
"""

ENGINE = """\
import http.server, os, subprocess, sys, time
arguments = sys.argv[1:]
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn, __file__])
print("stand-in for", *arguments, flush=True)
if os.environ.get("STANDIN") == "dies":
    sys.exit("out of NPU memory")
if "--headless" in arguments:
    time.sleep(600)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.environ.get("STANDIN") == "never" else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

place = (arguments[arguments.index("--host") + 1], int(arguments[arguments.index("--port") + 1]))
http.server.ThreadingHTTPServer(place, Handler).serve_forever()
"""


class Site:
    """Hosts `a` and `b`, which are both this machine, and a hosts.yaml for them."""

    def __init__(self, folder: Path, ports: range) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.endpoint = f"http://{HOST_B}:{ports[2]}"
        self._ports = ports
        self._launchers: list[subprocess.Popen[str]] = []
        (folder / "bin").mkdir()
        for name, text in (("bin/ssh", SSH), ("vllm", f"#!{sys.executable}\n{ENGINE}")):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.hosts = folder / "hosts.yaml"

    def write(self, *, spread: bool = True, second: str = "b", decode: str = "", start_seconds: float = 120) -> None:
        """A decode engine of two hosts, if `spread`; `decode` is what its stand-ins are told to do."""
        http, kv, proxy, head = self._ports[0:2], self._ports[3:5], self._ports[2], self._ports[5]
        vllm = json.dumps(str(self.folder / "vllm"))
        nodes = f"hosts: [a, b], head_port: {head}" if spread else "hosts: [b]"
        self.hosts.write_text(f"""\
name: test
model: "a model's $(touch {self.folder}/owned); name"
device: cpu
state: {self.state}
start_seconds: {start_seconds}
stop_seconds: 1
hosts:
  a: {{address: {HOST}, ssh: a}}
  b: {{address: {HOST_B}, ssh: {second}}}
prefill:
  - {{hosts: [a], port: {http[0]}, env: {{VLLM: {vllm}}}}}
decode:
  - {{{nodes}, dp: 2, port: {http[1]}, kv_port: {kv[0]},
     env: {{VLLM: {vllm}, STANDIN: "{decode}"}}}}
proxy: {{host: b, port: {proxy}}}
""")

    def launch(self, *options: str) -> subprocess.Popen[str]:
        python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        launcher = subprocess.Popen(
            [str(REPOSITORY / "scripts/launch_cluster.sh"), str(self.hosts), *options],
            env=os.environ
            | {
                "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                "PYTHON": sys.executable,
                "PYTHONPATH": python_path,
                "SSH_LOG": str(self.folder / "ssh.log"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._launchers.append(launcher)
        return launcher

    def serving(self, launcher: subprocess.Popen[str]) -> list[str]:
        """What the launcher says until it serves."""
        assert launcher.stdout is not None
        lines = []
        for line in launcher.stdout:
            lines.append(line.rstrip())
            if line.startswith("serving at"):
                return lines
        pytest.fail("\n".join(lines))

    def groups(self) -> dict[str, int]:
        """The process group of each process that was started."""
        return {path.stem: json.loads(path.read_text())["pid"] for path in self.state.glob("test/[pd]*.json")}

    def alive(self) -> list[int]:
        """All processes of all that was ever started here, agents included."""
        mark = str(self.folder)
        found = []
        for process in psutil.process_iter():
            try:
                ours = mark in " ".join(process.cmdline()) or os.getpgid(process.pid) in self._started
                if ours and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
            except (psutil.NoSuchProcess, ProcessLookupError):
                continue
        return found

    _started: frozenset[int] = frozenset()

    def note_groups(self) -> dict[str, int]:
        groups = self.groups()
        self._started |= frozenset(groups.values())
        return groups

    def close(self) -> None:
        self.note_groups()
        for launcher in self._launchers:
            launcher.kill()
            launcher.communicate(timeout=WAIT_SECONDS)
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    ports = reserve_ports(6)
    site = Site(tmp_path, ports)
    try:
        yield site
    finally:
        site.close()
        for port in ports:
            release_port(port)


def ended(launcher: subprocess.Popen[str]) -> str:
    """Returns what it prints until its end."""
    output, _ = launcher.communicate(timeout=WAIT_SECONDS)
    return output


eventually = partial(wait_until, timeout_s=WAIT_SECONDS)


def test_start_and_ctrl_c(site: Site) -> None:
    site.write()
    launcher = site.launch()
    said = site.serving(launcher)
    ready = [re.sub(r" ready after \d+ s$", "", line) for line in said if " ready after " in line]
    assert sorted(ready[:3]) == ["decode-0-node-0 on a", "decode-0-node-1 on b", "prefill-0 on a"]
    assert ready[3:] == ["proxy on b"]
    assert said[-1] == f"serving at {site.endpoint}"
    health = httpx.get(f"{site.endpoint}/health", trust_env=False).json()
    assert health["status"] == "ok"
    assert sorted((site.folder / "ssh.log").read_text().split()) == ["a", "a", "b", "b"]
    log = (site.state / "test/prefill-0.log").read_text()
    assert f"serve a model's $(touch {site.folder}/owned); name --host" in log
    assert not (site.folder / "owned").exists()

    groups = site.note_groups()
    assert len(groups) == 4
    launcher.send_signal(signal.SIGINT)
    output = ended(launcher)
    assert launcher.returncode == 130, output
    assert output.splitlines()[-1] == "all stopped"
    assert site.alive() == []
    assert not (site.state / "test/cluster.json").exists()


def test_a_node_that_cannot_start_ends_all(site: Site) -> None:
    site.write(decode="dies")
    launcher = site.launch()
    output = ended(launcher)
    assert site.note_groups() == {}  # nothing that runs is recorded
    assert launcher.returncode == 1
    assert re.search(r"error: decode-0-node-. on . ended with code 1; the end of .*decode-0-node-.\.log:", output)
    assert "out of NPU memory" in output
    assert output.splitlines()[-1] == "all stopped"
    assert site.alive() == []


def test_a_process_that_ends_later_ends_all(site: Site) -> None:
    site.write()
    launcher = site.launch()
    site.serving(launcher)
    os.kill(site.note_groups()["decode-0-node-1"], signal.SIGKILL)
    output = ended(launcher)
    assert launcher.returncode == 1
    assert "error: decode-0-node-1 on b ended with code -9" in output
    assert site.alive() == []
    assert site.groups() == {}


def test_a_host_that_cannot_be_reached(site: Site) -> None:
    site.write(second="gone")
    launcher = site.launch()
    output = ended(launcher)
    site.note_groups()
    assert launcher.returncode == 1
    assert "decode-0-node-1 on b could not be started or watched: ssh ended with code 255" in output
    assert "No route to host" in output
    assert "error: these may still run:\ndecode-0-node-1 on b:" in output
    record = site.state / "test/cluster.json"
    assert output.splitlines()[-1] == f"try again with --stop; if a host is gone for good, remove {record}"
    assert site.alive() == []
    record.unlink()
    stopper = site.launch("--stop")
    assert ended(stopper).splitlines()[-1] == "try again with --stop"  # there is nothing to remove
    assert stopper.returncode == 1


def test_waiting_has_a_bound(site: Site) -> None:
    site.write(decode="never", start_seconds=3)
    launcher = site.launch()
    output = ended(launcher)
    site.note_groups()
    assert launcher.returncode == 1
    assert "error: not healthy after 3 s: decode-0-node-0" in output
    assert site.alive() == []


def test_a_launcher_that_is_killed_leaves_nothing_behind(site: Site) -> None:
    site.write()
    launcher = site.launch()
    site.serving(launcher)
    site.note_groups()
    launcher.kill()
    launcher.communicate(timeout=WAIT_SECONDS)
    eventually(lambda: site.alive() == [])


def test_detach_and_stop(site: Site) -> None:
    """As `examples/two-nodes-1p1d/README.md` says."""
    site.write()
    detach = documented(
        "examples/two-nodes-1p1d/README.md", "scripts/launch_cluster.sh examples/two-nodes-1p1d/hosts.yaml --detach"
    )
    stop = documented(
        "examples/two-nodes-1p1d/README.md", "scripts/launch_cluster.sh examples/two-nodes-1p1d/hosts.yaml --stop"
    )
    launcher = site.launch(*detach[2:])
    site.serving(launcher)
    output = ended(launcher)
    assert launcher.returncode == 0, output
    groups = site.note_groups()
    assert httpx.get(f"{site.endpoint}/health", trust_env=False).status_code == 200

    second = site.launch()
    assert "this cluster was started and not stopped" in ended(second)
    assert second.returncode == 1

    record = site.state / "test/cluster.json"
    record.rename(site.folder / "kept")  # as on another machine, which does not know
    third = site.launch()
    output = ended(third)
    assert re.search(r"could not be started or watched: \S+ already runs as process \d+", output)
    assert third.returncode == 1
    assert httpx.get(f"{site.endpoint}/health", trust_env=False).status_code == 200
    assert all(psutil.pid_exists(pid) for pid in groups.values())
    (site.folder / "kept").rename(record)

    site.hosts.write_text(site.hosts.read_text().replace("name: test", "name: other"))
    other = site.launch("--stop")
    assert ended(other) == f"no process of other is recorded in {site.state}, here or on the hosts\n"
    assert httpx.get(f"{site.endpoint}/health", trust_env=False).status_code == 200

    site.write(spread=False)  # what was started stays known, whatever has become of the file
    stopper = site.launch(*stop[2:])
    output = ended(stopper)
    assert (stopper.returncode, output.splitlines()[-1]) == (0, "all stopped")
    assert site.alive() == []
    again = site.launch("--stop")
    assert ended(again) == f"no process of test is recorded in {site.state}, here or on the hosts\n"
    assert again.returncode == 0


def test_wrong_files_and_options_start_nothing(site: Site) -> None:
    site.write()
    site.hosts.write_text(site.hosts.read_text().replace("dp: 2", "dp: 3"))
    wrong = site.launch()
    assert "launch_cluster: hosts.yaml:13: decode[0].hosts:" in ended(wrong)
    assert wrong.returncode == 2
    both = site.launch("--stop", "--detach")
    assert "only one of" in ended(both)
    assert both.returncode == 2
    site.write()
    shown = site.launch("--dry-run")
    assert "launch_decode.sh" in ended(shown)
    assert shown.returncode == 0
    assert not (site.folder / "ssh.log").exists()
    assert not site.state.exists()
