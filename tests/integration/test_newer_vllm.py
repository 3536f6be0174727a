# SPDX-License-Identifier: Apache-2.0
"""What the connector uses of vLLM is still there in 0.32 and 0.33. Their source is read,
since importing each takes longer than all that is asked of it."""

import ast
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched import scheduler

from vllm_ascend_pd.connector.connector import LayerwisePushConnector
from vllm_ascend_pd.connector.patches import (
    install_for_decode_scheduler,
    vllm_0_23_and_0_30_scheduler,
    vllm_0_32_and_0_33_scheduler,
)
from vllm_ascend_pd.core.config import ConfigError

if vllm.__version__.startswith("0.23"):
    pytest.skip("newer vLLMs are compared with 0.30", allow_module_level=True)

CONNECTOR = Path(inspect.getfile(LayerwisePushConnector)).parent
LEFT_ALONE = {
    "bind_kv_cache_manager",
    "clear_connector_metadata",
    "finish_forward",
    "get_external_cache_hit_sources",
    "get_kv_connector_kv_cache_events",
    "get_mem_pool_context",
    "get_required_kvcache_layout",
    "has_connector_metadata",
    "has_pending_block_frees",
    "register_finished_partial_tail",
    "reset_cache",
    "reset_capture_state",
    "set_host_xfer_buffer_ops",
    "take_events",
}
"""Hooks of vLLM that nothing here needs. A hook that a newer vLLM adds is in no list: read what it asks for."""
IN_A_SETTING_NOW = "VLLM_MM_HASHER_ALGORITHM"
"""`connector/model.py` reads it only where vLLM's multimodal settings have no `mm_hasher_algorithm`."""

FIELDS_OF_THE_CACHE_CONFIGURATION = {
    *("num_blocks", "kv_cache_groups", "kv_cache_tensors"),
    "kv_cache_layout",  # the registered tensors have it
    # For prefix caches. A hit that ends within a block is cut to whole blocks before the connector hears of it.
    *("hash_block_size", "cache_hit_alignment_tokens", "prefix_cache_retention_interval"),
    "kv_tp_replicas",  # follows from the numbers of KV heads and ranks, as in `core/topology.py`
    # The groups that it has then are refused (`caches.py`).
    *("hisparse_host_num_blocks", "hisparse_host_block_stride", "hisparse_shared_host_pool"),
}


