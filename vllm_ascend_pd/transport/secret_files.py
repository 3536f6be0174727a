# SPDX-License-Identifier: Apache-2.0
"""Reads and writes files that hold a secret. Errors name the file, never its content."""

import os
import secrets
import stat
from pathlib import Path

from vllm_ascend_pd.core.signing import Secret

_MAX_BYTES = 64 << 10


class SecretFileError(ValueError):
    """A secret file cannot be read or written, has unusable content, or can be read by others."""


def read_secret(path: str | Path) -> bytes:
    """Returns the content of a regular file that only its owner can read, without white space around it.

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
            content = os.read(descriptor, _MAX_BYTES + 1)
        finally:
            os.close(descriptor)
    except SecretFileError:
        raise
    except (OSError, ValueError) as error:
        raise SecretFileError(f"the secret file {path} cannot be read: {error}") from None
    if len(content) > _MAX_BYTES:
        raise SecretFileError(f"the secret file {path} is larger than {_MAX_BYTES >> 10} KiB")
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
