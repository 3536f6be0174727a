# SPDX-License-Identifier: Apache-2.0
"""Files that somebody else wrote: a dump of KV, a model's configuration, a secret. What is read from them neither
reaches the terminal as it is nor keeps the command busy, and another user's secret is not used."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from vllm_ascend_pd.cli import main
from vllm_ascend_pd.transport.secret_files import SecretFileError, cluster_secret, new_secret, write_new

ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\nfound: nothing"
NOBODY = 65534

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `vllm-ascend-pd` in this process. Returns its exit code, and all that it printed."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["vllm-ascend-pd", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), "".join(capsys.readouterr())

    return run


def dump(file: Path, text: str) -> Path:
    ones = np.ones(1, dtype=np.uint64)
    arrays = dict.fromkeys(("entries", "heads", "places"), ones.reshape(1, 1)) | {"missing": ones}
    np.savez(file, words=ones.reshape(1, 1, 1), text=np.array(text), copies=np.array([7]), **arrays)
    return file


def test_escape_codes_in_a_dump(tmp_path: Path, command: Command) -> None:
    code, printed = command("verify", dump(tmp_path / "verify-0.npz", ESCAPES))
    assert code == 0
    assert [line.isprintable() for line in printed.splitlines()] == [True] * 3
    assert printed.splitlines()[1] == "found: the KV of blocks 7"


def test_a_dump_that_cannot_be_read_gets_one_line(tmp_path: Path, command: Command) -> None:
    """numpy explains some errors in several lines: here, that the head of an array is long."""
    fields = [(f"field-{number}", np.uint8) for number in range(2000)]
    np.save(tmp_path / "array.npy", np.zeros(1, dtype=fields))
    code, printed = command("verify", tmp_path / "array.npy")
    assert code == 1
    [line] = printed.splitlines()
    assert line.isprintable()


@pytest.mark.timeout(60)
def test_a_model_of_300_million_layers(tmp_path: Path, command: Command) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    sizes = {"num_hidden_layers": 300_000_000, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    code, printed = command("plan", tmp_path, "--prefill-tp", 1, "--decode-tp", 1)
    assert code == 1
    assert "10000 at most are counted" in printed


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_secret_of_another_user(tmp_path: Path) -> None:
    """It could be replaced by its owner."""
    file = tmp_path / "secret"
    write_new(file, new_secret())
    os.chown(file, NOBODY, -1)
    with pytest.raises(SecretFileError, match=f"belongs to user {NOBODY}"):
        cluster_secret(file)
