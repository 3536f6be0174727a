# SPDX-License-Identifier: Apache-2.0
"""TLS certificates of the proxy's ports."""

from __future__ import annotations

import ssl
from typing import Any

import msgspec

from vllm_ascend_pd.transport.keys import read_text_secret


class Tls(msgspec.Struct, frozen=True):
    """PEM files for one port."""

    cert: str
    """The certificate chain, the port's own certificate first."""
    key: str
    """The private key of that certificate."""
    key_password_file: str | None = None
    """The file with the key's password, of mode 0600."""
    client_ca: str | None = None
    """An authority. The port serves only clients with a certificate of it. None: no client certificates."""

    def check(self) -> None:
        """Raises ValueError for files that cannot be used."""
        password = self._password()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A function: without one, a key that has a password would ask for it on the terminal.
            context.load_cert_chain(self.cert, self.key, lambda: password or "")
        except OSError as error:  # ssl.SSLError is an OSError
            raise ValueError(f"the certificate {self.cert} with the key {self.key} cannot be used: {error}") from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except OSError as error:
                raise ValueError(f"the client authority {self.client_ca} cannot be used: {error}") from None

    def uvicorn_options(self) -> dict[str, Any]:
        return {
            "ssl_certfile": self.cert,
            "ssl_keyfile": self.key,
            "ssl_keyfile_password": self._password(),
            "ssl_ca_certs": self.client_ca,
            "ssl_cert_reqs": ssl.CERT_NONE if self.client_ca is None else ssl.CERT_REQUIRED,
        }

    def _password(self) -> str | None:
        return None if self.key_password_file is None else read_text_secret(self.key_password_file)


def from_files(
    name: str, cert: str | None, key: str | None, password_file: str | None, client_ca: str | None = None
) -> Tls | None:
    """Returns None without files. Raises ValueError if the certificate or its key is missing. `name`: of the options,
    `--NAME-cert` and so on."""
    if cert is None and key is None:
        if password_file is not None or client_ca is not None:
            raise ValueError(f"a key's password or a client authority needs --{name}-cert and --{name}-key")
        return None
    if cert is None or key is None:
        raise ValueError(f"--{name}-cert and --{name}-key go together")
    return Tls(cert, key, password_file, client_ca)
