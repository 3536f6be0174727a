# SPDX-License-Identifier: Apache-2.0
"""What becomes of the launch commands that vllm-ascend's guides publish."""

import pytest

from harness.recipes import FILES, NEWER, NOT_STARTED, OLDER, PAGE, STARTED, Recipe, page, recipes

RECIPES = {version: recipes(version) for version in FILES}
EVERY = [recipe for of_version in RECIPES.values() for recipe in of_version]


def pairs(version: str) -> list[Recipe]:
    return [recipe for recipe in RECIPES[version] if recipe.side != "both"]


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run tests/harness/recipes.py"


@pytest.mark.parametrize(("version", "counts"), [(OLDER, (89, 40, 42, 81)), (NEWER, (119, 51, 58, 101))])
def test_how_many_there_are_and_how_many_work(version: str, counts: tuple[int, ...]) -> None:
    sides = [recipe.side for recipe in RECIPES[version]]
    working = sum(not recipe.migrated.stops for recipe in pairs(version))
    assert (len(sides), sides.count("prefill"), sides.count("decode"), working) == counts


@pytest.mark.parametrize("recipe", EVERY, ids=lambda recipe: f"{recipe.number}-{recipe.side}-{recipe.architecture}")
def test_every_recipe_gets_an_entry_or_a_reason(recipe: Recipe) -> None:
    made = recipe.migrated
    if made.stops:
        assert all(change.subject and change.why for change in made.stops)
    else:
        ours = made.kv_transfer_config
        entries = ours.get("kv_connector_extra_config", {}).get("connectors", [ours])
        assert "LayerwisePushConnector" in [entry["kv_connector"] for entry in entries]
        assert made.command[0][:2] == ["vllm", "serve"]


def test_commands_that_move_no_prompts_are_refused_as_such() -> None:
    for recipe in EVERY:
        if recipe.side == "both" and len(recipe.migrated.was) == 1:
            assert [change.why for change in recipe.migrated.stops] == [recipe.migrated.stops[0].why]
            assert "no counterpart" in recipe.migrated.stops[0].why


def test_every_architecture_is_started_or_has_a_reason() -> None:
    started = {RECIPES[OLDER][number - 1].architecture for pair in STARTED.values() for number in pair}
    works = {recipe.architecture for recipe in pairs(OLDER) if not recipe.migrated.stops}
    assert set(NOT_STARTED) == works - started
