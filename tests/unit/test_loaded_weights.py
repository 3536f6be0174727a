# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of loaded weights: the same for the same weights however they are loaded, another for others."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_ascend_pd.connector.patches.vllm_0_23_to_0_32_weight_loading import _noticing, record, weights_of
from vllm_ascend_pd.core.weights import LoadedWeights, NamedTensor

Tensors = dict[str, torch.Tensor]


def checkpoint(seed: int = 0) -> Tensors:
    torch.manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(512, 64),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(64, 64).to(torch.bfloat16).float(),
        "model.layers.0.mlp.experts.3.up_proj.weight": torch.randn(8, 64),
        "model.layers.0.mlp.gate.weight": torch.randn(4, 64).to(torch.bfloat16).float(),
        "model.norm.weight": torch.randn(64),
        "model.layers.0.scale": torch.tensor(0.5),
        "model.layers.0.packed": torch.randint(0, 100, (64, 64), dtype=torch.int32),
        "lm_head.weight": torch.randn(512, 64),
    }


def consume(weights: Iterable[NamedTensor]) -> None:
    for _ in weights:
        pass


def fingerprint(*loads: Iterable[NamedTensor]) -> str:
    loaded = LoadedWeights()
    for weights in loads:
        loaded.load(weights, consume)
    return loaded.current.fingerprint


KNOWN = fingerprint(checkpoint().items())


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    tensors = checkpoint()
    return {**tensors, name: change(tensors[name])}


def test_the_same_weights_in_any_order_and_in_any_number_of_calls_are_equal() -> None:
    items = list(checkpoint().items())
    assert len(KNOWN) == 16
    assert fingerprint(reversed(items)) == KNOWN
    assert fingerprint(iter(items)) == fingerprint(tuple(items)) == KNOWN
    assert fingerprint(items[3:], items[:3]) == KNOWN
    assert fingerprint(items, items) == KNOWN, "loaded again"


def test_the_same_weights_in_another_format_are_equal(tmp_path: Path) -> None:
    tensors = checkpoint()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    save_file(tensors, tmp_path / "model.safetensors")
    assert fingerprint(torch.load(tmp_path / "pytorch_model.bin", weights_only=True, mmap=True).items()) == KNOWN
    assert fingerprint(load_file(tmp_path / "model.safetensors").items()) == KNOWN
    narrow = {
        name: tensor.to(torch.bfloat16) if name.endswith(("q_proj.weight", "gate.weight")) else tensor
        for name, tensor in tensors.items()
    }
    assert fingerprint(narrow.items()) == KNOWN, "values that bfloat16 holds exactly"
    strided = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    assert fingerprint(strided.items()) == KNOWN


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.mlp.experts.3.up_proj.weight"])
def test_what_not_every_rank_and_format_has_does_not_count(name: str) -> None:
    assert fingerprint([(n, t) for n, t in checkpoint().items() if n != name]) == KNOWN


@pytest.mark.parametrize(
    "other",
    [
        checkpoint(seed=1),
        changed("model.norm.weight", lambda t: t + 1e-3),
        changed("model.embed_tokens.weight", lambda t: t * 1.01),
        changed("model.layers.0.packed", lambda t: t + 1),
        changed("model.layers.0.scale", lambda t: t * 2),
        changed("model.norm.weight", lambda t: t.reshape(8, 8)),
        {name: tensor for name, tensor in checkpoint().items() if "norm" not in name},
        {name.replace("norm", "other"): tensor for name, tensor in checkpoint().items()},
    ],
    ids=["seed", "norm", "embedding", "packed", "scale", "shape", "missing", "name"],
)
def test_other_weights_are_told_apart(other: Tensors) -> None:
    assert fingerprint(other.items()) not in ("", KNOWN)


def test_a_light_fine_tune_is_told_apart() -> None:
    """One value in a hundred differs, as after a step of reinforcement learning in bfloat16."""
    torch.manual_seed(2)
    shapes = {f"model.layers.{i}.{name}.weight": (256, 256) for i in range(4) for name in ("q", "k", "v", "o", "up")}
    base = {name: torch.randn(shape) for name, shape in shapes.items()}
    tuned = {name: torch.where(torch.rand(tensor.shape) < 0.01, tensor * 1.01, tensor) for name, tensor in base.items()}
    assert fingerprint(base.items()) != fingerprint(tuned.items())


