# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's fingerprint is that of its tensors, however files hold them, and takes few reads."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vllm_ascend_pd.core.weights import UNKNOWN, LoadedWeights, WeightUpdates, are_alike, of_file, of_tensors

Tensors = dict[str, torch.Tensor]


def tensors(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {f"model.layers.{i}.weight": torch.randn(16, 64) for i in range(4)} | {"model.norm.weight": torch.ones(8)}


def save(folder: Path, *files: Tensors, metadata: dict[str, str] | None = None) -> str:
    folder.mkdir()
    for number, held in enumerate(files):
        save_file(held, folder / f"model-{number}.safetensors", metadata)
    return fingerprint(folder)


def fingerprint(folder: Path) -> str:
    return of_tensors([str(path) for path in sorted(folder.iterdir())], timeout_s=10.0)


def test_where_the_same_tensors_are_does_not_matter(tmp_path: Path) -> None:
    held = tensors()
    names = [*held]
    first = save(tmp_path / "one", held)
    assert len(first) == 32
    parts = [{name: held[name] for name in names[a:b]} for a, b in ((2, 5), (0, 1), (1, 2))]
    assert save(tmp_path / "elsewhere, in three files", *parts, metadata={"format": "pt"}) == first


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update(tensors(seed=1)),
        lambda held: held["model.norm.weight"].__setitem__(5, 2.0),
        lambda held: held.update({"model.layers.0.weight": held["model.layers.0.weight"].view(64, 16)}),
        lambda held: held.update({"model.norm.weight": held["model.norm.weight"].view(torch.int32)}),
        lambda held: held.update({"model.other.weight": held.pop("model.norm.weight")}),
        lambda held: held.pop("model.norm.weight"),
        lambda held: held.update(
            {
                "model.layers.0.weight": held["model.layers.1.weight"],
                "model.layers.1.weight": held["model.layers.0.weight"],
            }
        ),
    ],
    ids=["all values", "one value", "shape", "type", "name", "number", "two names exchanged"],
)
def test_other_tensors_have_another_fingerprint(tmp_path: Path, change: Callable[[Tensors], object]) -> None:
    held = tensors()
    first = save(tmp_path / "first", held)
    change(held)
    assert save(tmp_path / "other", held) != first


def test_700_gb_take_few_and_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more tensors than may each have several samples. Measured on two cores: 1.3 s for 91,000 tensors."""
    files, each, size = 40, 1000, 17_500_000
    for number in range(files):
        header = json.dumps(
            {
                f"experts.{number}.{i}": {"dtype": "I8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
                for i in range(each)
            }
        ).encode()
        with (tmp_path / f"{number}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + each * size)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) >= 700e9
    read: list[int] = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, length, at: read.append(length) or pread(fd, length, at))
    fingerprint(tmp_path)
    samples = [length for length in read if length == 128]
    assert len(samples) == 2 * files * each
    assert len(read) == len(samples) + 2 * files


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _lengthen_header(path: Path) -> None:
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def _break_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:8] + b"[" + path.read_bytes()[9:])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("spoil", [_cut, _lengthen_header, _break_header, _empty])
def test_a_file_that_is_no_safetensors_file_is_named(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    save(tmp_path / "model", tensors(), {"other": torch.ones(2)})
    spoil(tmp_path / "model" / "model-1.safetensors")
    with pytest.raises(ValueError, match=r"model-1\.safetensors: "):
        fingerprint(tmp_path / "model")


def test_what_takes_too_long_is_not_read_to_its_end(tmp_path: Path) -> None:
    save(tmp_path / "model", tensors())
    with pytest.raises(TimeoutError):
        of_tensors([str(tmp_path / "model" / "model-0.safetensors")], timeout_s=-1.0)


def test_a_file_of_another_format_goes_by_its_length_and_pieces(tmp_path: Path) -> None:
    content = torch.randn(1 << 18).numpy().tobytes()
    for name, data in (("a", content), ("shorter", content[:-1]), ("other", content[:-9] + b"!" * 9)):
        (tmp_path / name).write_bytes(data)
    shutil.copy(tmp_path / "a", tmp_path / "copy")
    first, copy, shorter, other = (of_file(str(tmp_path / name)) for name in ("a", "copy", "shorter", "other"))
    assert first == copy
    assert len({first, shorter, other}) == 3


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", UNKNOWN, True),
        (UNKNOWN, UNKNOWN, True),
        ("a+1", "a+1", True),
        ("a+1", "a", False),
        ("a+1", UNKNOWN, False),
        ("a+1", f"{UNKNOWN}+1", True),
        ("a+1", f"{UNKNOWN}+2", False),
        ("a+1", "", True),
    ],
)
def test_weights_are_compared_by_what_both_sides_know(one: str, other: str, alike: bool) -> None:
    assert are_alike(one, other) == are_alike(other, one) == alike


def updated(loaded: LoadedWeights, *updates: str) -> str:
    for update in updates:
        with loaded.changing(update):
            pass
    return loaded.current.fingerprint


def test_an_update_that_fails_counts_and_one_within_another_does_not() -> None:
    loaded = LoadedWeights("a")

    def fail() -> None:
        with loaded.changing("reload", lambda: "b"):
            raise OSError

    with pytest.raises(OSError):  # noqa: PT011 - the update's own
        fail()
    assert not loaded.current.loading
    assert loaded.current.fingerprint == updated(LoadedWeights("a"), "reload")
    with loaded.changing("x"):
        version = loaded.current.version
        updated(loaded, "part of it")
        assert (loaded.current.version, loaded.current.loading) == (version, True)


def test_lost_caches_count_as_an_update_with_the_same_weights() -> None:
    loaded = LoadedWeights("a")
    updates = WeightUpdates("0/0", loaded)
    loaded.caches_lost()
    assert loaded.current.fingerprint == "a"
    assert updates.are_unknown_to({})
    assert updates.take_news() == {"0/0": 1}
