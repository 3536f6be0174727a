# SPDX-License-Identifier: Apache-2.0
"""The ports that vLLM looks for while the tests' engines start."""

import json
import os
import sys
from pathlib import Path

import pytest

from harness.engines import CPU_ENV, plugins_on_path
from harness.ports import release_port, reserve_port
from harness.processes import ManagedProcess
from harness.waiting import wait_until

PROGRAM = """
import json, time
from vllm.plugins import load_general_plugins
from vllm.utils.network_utils import get_open_port, get_open_ports_list
load_general_plugins()
print("PORTS", json.dumps([get_open_port(), *get_open_ports_list(5)]), "END", flush=True)
time.sleep(600)
"""


def test_nobody_else_gets_a_port_before_vllm_listens_there(tmp_path: Path) -> None:
    env = {**os.environ, **CPU_ENV, **plugins_on_path()}
    engine = ManagedProcess("engine", [sys.executable, "-c", PROGRAM], env, tmp_path / "log")
    try:
        # To its end: without a buffer Python writes each argument of a print() by itself.
        wait_until(lambda: "END" in engine.tail() or engine.exit_code is not None, 120)
        assert engine.exit_code is None, engine.account()
        ports = json.loads(engine.tail().partition("PORTS")[2].partition("END")[0])
        assert len(set(ports)) == 6
        for port in ports:
            with pytest.raises(RuntimeError, match="no free TCP port"):
                reserve_port(port, port + 1)
    finally:
        engine.stop()
    for port in ports:
        reserve_port(port, port + 1)
        release_port(port)
