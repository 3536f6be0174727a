# SPDX-License-Identifier: Apache-2.0
"""The documented commands of the proxy, run with stand-ins for its engines."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from engine_standin import DecodeEngine, PrefillEngine, Servers
from page_commands import COMMANDS, ENVIRONMENT, Command
from proxy_cluster import eventually

from harness.ports import is_free, release_port, reserve_port


class FrontDoor(NamedTuple):
    url: str
    prefill: str
    decode: str
    another: str
    """A decode engine that the proxy has not been told of."""

    def ask(self, method: str, path: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        return httpx.request(method, self.url + path, headers=headers, trust_env=False, timeout=30).raise_for_status()

    def engines(self) -> dict[str, dict[str, Any]]:
        """By URL."""
        return {engine["url"]: engine for engine in self.ask("GET", "/admin/engines").json()["engines"]}


TOKEN = "an-admin-token-of-some-length-0123456789"


@contextmanager
def front_door(command: Command, folder: Path) -> Iterator[FrontDoor]:
    """A proxy started by `command`."""
    token = folder / "admin.token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    port = reserve_port()
    with Servers() as servers, (folder / "log").open("wb") as log:
        prefill, decode, another = (
            servers.start(lambda _, e=e: e.app) for e in (PrefillEngine(), DecodeEngine(), DecodeEngine())
        )
        url = f"http://127.0.0.1:{port}"
        engines = {"http://127.0.0.1:8100": prefill, "http://127.0.0.1:8200": decode}
        if " ... " in command.line:
            values = {" ... ": f" --port {port} --prefill {prefill} --decode {decode} "}
            values["http://collector.example:4317"] = "http://127.0.0.1:9"  # nobody: the proxy serves all the same
        else:
            values = {"--port 8000": f"--port {port}", **engines}
        words = [*command.with_values(values).words, "--admin-token-file", str(token)]
        process = subprocess.Popen(words, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
        try:
            eventually(lambda: process.poll() is not None or not is_free(port))
            assert process.poll() is None, (folder / "log").read_text()
            eventually(lambda: httpx.get(f"{url}/health", trust_env=False, timeout=30).status_code == 200)
            yield FrontDoor(url, prefill, decode, another)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                process.kill()
                process.wait()
                release_port(port)


def opens_the_front_door(command: Command, folder: Path) -> None:
    with front_door(command, folder) as door:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
        answer = httpx.post(f"{door.url}/v1/completions", json=body, trust_env=False, timeout=30)
        assert answer.status_code == 200, answer.text


def curls(command: Command, folder: Path) -> None:
    """Against a proxy that the README's command has started."""
    [proxy] = [each for each in COMMANDS if each.line.startswith("vllm-ascend-pd proxy --host")]
    with front_door(proxy, folder) as door:
        [host] = re.findall(r"(?:127\.0\.0\.1|192\.0\.2\.1):8000", command.line)
        values = {host: door.url.removeprefix("http://")}
        if "/ID" in command.line:
            values["/ID"] = f"/{door.engines()[door.decode]['id']}"
            if ":undrain" in command.line:
                door.ask("POST", f"/admin/engines{values['/ID']}:drain")
        if "8201" in command.line:
            values["http://127.0.0.1:8201"] = door.another
        options = "--silent --show-error --fail-with-body --max-time 30 --noproxy '*'"
        answer = command.with_values(values).run(folder, options, TOKEN=TOKEN)
        [end] = re.findall(rf"{re.escape(host)}/\S*?([\w.]+)(?!\S)", command.line)
        assert EXPECTED[end, method(command)](answer, door)


def method(command: Command) -> str:
    return command.words[command.words.index("-X") + 1] if "-X" in command.words else "-"


EXPECTED: dict[tuple[str, str], Callable[[str, FrontDoor], bool]] = {
    ("completions", "-"): lambda answer, door: '"choices"' in answer,
    ("status.json", "-"): lambda answer, door: '"verdict"' in answer,
    ("engines", "-"): lambda answer, door: {door.prefill, door.decode} == set(door.engines()) and door.decode in answer,
    ("engines", "POST"): lambda answer, door: door.another in door.engines(),
    ("drain", "POST"): lambda answer, door: door.engines()[door.decode]["state"] == "draining",
    ("undrain", "POST"): lambda answer, door: door.engines()[door.decode]["state"] == "healthy",
    ("ID", "DELETE"): lambda answer, door: door.decode not in door.engines(),
}
"""What must be so after each, by the end of its path and its method; it was not so before, where that can be."""
