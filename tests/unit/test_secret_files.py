# SPDX-License-Identifier: Apache-2.0
"""Files that hold secrets, and the command that makes them."""

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest
import zmq

from harness.engines import script
from vllm_ascend_pd.transport.keys import (
    SecretFileError,
    load_keys,
    new_key_file,
    new_ticket_secret,
    read_secret,
    read_text_secret,
    read_ticket_secret,
    write_new,
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    write_new(path, b" the content\n")
    return path


def test_a_new_file_is_its_owners_alone(file: Path) -> None:
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_secret(file) == b"the content"
    with pytest.raises(SecretFileError, match=f"{file} exists already"):
        write_new(file, b"other")
    assert read_secret(file) == b"the content"
    link = file.with_name("link")
    link.symlink_to(file.with_name("nowhere"))
    with pytest.raises(SecretFileError, match="exists already"):
        write_new(link, b"x")
    with pytest.raises(SecretFileError, match="cannot be written"):
        write_new(file / "below", b"x")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610, 0o644, 0o777])
def test_a_file_that_others_may_use(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(SecretFileError, match=f"{file} has mode {mode:04o}.*chmod 600"):
        read_secret(file)


def test_a_file_of_another_user(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could put another secret into it."""
    if os.geteuid() == 0:
        os.chown(file, 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(SecretFileError, match=f"{file} belongs to user [1-9]"):
        read_secret(file)


def test_a_link_to_a_file(file: Path) -> None:
    link = file.with_name("link")
    link.symlink_to(file)
    assert read_secret(link) == b"the content"
    file.chmod(0o644)
    with pytest.raises(SecretFileError, match="mode 0644"):
        read_secret(link)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SecretFileError, match="missing cannot be read"):
        read_secret(tmp_path / "missing")
    with pytest.raises(SecretFileError, match="not a regular file"):
        read_secret(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(SecretFileError, match="not a regular file"):
        read_secret(tmp_path / "pipe")  # and does not wait for a writer
    with pytest.raises(SecretFileError, match="not a regular file"):
        read_secret("/dev/zero")


def test_what_cannot_be_its_content(file: Path) -> None:
    file.write_bytes(b" \n")
    with pytest.raises(SecretFileError, match="is empty"):
        read_secret(file)
    file.write_bytes(b"x" * ((64 << 10) + 1))
    with pytest.raises(SecretFileError, match="larger than 64 KiB"):
        read_secret(file)
    file.write_bytes(b"\xef\xbb\xbfsecret")  # else it would sign other tickets than the same secret without it
    with pytest.raises(SecretFileError, match="begins with a byte order mark"):
        read_secret(file)
    for content in (b"two words", b"caf\xc3\xa9", b"a\r\nb", b"\0"):
        file.write_bytes(content)
        with pytest.raises(SecretFileError, match="printable ASCII") as error:
            read_text_secret(file)
        assert "two" not in str(error.value)
    file.write_bytes(b"too short to be a secret")
    with pytest.raises(SecretFileError, match=f"{file}: 24 bytes are too short") as error:
        read_ticket_secret(file)
    assert "to be a secret" not in str(error.value)


def test_new_secrets_are_new(file: Path) -> None:
    file.write_bytes(new_ticket_secret())
    assert len(read_secret(file)) >= 48
    assert read_text_secret(file).encode() == read_secret(file)
    assert read_ticket_secret(file) is not None
    assert len({new_ticket_secret() for _ in range(10)} | {new_key_file() for _ in range(10)}) == 20


def test_key_files(file: Path) -> None:
    assert load_keys(None) is None
    file.write_bytes(new_key_file())
    keys = load_keys(str(file))
    made = json.loads(file.read_text())
    assert made["server_secret_key"] not in repr(keys)
    assert {len(made["server_secret_key"]), len(made["client_secret_key"])} == {40}
    public, _ = zmq.curve_keypair()
    for changes in (
        {"server_secret_key": made["server_secret_key"][:-1]},
        {"server_secret_key": "\u20ac" * 40},
        {"server_secret_key": "~" * 40},
        {"server_secret_key": made["client_secret_key"]},
        {"kind": None},
        {"more": public.decode()},
    ):
        file.write_text(json.dumps({**made, **changes}))
        with pytest.raises(SecretFileError, match=f"{file} holds no side channel keys") as error:
            load_keys(str(file))
        shown = f"{error.value} {error.value.__cause__} {error.value.args}"
        assert made["client_secret_key"] not in shown
    for content in (b"nothing", b"[" * 60_000, b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(SecretFileError, match="holds no side channel keys"):
            load_keys(str(file))


def keygen(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script("vllm-ascend-pd"), "keygen", *args], capture_output=True, text=True, timeout=60)


def test_the_command_makes_them_and_says_what_to_do(tmp_path: Path) -> None:
    keys, secret = tmp_path / "side-channel.json", tmp_path / "tickets"
    made = keygen(str(keys))
    assert made.returncode == 0, made.stderr
    assert load_keys(str(keys)) is not None
    assert f'"side_channel_key_file": "{keys}"' in made.stdout
    assert json.loads(keys.read_text())["server_secret_key"] not in made.stdout
    made = keygen("--ticket-secret", str(secret))
    assert made.returncode == 0, made.stderr
    assert read_ticket_secret(secret) is not None
    assert f'"ticket_secret_file": "{secret}"' in made.stdout
    assert secret.read_text().strip() not in made.stdout
    again = keygen(str(keys))
    assert (again.returncode, again.stdout) == (1, "")
    assert f"{keys} exists already" in again.stderr
