# SPDX-License-Identifier: Apache-2.0
"""The launch scripts with real engines: the example for the CPU, with a secret, from `scripts/launch_cluster.sh` to a
request's tokens and to nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from harness.client import Client, random_prompt
from harness.documented import REPOSITORY, documented
from harness.engines import PLUGINS, EngineConfig, script
from harness.models import TINY, make_model
from harness.pool import ClusterPool, Reference, ReferencePool
from harness.ports import release_port, reserve_ports
from harness.processes import ManagedProcess
from vllm_ascend_pd.core.secret import Use
from vllm_ascend_pd.transport.secret_files import cluster_secret

EXAMPLE = "examples/single-node-1p1d/hosts-cpu.yaml"
BLOCK = 128

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Launched:
    launcher: ManagedProcess
    url: str
    model: Path
    secret: Path

    def processes(self) -> list[psutil.Process]:
        """Both engines, the proxy, and all that these have started."""
        return psutil.Process(self.launcher.pid).children(recursive=True)


@pytest.fixture
def launched(cluster_pool: ClusterPool, models: Path, tmp_path: Path) -> Iterator[Launched]:
    cluster_pool.stop()
    ports = reserve_ports(4)
    hosts = yaml.safe_load((REPOSITORY / EXAMPLE).read_text())
    model = make_model(TINY, models)
    secret = tmp_path / "secret"
    make = [script("vllm-ascend-pd"), "secret", str(secret)]
    subprocess.run(make, check=True, capture_output=True, timeout=60)
    hosts["secret_file"] = str(secret)
    hosts["args"] = [str(model) if word == "/tmp/tiny-model" else word for word in hosts["args"]]
    prefill, decode, proxy = hosts["prefill"][0], hosts["decode"][0], hosts["proxy"]
    prefill["args"] = ["--", "--port", ports[0]]
    decode["args"] = ["--kv-port", ports[2], "--", "--port", ports[1]]
    proxy["port"] = ports[3]
    file = tmp_path / "hosts.yaml"
    file.write_text(yaml.safe_dump(hosts))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PLUGINS), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "VLLM_ASCEND_PD_TEST_SHORT_SPIN": "1",
        "VLLM_ASCEND_PD_TEST_HOLD_PORTS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    environment.pop("PYTHON", None)  # it would win over VENV
    values = {EXAMPLE: str(file), "$PWD/.venv": sys.prefix, "scripts/": f"{REPOSITORY}/scripts/"}
    command = ["env", *documented("examples/single-node-1p1d/README.md", "VENV=$PWD/.venv", values)]
    launcher = ManagedProcess("launcher", command, environment, tmp_path / "launcher.log")
    try:
        launched = Launched(launcher, f"http://127.0.0.1:{ports[3]}", model, secret)
        deadline = time.monotonic() + 480
        while not is_healthy(launched.url):
            assert launcher.exit_code is None, launcher.tail()
            assert time.monotonic() < deadline, launcher.tail()
            time.sleep(0.2)
        launcher.note_shared_memory(process.pid for process in launched.processes())  # none of its own session
        yield launched
    finally:
        launcher.stop(grace=60)  # it stops the engines; without it, their terminals hang up
        for port in ports:
            release_port(port)


def is_healthy(url: str) -> bool:
    """Whether the proxy lists both engines as `healthy`. Before its first checks it lists no failures."""
    try:
        health = httpx.get(f"{url}/health", trust_env=False).json()
    except httpx.HTTPError:
        return False
    return {*health["prefill"].values(), *health["decode"].values()} == {"healthy"}


@pytest.fixture
def reference(reference_pool: ReferencePool, single_engine: EngineConfig) -> Reference:
    return reference_pool.get(TINY, single_engine)


@pytest.mark.long
def test_the_example_for_the_cpu_serves_and_stops(launched: Launched, reference: Reference) -> None:
    prompt = random_prompt(300, "launched")
    with Client(launched.url, str(launched.model), headers={"X-Who-Computes": "prefill"}) as client:
        completion = client.complete(prompt)
    assert completion.token_ids == reference.complete(prompt)
    assert completion.kv_transfer_params is not None
    assert completion.kv_transfer_params["received_bytes"] == 3 * BLOCK * TINY.kv_bytes_per_token

    processes = launched.processes()
    assert len(processes) > 3  # engine cores are processes of their own
    alive = (process for process in processes if process.status() != psutil.STATUS_ZOMBIE)
    commands = " ".join(word for process in alive for word in process.cmdline())

    os.kill(launched.launcher.pid, signal.SIGINT)
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    deadline = time.monotonic() + 60
    while launched.launcher.exit_code is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert launched.launcher.exit_code == 130
    assert launched.launcher.tail(1) == "all stopped"
    # Nobody can read the secret or a key in command lines and logs, with the configuration that vLLM prints.
    seen = commands + launched.launcher.log.read_text()
    assert str(launched.secret) in seen, "vLLM shows the configuration: this test looks at it"
    secret = cluster_secret(launched.secret)
    assert secret is not None
    keys = [key.hex() for use in Use for key in secret.keys(use)]
    assert not [word for word in (launched.secret.read_text().strip(), *keys) if word in seen]
