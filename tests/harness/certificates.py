# SPDX-License-Identifier: Apache-2.0
"""Certificates and authorities for tests, made with the `openssl` command."""

import dataclasses
import subprocess
from pathlib import Path


def openssl(*args: str | Path) -> None:
    subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=60)


@dataclasses.dataclass(frozen=True)
class Certificate:
    """PEM files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates. Clients that trust it get its `cert`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder / name
        self._folder.mkdir()
        self.cert, self._key = self._folder / "ca.pem", self._folder / "ca-key.pem"
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name}", "-days", "2", "-keyout", self._key, "-out", self.cert),
        )

    def issue(self, name: str, host: str, days: int = 2, password: str | None = None) -> Certificate:
        """Issues a certificate for `host` (`IP:...` or `DNS:...`). With negative `days` it has expired. `password`
        encrypts the key.
        """
        cert, key, request = (self._folder / f"{name}{end}" for end in (".pem", "-key.pem", ".csr"))
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName = {host}\n")
        encryption = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
        openssl(
            *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", *encryption),
            *("-subj", f"/CN={name}", "-keyout", key, "-out", request),
        )
        openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", str(days), "-extfile", extensions, "-out", cert),
        )
        return Certificate(cert, key)
