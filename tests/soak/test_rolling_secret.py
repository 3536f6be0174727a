# SPDX-License-Identifier: Apache-2.0
"""The cluster's secret is changed under load, in three rolling restarts, as docs/security.md says it is done.

No request fails, and each has a single engine's tokens.
"""

import secrets
from pathlib import Path

import pytest

from harness.engines import PATIENT, EngineConfig, Role
from harness.prefork import METHOD
from harness.rolling import cluster_under_load

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

OLD, NEW = (secrets.token_urlsafe(48) for _ in range(2))


def test_the_secret_is_changed_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(METHOD, "fork")  # engines start sooner
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text(f"{OLD}\n")
    extra = (*PATIENT, ("secret_file", str(secret)))
    prefill, decode = (EngineConfig(role, connector_extra=extra) for role in (Role.PREFILL, Role.DECODE))
    with cluster_under_load("secret", prefill, decode, tmp_path, "--secret-file", str(secret)) as rolling:
        for lines in ((OLD, NEW), (NEW, OLD), (NEW,)):
            secret.write_text("".join(f"{line}\n" for line in lines))
            rolling.restart_all()