def test_a_partial_update_replaces_what_it_brings_and_going_back_restores_the_fingerprint() -> None:
    loaded, tensors = LoadedWeights(), checkpoint()
    loaded.load(tensors.items(), consume)
    loaded.load([("model.norm.weight", tensors["model.norm.weight"] + 1)], consume)
    updated = loaded.current
    assert updated.fingerprint == fingerprint(changed("model.norm.weight", lambda t: t + 1).items())
    loaded.load([("model.norm.weight", tensors["model.norm.weight"])], consume)
    assert loaded.current.fingerprint == KNOWN
    assert loaded.current.version > updated.version, "what began before both updates is not mistaken for whole"


def test_an_update_of_single_values_counts_wherever_they_are() -> None:
    """NaN stands for a value that stays: two updates of places that are not sampled look the same, but are two."""
    patch = torch.full((512, 64), float("nan"))
    patch[100, 7] = 1.0
    updates: list[Iterable[NamedTensor]] = [[("model.embed_tokens.weight", patch)]]
    seen = [fingerprint(checkpoint().items(), *(n * updates)) for n in range(3)]
    assert len(set(seen)) == 3


def test_while_weights_are_loaded_they_are_neither_the_old_nor_the_new_ones() -> None:
    loaded = LoadedWeights()
    versions: list[tuple[int, bool]] = []

    def watch(weights: Iterable[NamedTensor]) -> None:
        consume(weights)
        versions.append((loaded.current.version, loaded.current.loading))

    before = loaded.current.version
    loaded.load(checkpoint().items(), watch)
    assert versions == [(before + 1, True)]
    assert (loaded.current.version, loaded.current.loading) == (before + 2, False)


def test_a_load_that_fails_counts_as_an_update() -> None:
    loaded, tensors = LoadedWeights(), checkpoint()
    loaded.load(tensors.items(), consume)
    before = loaded.current

    def fail(weights: Iterable[NamedTensor]) -> None:
        next(iter(weights))
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        loaded.load(iter(checkpoint(seed=1).items()), fail)
    assert loaded.current.version > before.version
    assert not loaded.current.loading
    assert loaded.current.fingerprint != before.fingerprint


def test_what_loads_no_tensors_of_a_checkpoint_is_unknown() -> None:
    assert LoadedWeights().current.fingerprint == ""
    assert fingerprint([]) == ""
    assert fingerprint([("model.norm.weight", torch.empty(64, device="meta"))]) == ""


class OwnClass(torch.Tensor):
    """As quantization libraries have."""


DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool, torch.float64, torch.int64]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64])
def test_tensors_of_any_type_are_sampled(dtype: torch.dtype) -> None:
    values = torch.arange(4096).remainder(2).reshape(64, 64)
    seen = {fingerprint([("w", tensor.to(dtype))]) for tensor in (values, 1 - values)}
    assert len(seen) == 2


def test_a_tensor_that_cannot_be_sampled_is_loaded_all_the_same() -> None:
    odd = torch.zeros(64, 64).as_subclass(OwnClass)
    taken: list[str] = []
    loaded = LoadedWeights()
    loaded.load([("w", odd)], lambda weights: taken.extend(name for name, _ in weights))
    assert taken == ["w"]
    assert loaded.current.fingerprint != ""


def test_models_of_70_billion_parameters_cost_a_fraction_of_a_second() -> None:
    """80 layers of Llama 70B's shapes; no value but the sampled ones is read, or these tensors would take hours."""
    hidden, inner, kv = 8192, 28672, 1024
    value = torch.ones(1, dtype=torch.bfloat16)
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }

    def weights() -> Iterator[NamedTensor]:
        yield "model.embed_tokens.weight", value.expand(128256, hidden)
        for layer in range(80):
            for name, shape in shapes.items():
                yield f"model.layers.{layer}.{name}.weight", value.expand(shape)

    begun = time.process_time()
    assert fingerprint(weights()) != ""
    assert time.process_time() - begun < 1.0  # measured: 0.05 to 0.07


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.Linear(2, 2)
        self.loaded: list[str] = []

    def load_weights(self, weights: Iterable[NamedTensor]) -> set[str]:
        self.loaded = [name for name, _ in weights]
        return set(self.loaded)


