# SPDX-License-Identifier: Apache-2.0
"""Layers that are announced without a name are mapped by their order, once it was seen. Another order is noticed."""

import pytest

from vllm_ascend_pd.prefill.unnamed_layers import UnnamedLayers

# As Qwen3-Next: three linear-attention layers, then one with full attention. Registered in another order.
LINEAR = [f"model.layers.{index}.linear_attn" for index in (10, 0, 1, 2, 4, 5, 6, 8, 9)]
FULL = [f"model.layers.{index}.self_attn.attn" for index in (3, 7, 11)]
DRAFT = "mtp.layers.0.self_attn.attn"
STEP = ["", "", "", FULL[0], "", "", "", FULL[1], "", "", "", FULL[2], DRAFT, DRAFT]
IN_ORDER = sorted([*LINEAR, *FULL], key=lambda layer: int(layer.split(".")[2]))


def of_a_step(layers: UnnamedLayers, announced: list[str], completed: bool = True) -> tuple[list[str], bool]:
    """Returns which layers were meant, and whether that holds."""
    layers.start_step()
    return [layers.name(layer) for layer in announced], layers.end_step(completed)


def shown() -> UnnamedLayers:
    layers = UnnamedLayers([*LINEAR, *FULL, DRAFT], LINEAR)
    assert of_a_step(layers, STEP) == (STEP, True)
    return layers


def test_a_first_step_shows_the_order_and_later_ones_have_names() -> None:
    layers = shown()
    for _ in range(2):
        assert of_a_step(layers, STEP) == ([*IN_ORDER, DRAFT, DRAFT], True)
        assert layers.in_order


@pytest.mark.parametrize(
    "announced",
    [
        [*[""] * 6, FULL[0], *STEP[4:]],  # each is announced twice
        [*STEP[:8], *[""] * 6, FULL[2]],  # only the last three are
        STEP[1:],
        [*STEP[:11], "", *STEP[11:]],
        STEP + STEP,
    ],
    ids=["twice", "the last twice", "one less", "one more", "two passes"],
)
def test_another_order_is_noticed_and_nothing_is_mapped_any_more(announced: list[str]) -> None:
    layers = shown()
    assert not of_a_step(layers, announced)[1]
    assert not layers.in_order, "noticed when the last layer is announced, before the step ends"
    for _ in range(2):
        assert of_a_step(layers, STEP) == (STEP, True)


def test_nothing_is_said_of_steps_without_announcements_and_of_failed_ones() -> None:
    layers = shown()
    assert of_a_step(layers, [], True) == ([], True)
    assert of_a_step(layers, STEP[:5], completed=False)[1]
    assert of_a_step(layers, STEP) == ([*IN_ORDER, DRAFT, DRAFT], True)


@pytest.mark.parametrize(
    ("layers", "unnamed"),
    [
        (FULL, []),
        ([*LINEAR], LINEAR),  # no layer with a name
        ([*LINEAR, *FULL[:2]], LINEAR),  # a pipeline stage that ends with unnamed ones
        ([*LINEAR, *FULL, "a.layers.0.x"], [*LINEAR, "a.layers.0.x"]),
        ([*LINEAR, *FULL, "x"], [*LINEAR, "x"]),
    ],
)
def test_where_the_order_cannot_be_checked_nothing_is_mapped(layers: list[str], unnamed: list[str]) -> None:
    mapped = UnnamedLayers(layers, unnamed)
    announced = ["" if layer in unnamed else layer for layer in sorted(layers)]
    for _ in range(3):
        assert of_a_step(mapped, announced) == (announced, True)
