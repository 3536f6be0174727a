# SPDX-License-Identifier: Apache-2.0
"""scripts/launch_cluster.sh from start to end: the real scripts and the real proxy, stand-ins for vLLM and for ssh.

The stand-in for `ssh -tt` runs the command on a terminal of its own, as sshd does. Where sshd is installed, one runs on
127.0.0.1, too. The stand-in for vLLM serves `/health`, and has a child that ignores Ctrl-C and SIGTERM, as workers of
an engine that hangs do.
"""

import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from harness.documented import REPOSITORY
from harness.ports import release_port, reserve_ports
from harness.waiting import wait_until
from vllm_ascend_pd.tools.launch import cluster
from vllm_ascend_pd.tools.launch.hosts import LaunchedProcess

HOST, HOST_B = "127.0.0.1", "127.0.0.2"
WAIT_SECONDS = 120.0
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")

SSH = """\
import os, pty, sys, termios
_, host, line = sys.argv[sys.argv.index("--"):]
open(os.environ["SSH_LOG"], "a").write(host + "\\n")
print("Welcome to", host, flush=True)
echo = "stty echo; " if termios.tcgetattr(0)[3] & termios.ECHO else "stty -echo; "  # modes of the local terminal
sys.exit(os.waitstatus_to_exitcode(pty.spawn(["/bin/sh", "-c", echo + line])) % 256)
"""

ENGINE = """\
import http.server, os, signal, subprocess, sys, time
arguments = sys.argv[1:]
stubborn = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(600)"
subprocess.Popen([sys.executable, "-c", stubborn, __file__])
print("\\033[36mstand-in for\\033[0m", *arguments, flush=True)
print("half\\rdone", os.environ["LOADS"], flush=True)
if os.environ.get("STANDIN") == "dies":
    sys.exit("out of NPU memory")
if os.environ.get("STANDIN") == "hangs":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

try:
    if "--headless" in arguments:
        time.sleep(600)
    place = (arguments[arguments.index("--host") + 1], int(arguments[arguments.index("--port") + 1]))
    http.server.ThreadingHTTPServer(place, Handler).serve_forever()
except KeyboardInterrupt:
    print("ended in order", flush=True)
"""


