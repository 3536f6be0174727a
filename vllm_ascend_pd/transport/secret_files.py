# SPDX-License-Identifier: Apache-2.0
"""Files that hold a secret, among them the one of the cluster. Errors name a file, never its content."""

import os
import secrets
import stat
from pathlib import Path

from vllm_ascend_pd.core.secret import Secret
from vllm_ascend_pd.core.text import has_mark

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
    return _text(path, read_secret(path))


def default_secret_file() -> Path | None:
    """Returns where the cluster's secret is if no setting names a file. None if this user has no home folder."""
    # By the XDG specification, a relative path in the variable does not count.
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    path = Path(folder if os.path.isabs(folder) else os.path.expanduser("~/.config"), "vllm-ascend-pd", "secret")
    return path if path.is_absolute() else None


def cluster_secret(path: str | Path | None) -> Secret | None:
    """Returns the cluster's secret: the lines of the file at `path`, one, or two while the secret is changed.

    If `path` is None, it is read from the default path. Returns None if no file is there.
    """
    if path is None:
        path = default_secret_file()
        if path is None or not _exists(path):
            return None
    lines = [line.strip() for line in read_secret(path).splitlines()]
    for line in lines:
        _text(path, line)
    try:
        return Secret(lines)
    except ValueError as error:
        raise SecretFileError(f"the secret file {path}: {error}") from None


def new_secret() -> bytes:
    """Returns the content of a new file with the cluster's secret."""
    return secrets.token_urlsafe(48).encode() + b"\n"


def _text(path: str | Path, content: bytes) -> str:
    if not all(0x20 < byte < 0x7F for byte in content):
        raise SecretFileError(f"the secret file {path} must hold only printable ASCII characters, and no spaces")
    return content.decode("ascii")


def _exists(path: Path) -> bool:
    """Returns False only if nothing is there. A secret that cannot be seen must not be taken for none."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        pass
    return True


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
