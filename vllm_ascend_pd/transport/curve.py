# SPDX-License-Identifier: Apache-2.0
"""CURVE on the side channel: it encrypts everything, and only peers with the cluster's secret get an answer."""

import contextlib
import logging
import time

import zmq
from zmq.utils import z85

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.secret import Secret, Use

logger = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"vllm-ascend-pd"
_LOG_EVERY_S = 60.0


class Keys:
    """Two key pairs, one for servers and one for clients, which all engines have. `repr` does not show them."""

    __slots__ = ("_client_public", "_client_secret", "_server_public", "_server_secret")

    def __init__(self, server_secret: bytes, client_secret: bytes) -> None:
        """Both secret keys have 32 bytes."""
        self._server_secret, self._client_secret = z85.encode(server_secret), z85.encode(client_secret)
        self._server_public = zmq.curve_public(self._server_secret)
        self._client_public = zmq.curve_public(self._client_secret)

    def __repr__(self) -> str:
        return "Keys(...)"

    def protect_client(self, socket: "zmq.Socket[bytes]") -> None:
        """Call it before `socket` is connected."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self._server_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._client_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._client_public)

    @property
    def admitted(self) -> bytes:
        """The public key that a client must have, in binary."""
        return z85.decode(self._client_public)


def side_channel_keys(secret: Secret) -> list[Keys]:
    """Returns the keys of each of the cluster's secrets, those of the secret in use first."""
    servers, clients = secret.keys(Use.SIDE_CHANNEL_SERVER), secret.keys(Use.SIDE_CHANNEL_CLIENT)
    return [Keys(server, client) for server, client in zip(servers, clients, strict=True)]


def protect_server(socket: "zmq.Socket[bytes]", keys: Keys | None) -> None:
    """Call it before `socket` is bound. Without a `Guard` in its context, the socket accepts no client."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)  # without one, libzmq asks nobody about clients without keys
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys._server_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys._server_public)


class Guard:
    """Admits clients to a server by their keys and addresses. The server's thread calls it.

    libzmq asks it (ZAP, ZeroMQ RFC 27) in the handshake, before a client can send a message. With a secret, libzmq
    itself refuses clients that do not speak CURVE or do not know the server's public key.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        server: "zmq.Socket[bytes]",
        secret: Secret | None,
        hosts: HostList,
    ) -> None:
        """Protects `server`, which must not be bound yet. Call `attend` whenever `socket` can be read."""
        # Handshakes of clients that were not admitted.
        self.refused = 0
        keys = None if secret is None else side_channel_keys(secret)[0]
        self._credentials = (b"NULL", []) if keys is None else (b"CURVE", [keys.admitted])
        self._hosts = hosts
        self._log_at = 0.0
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)
        protect_server(server, keys)

    def attend(self) -> None:
        """Answers all questions that wait in `socket`."""
        with contextlib.suppress(zmq.Again):
            while True:
                version, request_id, _, address, _, mechanism, *credentials = self.socket.recv_multipart(zmq.DONTWAIT)
                reason = self._refusal(address.decode(), (mechanism, credentials))
                status = (b"200", b"OK") if reason is None else (b"400", b"not admitted")
                self.socket.send_multipart([version, request_id, *status, b"", b""])
                if reason is not None:
                    self._refused(address.decode(), reason)

    def _refusal(self, address: str, credentials: tuple[bytes, list[bytes]]) -> str | None:
        if credentials != self._credentials:
            return "another secret than the one in use here (secret_file)"
        return self._hosts.refusal_of_peer(address)

    def _refused(self, address: str, reason: str) -> None:
        self.refused += 1
        if (now := time.monotonic()) >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            logger.warning(
                "side channel: %d connections refused so far, the last one from %s: %s", self.refused, address, reason
            )
