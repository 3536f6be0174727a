# SPDX-License-Identifier: Apache-2.0
"""Files that hold a secret, and CURVE on the side channel. Errors name a file, never its content."""

import contextlib
import logging
import os
import secrets
import stat
import time
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from vllm_ascend_pd.core.hosts import HostList
from vllm_ascend_pd.core.text import has_mark
from vllm_ascend_pd.core.ticket import Secret

_MAX_BYTES = 64 << 10


class SecretFileError(ValueError):
    """A secret file cannot be read or written, has unusable content, or can be read by others."""


def read_secret(path: str | Path) -> bytes:
    """Returns the content of a regular file that only root or this user can read, without white space around it.

    Raises SecretFileError, as all functions here do.
    """
    try:
        # O_NONBLOCK: a pipe must not make it wait for its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SecretFileError(f"the secret file {path} is not a regular file")
            mode = stat.S_IMODE(status.st_mode)
            if mode & 0o077:
                raise SecretFileError(f"the secret file {path} has mode {mode:04o}: others may use it; chmod 600 it")
            if status.st_uid not in (0, os.geteuid()):  # its owner could replace the secret
                raise SecretFileError(f"the secret file {path} belongs to user {status.st_uid}: chown it to your own")
            content = os.read(descriptor, _MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except SecretFileError:
        raise
    except (OSError, ValueError) as error:
        raise SecretFileError(f"the secret file {path} cannot be read: {error}") from None
    if len(content) > _MAX_BYTES:
        raise SecretFileError(f"the secret file {path} is larger than {_MAX_BYTES >> 10} KiB")
    if has_mark(content):
        raise SecretFileError(f"the secret file {path} begins with a byte order mark: save it without one")
    if not content.strip():
        raise SecretFileError(f"the secret file {path} is empty")
    return content.strip()


def read_text_secret(path: str | Path) -> str:
    """As `read_secret`, for a token or a password: printable ASCII characters."""
    content = read_secret(path)
    if not all(0x20 < byte < 0x7F for byte in content):
        raise SecretFileError(f"the secret file {path} must hold only printable ASCII characters, and no spaces")
    return content.decode("ascii")


def read_ticket_secret(path: str | Path) -> Secret:
    """As `read_secret`, for the secret that signs tickets."""
    try:
        return Secret(read_secret(path))
    except SecretFileError:
        raise
    except ValueError as error:
        raise SecretFileError(f"the secret file {path}: {error}") from None


def new_ticket_secret() -> bytes:
    """Returns the content of a new ticket secret file."""
    return secrets.token_urlsafe(48).encode() + b"\n"


def write_new(path: str | Path, content: bytes) -> None:
    """Creates a file of mode 0600. Never overwrites one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise SecretFileError(f"{path} exists already: other hosts may use it, so it is not overwritten") from None
    except (OSError, ValueError) as error:
        raise SecretFileError(f"{path} cannot be written: {error}") from None
    with open(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(content)


# CURVE on the side channel: it encrypts everything, and only peers with the cluster's key file get an answer.
#
# The file holds two key pairs, one for servers and one for clients. All engines of a cluster have the same file.

logger = logging.getLogger(__name__)

_KIND = "vllm-ascend-pd side channel keys: keep secret, give the same file to all engines"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_DOMAIN = b"vllm-ascend-pd"
_LOG_EVERY_S = 60.0


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: str
    server_secret_key: str
    client_secret_key: str

    def __repr__(self) -> str:
        return "_KeyFile(...)"


class Keys:
    """A cluster's keys. Neither `repr` nor an error shows them."""

    __slots__ = ("_client_public", "_client_secret", "_server_public", "_server_secret")

    def __init__(self, server_secret: bytes, client_secret: bytes) -> None:
        """Both secrets are in Z85. Raises ValueError for anything that is not a key."""
        if server_secret == client_secret:
            raise ValueError("the two secret keys are the same")
        self._server_secret, self._client_secret = server_secret, client_secret
        try:
            self._server_public = zmq.curve_public(server_secret)
            self._client_public = zmq.curve_public(client_secret)
        except (zmq.ZMQError, TypeError, ValueError):
            raise ValueError("no secret keys of CURVE") from None

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


def protect_server(socket: "zmq.Socket[bytes]", keys: Keys | None) -> None:
    """Call it before `socket` is bound. Without a `Guard` in its context, the socket accepts no client."""
    socket.setsockopt(zmq.ZAP_DOMAIN, _ZAP_DOMAIN)  # without one, libzmq asks nobody about clients without keys
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys._server_secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys._server_public)


def new_key_file() -> bytes:
    """Returns the content of a new cluster's key file."""
    (_, server), (_, client) = zmq.curve_keypair(), zmq.curve_keypair()
    return msgspec.json.format(msgspec.json.encode(_KeyFile(_KIND, server.decode(), client.decode()))) + b"\n"


def load_keys(path: str | None) -> Keys | None:
    """Returns the keys in the file at `path`; None if `path` is None. Raises SecretFileError."""
    if path is None:
        return None
    try:
        file = msgspec.json.decode(read_secret(path), type=_KeyFile)
        return Keys(file.server_secret_key.encode(), file.client_secret_key.encode())
    except SecretFileError:
        raise
    except (ValueError, RecursionError):  # their messages might quote the file
        raise SecretFileError(
            f"the secret file {path} holds no side channel keys: make one with `vllm-ascend-pd keygen`"
        ) from None


class Guard:
    """Admits clients to a server by their keys and addresses. The server's thread calls it.

    libzmq asks it (ZAP, ZeroMQ RFC 27) in the handshake, before a client can send a message. With keys, libzmq itself
    refuses clients that do not speak CURVE or do not know the server's public key.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        server: "zmq.Socket[bytes]",
        keys: Keys | None,
        hosts: HostList,
    ) -> None:
        """Protects `server`, which must not be bound yet. Call `attend` whenever `socket` can be read."""
        # Handshakes of clients that were not admitted.
        self.refused = 0
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
            return "another cluster's keys (side_channel_key_file)"
        return self._hosts.refusal_of_peer(address)

    def _refused(self, address: str, reason: str) -> None:
        self.refused += 1
        if (now := time.monotonic()) >= self._log_at:
            self._log_at = now + _LOG_EVERY_S
            logger.warning(
                "side channel: %d connections refused so far, the last one from %s: %s", self.refused, address, reason
            )
