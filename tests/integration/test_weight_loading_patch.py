# SPDX-License-Identifier: Apache-2.0
"""The plugin patches this vLLM where it builds models, whether that is imported already or later."""

import inspect
import subprocess
import sys

import pytest
from vllm.model_executor.model_loader import utils

import vllm_ascend_pd

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


@pytest.mark.parametrize("update", ["update_weights", "reload_weights"])
def test_the_worker_has_the_updates_that_are_noticed(update: str) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    assert callable(vars(Worker)[update])
