# SPDX-License-Identifier: Apache-2.0
"""The real nginx with examples/gateway, before a proxy."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.ports import is_free
from harness.waiting import wait_until

NGINX = shutil.which("nginx", path=f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}:/usr/sbin") or ""
CONFIGURATION = Path(__file__).resolve().parents[2] / "examples" / "gateway" / "nginx.conf"

needs_nginx = pytest.mark.skipif(
    not NGINX, reason="scripts/setup_env.sh --with-programs, on Debian or Ubuntu, unpacks nginx"
)


@contextmanager
def running_nginx(folder: Path, proxy: int, ports: Sequence[int], changes: Mapping[str, str]) -> Iterator[None]:
    """Runs the example before the proxy at port `proxy`, with other files in `folder`, until the end of the block.

    ports: those that it listens on.
    changes: further replacements. Each must find its place.
    """
    text = CONFIGURATION.read_text()
    ours = {
        "/run/pd-gateway.pid": str(folder / "pid"),
        "/var/log/nginx/pd-gateway-error.log": str(folder / "error.log"),
        "worker_processes auto": "worker_processes 1",
        "access_log off;": f"access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;"
        + "".join(f" {kind}_temp_path {folder}/{kind};" for kind in ("fastcgi", "scgi", "uwsgi")),
        "127.0.0.1:8000": f"127.0.0.1:{proxy}",
    }
    for old, new in {**ours, **changes}.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    user = "user root;" if os.geteuid() == 0 else ""  # its workers write into this folder
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-g", f"daemon off; {user}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or not any(map(is_free, ports)), 30)
        assert process.poll() is None, process.communicate()[1]
        yield
    finally:
        process.terminate()
        process.communicate(timeout=30)