class Whole(torch.nn.Module):
    """A model of which one part is a model of its own, as a multimodal one's language model."""

    def __init__(self) -> None:
        super().__init__()
        self.language_model = Model()
        record(self.language_model)

    def load_weights(self, weights: Iterable[NamedTensor]) -> set[str]:
        return self.language_model.load_weights((name.removeprefix("language_model."), t) for name, t in weights)


def test_a_models_own_load_weights_is_recorded_and_a_draft_beside_it_is_not() -> None:
    model, draft = Model(), Model()
    record(model)
    record(draft)
    assert model.load_weights(checkpoint().items()) == {*checkpoint()}
    draft.load_weights(weights=list(checkpoint(seed=1).items()))
    loaded = weights_of([model.attention])
    assert loaded is not None
    assert loaded.current.fingerprint == KNOWN
    of_draft = weights_of([draft.attention])
    assert of_draft is not None
    assert of_draft.current.fingerprint == fingerprint(checkpoint(seed=1).items())


def test_a_model_in_parts_is_recorded_as_a_whole_under_the_checkpoints_names() -> None:
    model = Whole()
    record(model)
    named = {f"language_model.{name}": tensor for name, tensor in checkpoint().items()}
    assert model.load_weights(named.items()) == {*checkpoint()}
    loaded = weights_of([model.language_model.attention])
    assert loaded is not None
    assert loaded.current.fingerprint == fingerprint(named.items())


def test_a_model_that_nobody_recorded_is_unknown() -> None:
    assert weights_of([Model().attention]) is None
    assert weights_of([]) is None


def test_what_others_patch_later_is_called() -> None:
    class Patched(Model):
        pass

    model = Patched()
    record(model)
    Patched.load_weights = lambda self, weights: {"patched"}  # type: ignore[method-assign]
    assert model.load_weights([]) == {"patched"}


def test_an_update_that_writes_to_parameters_directly_counts_and_one_that_was_seen_does_not_twice() -> None:
    model = Model()
    record(model)
    model.load_weights(checkpoint().items())
    loaded = weights_of([model.attention])
    assert loaded is not None

    class Worker:
        def update_weights(self, update: Any) -> None:
            if update is not None:
                model.load_weights(update)

    update = _noticing(Worker.update_weights)
    update(Worker(), checkpoint(seed=1).items())
    assert loaded.current.fingerprint == fingerprint(checkpoint(seed=1).items())
    update(Worker(), None)
    assert loaded.current.fingerprint not in (KNOWN, fingerprint(checkpoint(seed=1).items()))


def test_engines_with_other_updates_that_were_not_seen_differ() -> None:
    def after(*updates: str) -> str:
        model = Model()
        record(model)
        model.load_weights(checkpoint().items())
        loaded = weights_of([model.attention])
        assert loaded is not None
        for update in updates:
            loaded.changed_unseen(update)
        return loaded.current.fingerprint

    some = [(), ("update_weights",), ("reset_weights",), ("reset_weights", "update_weights"), 2 * ("update_weights",)]
    assert len({after(*updates) for updates in [*some, *some]}) == len(some)


def test_a_load_format_that_splits_tensors_by_rank_leaves_the_weights_unknown() -> None:
    """Its ranks would seem to have other weights on an engine of another tensor-parallel size."""
    model = torch.nn.ModuleDict({"attention": torch.nn.Linear(2, 2)})
    whole = _Loading(model)
    record(whole)
    whole.load_weights(checkpoint().items())
    known = weights_of([model["attention"]])
    assert known is not None
    assert known.current.fingerprint
    split = weights_of([model["attention"]], "bitsandbytes")
    assert split is known
    assert not known.current.fingerprint
    version = known.current.version
    whole.load_weights(checkpoint(1).items())
    assert not known.current.fingerprint
    assert known.current.version > version, "an update is noticed all the same"


class _Loading(torch.nn.Module):
    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def load_weights(self, weights: Iterable[NamedTensor]) -> None:
        consume(weights)
