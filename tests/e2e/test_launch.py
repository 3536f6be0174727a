# SPDX-License-Identifier: Apache-2.0
"""The launch scripts with real engines: the example for the CPU, with a secret, from its three commands to a request's
tokens and to nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from harness.client import Client, random_prompt
from harness.documented import REPOSITORY, documented
from harness.engines import PLUGINS, EngineConfig, script
from harness.models import TINY, make_model
from harness.pool import ClusterPool, Reference, ReferencePool
from harness.ports import release_port, reserve_ports
from harness.processes import ManagedProcess
from vllm_ascend_pd.core.secret import Use
from vllm_ascend_pd.transport.secret_files import cluster_secret

BLOCK = 128

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Launched:
    started: list[ManagedProcess]
    url: str
    model: Path
    secret: Path

    def processes(self) -> list[psutil.Process]:
        """Both engines, the proxy, and all that these have started."""
        own = [psutil.Process(each.pid) for each in self.started]
        return own + [child for process in own for child in process.children(recursive=True)]


@pytest.fixture
def launched(cluster_pool: ClusterPool, models: Path, tmp_path: Path) -> Iterator[Launched]:
    cluster_pool.stop()
    ports = reserve_ports(4)
    model = make_model(TINY, models)
    secret = tmp_path / "config/vllm-ascend-pd/secret"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PLUGINS), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "VLLM_ASCEND_PD_TEST_SHORT_SPIN": "1",
        "VLLM_ASCEND_PD_TEST_HOLD_PORTS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    make = [script("vllm-ascend-pd"), "secret"]
    subprocess.run(make, check=True, capture_output=True, timeout=60, env=environment)
    here = {"$PWD/.venv": sys.prefix, "scripts/": f"{REPOSITORY}/scripts/"}
    engine = {**here, "/tmp/tiny-model": str(model)}
    prefill = documented("examples/single-node-1p1d/README.md", "VENV=$PWD/.venv TORCH_COMPILE_DISABLE=1", engine)
    decode = documented("examples/single-node-1p1d/README.md", "VENV=$PWD/.venv scripts/launch_decode.sh", engine)
    urls = {"127.0.0.1:8100": f"127.0.0.1:{ports[0]}", "127.0.0.1:8200": f"127.0.0.1:{ports[1]}"}
    proxy = documented(
        "examples/single-node-1p1d/README.md", "VENV=$PWD/.venv VLLM_HOST_IP=127.0.0.1", {**here, **urls}
    )
    # The last of equal options wins: ports of this test, in the place of the scripts'.
    config = {"kv_connector": "LayerwisePushConnector", "kv_role": "kv_consumer", "kv_port": ports[2]}
    commands = {
        "prefill": [*prefill, "--port", str(ports[0])],
        "decode": [*decode, "--port", str(ports[1]), "--kv-transfer-config", json.dumps(config)],
        "proxy": [*proxy, "--port", str(ports[3])],
    }
    with ExitStack() as stack:
        for port in ports:
            stack.callback(release_port, port)
        started = []
        for name, command in commands.items():
            process = ManagedProcess(name, ["env", *command], environment, tmp_path / f"{name}.log")
            stack.callback(process.stop, grace=60)
            started.append(process)
        launched = Launched(started, f"http://127.0.0.1:{ports[3]}", model, secret)
        deadline = time.monotonic() + 480
        while not is_healthy(launched.url):
            assert all(process.exit_code is None for process in started), [process.tail() for process in started]
            assert time.monotonic() < deadline, [process.tail() for process in started]
            time.sleep(0.2)
        yield launched


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

    for process in reversed(launched.started):
        process.signal_group(signal.SIGINT)  # Ctrl-C
    _, alive = psutil.wait_procs(processes, timeout=60)
    assert alive == []
    # Nobody can read the secret or a key in command lines and logs, with the configuration that vLLM prints.
    seen = commands + "".join(each.log.read_text() for each in launched.started)
    assert "LayerwisePushConnector" in seen, "vLLM shows the configuration: this test looks at it"
    secret = cluster_secret(launched.secret)
    assert secret is not None
    keys = [key.hex() for use in Use for key in secret.keys(use)]
    assert not [word for word in (launched.secret.read_text().strip(), *keys) if word in seen]
