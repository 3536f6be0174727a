# SPDX-License-Identifier: Apache-2.0
"""The socket between two servers' `doctor --hardware --peer`."""

import threading
from pathlib import Path

import pytest

from harness.ports import reserve_ports
from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.tools.doctor.peer import Between, Wire
from vllm_ascend_pd.transport.secret_files import cluster_secret, new_secret, write_new


@pytest.fixture(params=[True, False], ids=["with a secret", "without"])
def secret(request: pytest.FixtureRequest, tmp_path: Path) -> Secret | None:
    if not request.param:
        return None
    write_new(tmp_path / "secret", new_secret())
    return cluster_secret(tmp_path / "secret")


def test_both_servers_have_all_messages_and_end(secret: Secret | None) -> None:
    addresses, [port] = ("127.0.0.2", "127.0.0.3"), reserve_ports(1)
    got: dict[str, str] = {}

    def run(own: str, other: str) -> None:
        wire = Wire(Between(own, other, None, port), secret)
        if own == addresses[0]:
            got[own] = wire.receive(str)
            wire.send(f"from {own}")
        else:
            wire.send(f"from {own}")
            got[own] = wire.receive(str)
        wire.close()

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in (addresses, addresses[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not any(thread.is_alive() for thread in threads), "a server does not end"
    assert got == {addresses[0]: f"from {addresses[1]}", addresses[1]: f"from {addresses[0]}"}