class Source(NamedTuple):
    """The source of a vLLM: in `folder` is its package."""

    version: str
    folder: Path

    def tree(self, module: str) -> ast.Module | None:
        path = self.folder.joinpath(*module.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        return ast.parse(file.read_text()) if file.is_file() else None

    def names(self, module: str) -> set[str]:
        tree = self.tree(module)
        return set() if tree is None else set(_defined(tree.body))

    def methods(self, module: str, name: str) -> dict[str, ast.FunctionDef]:
        """Returns the methods that a class has in its own body, without its properties."""
        tree = self.tree(module)
        assert tree is not None
        [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        functions = [node for node in found.body if isinstance(node, ast.FunctionDef)]
        return {each.name: each for each in functions if "property" not in _decorators(each)}


def _decorators(function: ast.FunctionDef) -> set[str]:
    return {ast.unparse(each) for each in function.decorator_list}


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield from (name.id for name in ast.walk(target) if isinstance(name, ast.Name))
        elif isinstance(node, ast.If | ast.Try):
            yield from _defined([*node.body, *node.orelse])


@pytest.fixture(scope="module", params=["0.32.0", "0.33.0"])
def newer(request: pytest.FixtureRequest) -> Source:
    folder = Path(sys.prefix) / f"vllm-{request.param.removesuffix('.0')}"
    if not folder.is_dir():
        pytest.skip(f"no vLLM {request.param}: scripts/setup_env.sh --with-compat unpacks it")
    return Source(request.param, folder)


@pytest.fixture(scope="module")
def hooks(newer: Source) -> dict[str, ast.FunctionDef]:
    """Hooks of a connector in the newer vLLM."""
    module = KVConnectorBase_V1.__module__
    found = newer.methods(module, KVConnectorBase_V1.__name__) | newer.methods(module, "SupportsHMA")
    return {name: hook for name, hook in found.items() if not name.startswith("_")}


def ours(name: str) -> Any:
    """Returns the connector's own hook. None: it leaves vLLM's as it is."""
    hook, base = (getattr(each, name, None) for each in (LayerwisePushConnector, KVConnectorBase_V1))
    return None if getattr(hook, "__func__", hook) is getattr(base, "__func__", base) else hook


def test_every_name_that_is_imported_is_there(newer: Source) -> None:
    """In functions and for types, too."""
    missing, environment = [], newer.names("vllm.envs") | {IN_A_SETTING_NOW, "is_set"}
    for path in sorted(CONNECTOR.rglob("*.py")):
        if "vllm_0_" in path.name and "0_33" not in path.name:
            continue  # a patch of older ones
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if isinstance(node, ast.ImportFrom) and module.split(".")[0] == "vllm":
                names = [alias.name for alias in node.names]
                known = newer.names(module)
                missing += [
                    f"{path.name}: {module}.{name}"
                    for name in names
                    if name not in known and newer.tree(f"{module}.{name}") is None
                ]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "envs":
                missing += [] if node.attr in environment else [f"{path.name}: vllm.envs.{node.attr}"]
    assert missing == []


def test_no_hook_is_gone_or_takes_less_than_it_is_given(hooks: dict[str, ast.FunctionDef]) -> None:
    abstract = {name for name, hook in hooks.items() if "abstractmethod" in _decorators(hook)}
    assert abstract
    assert [name for name in abstract if ours(name) is None] == []
    misfits = []
    for name, hook in hooks.items():
        if (own := ours(name)) is None:
            continue
        takes = inspect.signature(own).parameters
        given = [each.arg for each in [*hook.args.posonlyargs, *hook.args.args, *hook.args.kwonlyargs]][1:]
        if not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
            misfits += [f"{name}: {each}" for each in given if each not in takes]
    assert misfits == []


def test_hooks_that_are_new(hooks: dict[str, ast.FunctionDef]) -> None:
    assert {name for name in hooks if ours(name) is None} - LEFT_ALONE == set()


@pytest.mark.long
def test_what_its_scheduler_takes_back_is_sent_again(newer: Source) -> None:
    path = os.pathsep.join([str(newer.folder), *sys.path])
    file = Path(__file__).parents[1] / "unit" / "test_taken_back.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout


def test_the_patch_of_the_queues_finds_what_it_replaces(newer: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadlocks that it is for are in `test_decode_pressure.py`, which each version runs."""
    theirs = type("Scheduler", (), dict(newer.methods(scheduler.__name__, "Scheduler")))
    patch, older = vllm_0_32_and_0_33_scheduler, vllm_0_23_and_0_30_scheduler
    assert patch.fits(theirs)
    assert not older.fits(theirs)
    replaced: set[str] = set()
    monkeypatch.setattr(patch, "replace_in_schedulers", lambda name, made: replaced.add(name))
    monkeypatch.setattr(patch, "replace", lambda owner, name, made: None)
    patch.install()
    assert replaced
    assert [name for name in replaced if not hasattr(theirs, name)] == []


def test_a_decode_engine_refuses_a_scheduler_that_no_patch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "Scheduler", type("Scheduler", (), {}))
    monkeypatch.setattr(vllm, "__version__", "9.9.0")
    with pytest.raises(ConfigError, match=r"9\.9\.0"):
        install_for_decode_scheduler()


def test_fields_of_the_cache_configuration_that_are_new(newer: Source) -> None:
    """A field may say that caches lie in another way than their specs and tensors do."""
    tree = newer.tree("vllm.v1.kv_cache_interface")
    assert tree is not None
    [config] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KVCacheConfig"]
    fields = {ast.unparse(node.target) for node in config.body if isinstance(node, ast.AnnAssign)}
    assert "kv_cache_groups" in fields
    assert fields - FIELDS_OF_THE_CACHE_CONFIGURATION == set()
