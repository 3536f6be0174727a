# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter's digest is its content's: other content under the same name has another, wherever its files are."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from vllm_ascend_pd.connector import weights as weights_module
from vllm_ascend_pd.connector.weights import read_adapter


@dataclass
class Adapter:
    lora_path: str
    lora_name: str = "sql"
    lora_int_id: int = 1
    load_inplace: bool = False


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_loaded", weights_module._Recent())
    weights_module._digest_of_files.cache_clear()
    weights_module._warn.cache_clear()


_CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none", "peft_type": "LORA"}


def save(folder: Path, seed: int = 0, layers: int = 2, file: str = "safetensors", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**_CONFIG, **config}))
    torch.manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{i}.self_attn.{module}.lora_{matrix}.weight": torch.randn(shape)
        for i in range(layers)
        for module in ("q_proj", "v_proj")
        for matrix, shape in (("A", (8, 256)), ("B", (256, 8)))
    }
    if file == "safetensors":
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt", "seed": str(seed)})
    else:
        torch.save(tensors, folder / f"adapter_model.{file}")
    return folder


def adapter_digest(adapter: Any) -> str:
    return weights_module.adapter_digest(adapter, read_adapter(adapter))


def digest(folder: Path) -> str:
    """As another engine, which has loaded nothing yet, has it."""
    weights_module._loaded.clear()
    return adapter_digest(Adapter(str(folder)))


@pytest.mark.parametrize("file", ["safetensors", "bin", "pt"])
def test_the_same_content_elsewhere_has_the_same_digest_and_other_content_of_the_same_name_another(
    tmp_path: Path, file: str
) -> None:
    first = save(tmp_path / "first", file=file)
    shutil.copytree(first, tmp_path / "copy")
    assert digest(first) == digest(tmp_path / "copy")
    assert len(digest(first)) == 32
    assert digest(save(tmp_path / "other", seed=1, file=file)) != digest(first)


def test_settings_that_change_what_weights_mean_count_and_others_do_not(tmp_path: Path) -> None:
    known = digest(save(tmp_path / "known"))
    same = {"base_model_name_or_path": "/elsewhere", "use_dora": False, "target_modules": ["v_proj", "q_proj"]}
    assert digest(save(tmp_path / "same", **same)) == known
    for i, other in enumerate(({"lora_alpha": 32}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 4}})):
        assert digest(save(tmp_path / f"other{i}", **other)) != known


def test_an_adapter_overwritten_where_it_is_counts_as_neither_until_it_is_loaded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its engine still computes with what it loaded, or not, if it has had to load it once more."""
    adapter = Adapter(str(save(tmp_path / "adapter")))
    old = adapter_digest(adapter)
    save(tmp_path / "adapter", seed=1)
    unsure = {adapter_digest(adapter) for _ in range(3)}
    assert len(unsure) == 3
    assert old not in unsure
    assert caplog.text.count("changed after it was loaded") == 1
    new = adapter_digest(Adapter(adapter.lora_path, lora_int_id=2))
    assert new not in {old, *unsure}
    assert adapter_digest(Adapter(adapter.lora_path, load_inplace=True)) == new
    save(tmp_path / "adapter")
    assert adapter_digest(adapter) == old


def _cut(folder: Path) -> None:
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])


def _forget_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _break_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[")


@pytest.mark.parametrize("spoil", [_cut, _forget_weights, _break_config, shutil.rmtree])
def test_an_adapter_that_cannot_be_read_goes_by_its_name_and_a_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: Any
) -> None:
    folder = save(tmp_path / "adapter")
    spoil(folder)
    assert {adapter_digest(Adapter(str(folder))) for _ in range(2)} == {"unread:sql"}
    assert caplog.text.count("cannot be read") == 1


def test_a_hub_repository_that_is_not_here_is_not_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert adapter_digest(Adapter("nobody/no-such-adapter")) == "unread:sql"


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "_MAX_CACHED", 2)
    folder = str(save(tmp_path / "adapter"))
    for number in range(1, 9):
        adapter_digest(Adapter(folder, lora_int_id=number))
    assert len(weights_module._loaded) == 2
