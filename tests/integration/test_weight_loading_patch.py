# SPDX-License-Identifier: Apache-2.0
"""The plugin patches this vLLM where it builds models, whether that is imported already or later."""

import inspect
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.model_loader import utils

import vllm_ascend_pd
from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_32_weight_loading import weights_of

RESETS = find_spec("vllm.model_executor.model_loader.weight_checksum") is not None
"""Whether this vLLM can reset weights to zero."""

LATER = """
import sys
import vllm_ascend_pd
vllm_ascend_pd.register()
assert "vllm.model_executor.model_loader.utils" not in sys.modules, "processes without a model do not import it"
from vllm.model_executor.model_loader import utils
assert hasattr(utils.record_metadata_for_reloading, "_records_weights")
assert not any(type(finder).__module__.startswith("vllm_ascend_pd") for finder in sys.meta_path)
"""


def test_a_loader_that_is_imported_already_is_patched_once() -> None:
    vllm_ascend_pd.register()
    patched = utils.record_metadata_for_reloading
    assert hasattr(patched, "_records_weights")
    vllm_ascend_pd.register()
    assert utils.record_metadata_for_reloading is patched


def test_a_loader_that_is_imported_later_is_patched_then() -> None:
    subprocess.run([sys.executable, "-c", LATER], check=True, timeout=120)


def test_every_model_that_vllm_builds_passes_there() -> None:
    """Otherwise its weights would be unknown, and nothing would be compared."""
    source = inspect.getsource(utils.initialize_model)
    assert source.count("record_metadata_for_reloading(model)") == source.count("model_class(") == 2


@pytest.mark.parametrize("update", ["update_weights", "reload_weights", *(["reset_weights"] if RESETS else [])])
def test_the_worker_has_the_updates_that_are_noticed(update: str) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert callable(vars(Worker)[update])


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(2, 2)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for _, weight in weights:
            self.attention.weight.data.copy_(weight)


@pytest.mark.skipif(not RESETS, reason="this vLLM resets no weights")
def test_weights_that_the_weight_checker_resets_are_other_weights() -> None:
    """`POST /weight_checker` with the action `reset` calls it."""
    from vllm.v1.worker.gpu_worker import Worker

    vllm_ascend_pd.register()
    model = Model()
    utils.record_metadata_for_reloading(model)  # as with each model that is built
    model.load_weights([("attention.weight", torch.ones(2, 2))])
    loaded = weights_of([model.attention])
    assert loaded is not None
    before = loaded.current
    Worker.reset_weights(SimpleNamespace(model_runner=SimpleNamespace(get_model=lambda: model)))
    assert not model.attention.weight.any()
    assert before.fingerprint
    assert loaded.current.fingerprint not in ("", before.fingerprint)
    assert loaded.current.version > before.version
