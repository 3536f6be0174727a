# SPDX-License-Identifier: Apache-2.0
"""Which files' fingerprint an engine's weights have, and that vLLM's own updates at run time change it."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ascend_pd.connector.patches import vllm_0_23_to_0_33_weight_updates as patch
from vllm_ascend_pd.connector.weights import loaded_weights
from vllm_ascend_pd.core.weights import UNKNOWN, LoadedWeights


def config(folder: Path | str, load_format: str = "auto", **model: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None, **model),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def save(path: Path, value: float = 1.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({f"model.{path.stem}.weight": torch.full((4,), value)}, path)
    return path


def known(folder: Path | str, load_format: str = "auto", **model: Any) -> str:
    return loaded_weights(config(folder, load_format, **model), patch.follow, logs=True).current.fingerprint


def test_the_files_are_those_that_vllm_loads(tmp_path: Path) -> None:
    """Of two sets of files, as Mistral's repositories have, those of the format; and only those in the index."""
    save(tmp_path / "a" / "model-1.safetensors")
    one = known(tmp_path / "a")
    assert one not in ("", UNKNOWN)
    save(tmp_path / "a" / "left over.safetensors")
    assert known(tmp_path / "a") != one
    index = {"weight_map": {"model.model-1.weight": "model-1.safetensors"}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert known(tmp_path / "a") == one
    save(tmp_path / "a" / "consolidated.safetensors")
    save(tmp_path / "mistral" / "consolidated.safetensors")
    assert known(tmp_path / "a") == known(tmp_path / "a", "mistral") == known(tmp_path / "mistral") != one
    assert known(tmp_path / "a", "safetensors") == known(tmp_path / "a", "hf") == one


def test_vllms_loader_takes_the_same_files(tmp_path: Path) -> None:
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    from vllm_ascend_pd.connector.weights import _files

    for name in ("model-1", "model-2", "consolidated", "left over"):
        save(tmp_path / f"{name}.safetensors")
    index = {"weight_map": {"x": "model-1.safetensors", "y": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for load_format in ("auto", "hf", "safetensors", "mistral"):
        loader = DefaultModelLoader(LoadConfig(load_format=load_format))
        theirs = loader._prepare_weights(str(tmp_path), None, None, True, None)[1]
        assert sorted(theirs) == sorted(_files(config(tmp_path, load_format), None)), load_format


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state", "tensorizer", "gguf", "netloader", "pt"])
def test_other_load_formats_are_unknown(tmp_path: Path, caplog: pytest.LogCaptureFixture, load_format: str) -> None:
    save(tmp_path / "model.safetensors")
    assert known(tmp_path, load_format) == UNKNOWN
    assert f"weights are not known (load format {load_format} " in caplog.text


@pytest.mark.parametrize(
    ("folder", "model", "reason"),
    [
        ("empty", {}, "there are no safetensors files in"),
        ("pickled", {}, "there are no safetensors files in"),
        ("broken", {}, "model.safetensors: "),
        ("model.gguf", {}, "there are no safetensors files in"),
        ("nobody/no-such-model", {}, ""),
        ("gone", {}, ""),
        ("empty", {"model_weights": "s3://bucket/model"}, "they are at s3://bucket/model"),
    ],
)
def test_files_that_cannot_be_compared_are_unknown_and_a_warning_says_why(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    folder: str,
    model: dict[str, str],
    reason: str,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("empty", "pickled", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"x" * 100)
    where = folder if "/" in folder else str(tmp_path / folder)
    assert known(where, **model) == UNKNOWN
    assert "this engine's weights are not known (" in caplog.text
    assert reason in caplog.text


def test_one_rank_says_which_weights_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    save(tmp_path / "model.safetensors")
    loaded_weights(config(tmp_path), patch.follow, logs=False)
    assert caplog.text == ""
    found = loaded_weights(config(tmp_path), patch.follow, logs=True)
    assert f"the model's weights are {found.current.fingerprint}" in caplog.text


class Worker:
    """A worker whose updates do nothing."""

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("weights_path") == "gone":
            raise OSError

    def update_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self) -> None: ...


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    module = ModuleType("a.worker")
    kind = type("Worker", (), dict(vars(Worker)))
    module.Worker = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(patch, "_WORKERS", ((module.__name__, "Worker"), ("no.such.module", "Worker")))
    yield kind()
    patch._followed.clear()


def test_reloaded_files_have_their_own_fingerprint(worker: Any, tmp_path: Path) -> None:
    first, second = (save(tmp_path / name / "model.safetensors", n).parent for n, name in enumerate("ab"))
    loaded = loaded_weights(config(first), patch.follow, logs=False)
    of_first, of_second = known(first), known(second)
    worker.reload_weights(weights_path=str(second))
    assert loaded.current.fingerprint == of_second != of_first
    worker.reload_weights()
    assert loaded.current.fingerprint == of_first
    worker.reload_weights(weights_iterator=iter(()))
    assert loaded.current.fingerprint.startswith(f"{of_first}+")
    worker.reload_weights(weights_path=str(second))
    with pytest.raises(OSError):  # noqa: PT011 - the worker's own
        worker.reload_weights(weights_path="gone")
    assert loaded.current.fingerprint.startswith(f"{of_second}+"), "what it left is not known"
    assert not loaded.current.loading


@pytest.mark.parametrize("update", ["update_weights", "finish_weight_update"])
def test_updates_change_the_fingerprint(worker: Any, tmp_path: Path, update: str) -> None:
    save(tmp_path / "model.safetensors")
    loaded = loaded_weights(config(tmp_path), patch.follow, logs=False)
    before = loaded.current
    getattr(worker, update)(*[None] * (update == "update_weights"))
    assert loaded.current.fingerprint.startswith(f"{before.fingerprint}+")
    assert loaded.current.version > before.version


def test_an_update_of_layers_that_draft_alone_does_not(worker: Any, tmp_path: Path) -> None:
    """Prefill may have no such layers, and could not follow."""
    save(tmp_path / "model.safetensors")
    loaded = loaded_weights(config(tmp_path), patch.follow, logs=False)
    before = loaded.current
    worker._weight_update_is_draft = True  # it stays so until the next update starts
    worker.update_weights(None)
    worker.finish_weight_update()
    assert loaded.current == before
    worker.reload_weights(weights_iterator=iter(()))
    assert loaded.current.version > before.version


def test_a_worker_is_patched_once_and_its_own_errors_pass(worker: Any) -> None:
    patch.follow(LoadedWeights("a"), lambda folder: "a")
    once = type(worker).update_weights
    patch.follow(LoadedWeights("b"), lambda folder: "b")
    assert type(worker).update_weights is once


def test_vllms_worker_has_the_updates_that_are_noticed() -> None:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker

    missing = {name for name in patch.UPDATES if name not in vars(VllmWorker)}
    assert missing <= {"reset_weights"}, "vLLM 0.23 does not have that one"
