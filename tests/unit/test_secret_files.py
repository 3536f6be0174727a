# SPDX-License-Identifier: Apache-2.0
"""Files that hold secrets, and the command that makes the cluster's."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from harness.engines import script
from vllm_ascend_pd.core.secret import Secret, Use
from vllm_ascend_pd.transport.secret_files import (
    SecretFileError,
    cluster_secret,
    new_secret,
    read_secret,
    read_text_secret,
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


OLD, NEW = "o" * 32, "n" * 64


def same(one: Secret | None, lines: list[str]) -> bool:
    assert one is not None
    return one.keys(Use.TICKET) == Secret([line.encode() for line in lines]).keys(Use.TICKET)


@pytest.mark.parametrize("text", [f"{OLD}\n{NEW}\n", f"{OLD}\n{NEW}", f" {OLD} \r\n{NEW}\r\n"])
def test_two_lines_are_the_secret_in_use_and_another(file: Path, text: str) -> None:
    file.write_text(text, newline="")
    assert same(cluster_secret(file), [OLD, NEW])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("too-short-to-be-a-secret", "24 bytes are too short"),
        (f"{OLD} {NEW}", "printable ASCII"),
        (f"{OLD}\ncaf\u00e9{NEW}", "printable ASCII"),
        (f"{OLD}\n\n{NEW}", "holds 3 secrets"),
        (f"{OLD}\n{OLD}", "the same"),
        (f"{OLD}\n{NEW}\n{'t' * 32}", "holds 3 secrets"),
    ],
)
def test_what_cannot_be_a_clusters_secret(file: Path, text: str, reason: str) -> None:
    file.write_text(text)
    with pytest.raises(SecretFileError, match=f"{file}.*{reason}") as error:
        cluster_secret(file)
    shown = f"{error.value} {error.value.__cause__} {error.value.args}"
    assert OLD not in shown
    assert "to-be-a-secret" not in shown


def test_new_secrets_are_new(file: Path) -> None:
    file.write_bytes(new_secret())
    assert len(read_text_secret(file)) >= 48
    assert cluster_secret(file) is not None
    assert len({new_secret() for _ in range(10)}) == 10


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The home folder of this user, which is empty."""
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("xdg", ["", "relative", "xdg"])
def test_the_default_path(home: Path, monkeypatch: pytest.MonkeyPatch, xdg: str) -> None:
    folder = home / ".config"
    if xdg == "xdg":
        folder = home / "elsewhere"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder) if xdg == "xdg" else xdg)
    assert cluster_secret(None) is None
    path = folder / "vllm-ascend-pd" / "secret"
    path.parent.mkdir(parents=True)
    write_new(path, OLD.encode())
    assert same(cluster_secret(None), [OLD])


def test_a_file_at_the_default_path_that_cannot_be_read_is_an_error(home: Path) -> None:
    """Else the engine would do without a secret."""
    path = home / ".config" / "vllm-ascend-pd" / "secret"
    path.parent.mkdir(parents=True)
    path.symlink_to(home / "nowhere")
    with pytest.raises(SecretFileError, match=f"{path} cannot be read"):
        cluster_secret(None)
    path.unlink()
    write_new(path, OLD.encode())
    path.chmod(0o644)
    with pytest.raises(SecretFileError, match="mode 0644"):
        cluster_secret(None)


def test_without_a_home_folder_there_is_no_default_path(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is called `~` is none."""
    below = home / "~" / ".config" / "vllm-ascend-pd"
    below.mkdir(parents=True)
    write_new(below / "secret", OLD.encode())
    monkeypatch.chdir(home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as for a user that the system does not know
    assert cluster_secret(None) is None


def command(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([script("vllm-ascend-pd"), *args], capture_output=True, text=True, timeout=60)


def test_the_command_makes_the_secret_where_engines_look_for_it(home: Path) -> None:
    path = home / ".config" / "vllm-ascend-pd" / "secret"
    made = command("secret")
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"{path}: created with mode 0600. Copy it to the same path on every host")
    assert "secret_file" not in made.stdout, "nothing else is to do"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert cluster_secret(None) is not None
    content = path.read_text()
    assert content.strip() not in made.stdout
    again = command("secret")
    assert (again.returncode, again.stdout) == (1, "")
    assert f"{path} exists already" in again.stderr
    assert path.read_text() == content


def test_the_command_makes_the_secret_elsewhere_and_says_where_to_name_it(home: Path) -> None:
    path = home / "new" / "secret"
    made = command("secret", str(path))
    assert made.returncode == 0, made.stderr
    assert cluster_secret(path) is not None
    assert f'"secret_file": "{path}"' in made.stdout
    assert f"--secret-file {path}" in made.stdout
    refused = command("secret", str(path / "below"))
    assert (refused.returncode, refused.stdout) == (1, "")


def test_the_command_of_earlier_versions_names_the_new_one(tmp_path: Path) -> None:
    made = command("keygen", "--ticket-secret", str(tmp_path / "x"))
    assert made.returncode == 2
    assert "`vllm-ascend-pd secret`" in made.stderr
    assert not (tmp_path / "x").exists()