class Site:
    """Hosts `a` and `b`, which are both this machine, and a hosts.yaml for them."""

    def __init__(self, folder: Path, ports: range) -> None:
        self.folder = folder
        self.endpoint = f"http://{HOST_B}:{ports[2]}"
        self.hosts = folder / "hosts.yaml"
        self.log = folder / "log"
        self._ports = ports
        self._launchers: list[subprocess.Popen[bytes]] = []
        (folder / "bin").mkdir()
        self.install("bin/ssh", f"#!{sys.executable}\n{SSH}")
        self.install("vllm", f"#!{sys.executable}\n{ENGINE}")

    def install(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def write(self, *, a: str = "ssh: a", b: str = "ssh: b", decode: str = "") -> None:
        """`decode` is what the stand-ins of the decode engine are told to do."""
        http, kv, proxy, head = self._ports[0:2], self._ports[3:5], self._ports[2], self._ports[5]
        vllm = json.dumps(str(self.folder / "vllm"))
        self.hosts.write_text(f"""\
args: [--device, cpu, --, "a model's $(touch {self.folder}/owned); name"]
python: {sys.executable}
hosts:
  a: {{address: {HOST}, {a}}}
  b: {{address: {HOST_B}, {b}}}
prefill:
  - {{hosts: [a], args: [--, --port, {http[0]}], env: {{VLLM: {vllm}, LOADS: "a  'b' \\"$HOME"}}}}
decode:
  - {{hosts: [a, b], args: [--head-port, {head}, --kv-port, {kv[0]}, --, -dp, 2, --port, {http[1]}],
     env: {{VLLM: {vllm}, LOADS: "", STANDIN: "{decode}"}}}}
proxy: {{host: b, port: {proxy}}}
""")

    def launch(self, *options: str, ignores_hangup: bool = False) -> subprocess.Popen[bytes]:
        command = [str(REPOSITORY / "scripts/launch_cluster.sh"), str(self.hosts), *options]
        with self.log.open("wb") as log:
            launcher = subprocess.Popen(
                ["nohup", *command] if ignores_hangup else command,
                env=os.environ
                | {
                    "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
                    "PYTHON": sys.executable,
                    "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
                    "SSH_LOG": str(self.folder / "ssh.log"),
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._launchers.append(launcher)
        return launcher

    def serving(self) -> list[str]:
        """What has been printed when the cluster serves."""

        def is_healthy() -> bool:
            assert "ended" not in self.log.read_text(), self.log.read_text()
            try:
                return httpx.get(f"{self.endpoint}/health", trust_env=False).json()["status"] == "ok"
            except httpx.HTTPError:
                return False

        eventually(is_healthy)
        return self.log.read_text().splitlines()

    def ended(self, launcher: subprocess.Popen[bytes], code: int) -> str:
        """What it has printed at its end."""
        assert launcher.wait(WAIT_SECONDS) == code, self.log.read_text()
        return self.log.read_text()

    def alive(self, *words: str) -> list[psutil.Process]:
        """All processes of all that was started here, if all `words` are in their command lines."""
        found = []
        for process in psutil.process_iter():
            try:
                line = process.cmdline()
                if str(self.folder) in " ".join(line) and set(words) <= set(line):
                    found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
            except psutil.NoSuchProcess:
                continue
        return found

    def close(self) -> None:
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()
        for process in self.alive():
            try:
                process.kill()
            except psutil.NoSuchProcess:
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


@pytest.fixture(params=["stand-in", "sshd"])
def reached(site: Site, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The same, over a stand-in for ssh or a real one."""
    if request.param == "stand-in":
        yield site
        return
    ssh = shutil.which("ssh")
    if SSHD is None or ssh is None:
        pytest.skip("sshd is not installed")
    [port] = reserve_ports(1)
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True, timeout=60)
    (folder / "sshd_config").write_text(f"""\
Port {port}
ListenAddress {HOST}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
AcceptEnv LD_LIBRARY_PATH PYTHONPATH
PidFile none
StrictModes no
UsePAM no
""")
    (folder / "ssh_config").write_text(f"""\
Host *
  HostName {HOST}
  Port {port}
  User {getpass.getuser()}
  IdentityFile {folder}/user
  SendEnv LD_LIBRARY_PATH PYTHONPATH
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known
""")
    site.install("bin/ssh", f'#!/bin/sh\necho a b >>"$SSH_LOG"\nexec {ssh} -F {folder}/ssh_config "$@"\n')
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=(folder / "log").open("wb"))
    try:
        eventually(lambda: "Server listening" in (folder / "log").read_text())
        yield site
    finally:
        server.terminate()
        server.wait(WAIT_SECONDS)
        release_port(port)


eventually = partial(wait_until, timeout_s=WAIT_SECONDS)


def test_start_and_ctrl_c(reached: Site) -> None:
    reached.write()
    launcher = reached.launch()
    reached.serving()
    eventually(lambda: reached.log.read_text().count(" | half") == 3)  # a node without clients may be the last
    lines = reached.log.read_text().splitlines()
    assert set((reached.folder / "ssh.log").read_text().split()) == {"a", "b"}
    # Each line has the name of its process in front, and no line has colours, or the returns of a progress bar.
    assert re.search(r"^proxy           \| \d{4}-.* INFO ", "\n".join(lines), re.MULTILINE)
    for name in ("prefill-0", "decode-0-node-0", "decode-0-node-1"):
        own = [line for line in lines if line.startswith(f"{name:<15} | ")]
        [engine] = [line for line in own if " | stand-in for" in line]
        assert f"serve a model's $(touch {reached.folder}/owned); name --" in engine
        assert f"{name:<15} | half" in own
    assert "prefill-0       | done a  'b' \"$HOME" in "\n".join(lines)
    assert "\x1b" not in reached.log.read_text()
    assert not (reached.folder / "owned").exists()

    launcher.send_signal(signal.SIGINT)
    output = reached.ended(launcher, 130)
    assert output.count("ended in order") == 3  # behind the terminal's "^C"
    assert output.splitlines()[-1] == "all stopped"
    eventually(lambda: reached.alive() == [])


@pytest.mark.parametrize("ignores_hangup", [False, True], ids=["", "nohup"])
def test_a_launcher_that_is_killed_leaves_nothing_behind(reached: Site, ignores_hangup: bool) -> None:
    reached.write(a="local: true")
    launcher = reached.launch(ignores_hangup=ignores_hangup)
    reached.serving()
    assert len(reached.alive()) > 6
    launcher.kill()
    eventually(lambda: reached.alive() == [])


def test_a_process_that_cannot_start_ends_all(site: Site) -> None:
    site.write(decode="dies")
    output = site.ended(site.launch(), 1)
    assert re.search(r"^error: decode-0-node-. ended with code 1; stopping all others$", output, re.MULTILINE)
    assert re.search(r"^decode-0-node-. \| out of NPU memory$", output, re.MULTILINE)
    assert output.splitlines()[-1] == "all stopped"
    eventually(lambda: site.alive() == [])


@pytest.mark.parametrize("b", ["ssh: b", "local: true"])
def test_a_process_that_ends_later_ends_all(site: Site, b: str) -> None:
    site.write(b=b)
    launcher = site.launch()
    site.serving()
    node = ("--headless", str(site.folder / "vllm"))
    eventually(lambda: site.alive(*node) != [])  # the cluster may serve before its second node has started
    for process in site.alive(*node):
        process.kill()
    output = site.ended(launcher, 1)
    assert f"error: decode-0-node-1 ended with code {-9 if b == 'local: true' else 137}; stopping all others" in output
    eventually(lambda: site.alive() == [])


def test_a_second_ctrl_c_kills_what_does_not_end(site: Site) -> None:
    site.write(a="local: true", decode="hangs")
    launcher = site.launch()
    site.serving()
    launcher.send_signal(signal.SIGTERM)
    eventually(lambda: "ended in order" in site.log.read_text())
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    output = site.ended(launcher, 130)
    own = [line for line in output.splitlines() if " | " not in line]  # a process may still print
    assert own[-2:] == ["killing all", "all stopped"]
    eventually(lambda: site.alive() == [])


def test_waiting_for_the_end_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "STOP_SECONDS", 0.5)
    stubborn = ("sh", "-c", "trap '' INT TERM HUP; while :; do sleep 0.1; done")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    began = time.monotonic()
    try:
        assert cluster.run([LaunchedProcess("p", None, stubborn)]) == 130
    finally:
        timer.cancel()
    assert 1.5 < time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("old", "new", "options", "message"),
    [
        ("-dp, 2", "-dp, 3", (), "hosts.yaml: decode[0].args: tensor x pipeline"),
        ("proxy: ", "proxi: ", (), "hosts.yaml: Object contains unknown field `proxi`"),
        ("", "", ("--stop",), "there is no option --stop any more: Ctrl-C or SIGTERM stops"),
        ("", "", ("--detach",), "there is no option --detach any more: Ctrl-C or SIGTERM"),
        ("", "", ("--bogus",), "No such option"),
    ],
)
def test_wrong_files_and_options_start_nothing(
    old: str, new: str, options: tuple[str, ...], message: str, site: Site
) -> None:
    site.write()
    site.hosts.write_text(site.hosts.read_text().replace(old, new))
    assert f"launch_cluster: {message}" in site.ended(site.launch(*options), 2)
    assert not (site.folder / "ssh.log").exists()
