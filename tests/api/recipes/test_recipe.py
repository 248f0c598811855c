"""What a recipe runs, and that it runs nothing twice."""

from pathlib import Path

import pytest

import windlass
from windlass.errors import InputErrors, RequestError
from windlass.experiments.recipes.recipe import known_recipes
from windlass.experiments.recipes.recipe_plan import RecipeArm, RecipeLeg, RecipePlan, request_of
from windlass.experiments.recipes.sparse_then_dense import narrower_model
from windlass.jobs.model_graph import capture
from windlass.schema import ModelIdentity
from windlass.sweep.search_space import grid_point

SMALL = ("train.steps=16", "train.batch=4", "compile=false", "precision=float32")


def made_plan() -> RecipePlan:
    legs = (
        RecipeLeg(steps=10, flop=2.0, predicted_seconds=1.0),
        RecipeLeg(steps=5, flop=7.0, predicted_seconds=3.0),
    )
    arms = (
        RecipeArm(name="one", meaning="x", settings={"model.layers": 1}, parameters=1, legs=legs),
        RecipeArm(name="two", meaning="x", settings={}, parameters=1, legs=legs[:1]),
    )
    return RecipePlan(recipe="made", scale="tiny", settings={"train.batch": 4}, arms=arms)


def test_all_arms_run_with_one_seed_before_any_runs_with_the_next() -> None:
    request = made_plan().sweep(3, 1)
    points = [grid_point(request.dimensions(), number) for number in range(6)]

    assert [point["arm"] for point in points] == ["one", "two"] * 3
    assert [point["train.seed"] for point in points] == [1, 1, 2, 2, 3, 3]
    first = windlass.make_request(None, *request.overrides(points[0]))
    assert (first.model.layers, first.train.batch, first.train.seed) == (1, 4, 1)
    assert request.total == 6


def test_more_seeds_are_the_same_sweep_with_more_trials() -> None:
    few, many = made_plan().sweep(1, 1), made_plan().sweep(3, 1)

    assert few.model_copy(update={"trials": many.trials}) == many


def test_flop_are_counted_by_the_legs_of_a_run() -> None:
    arm = made_plan().arms[0]

    assert [arm.flop_after(step) for step in (0, 4, 10, 12, 15)] == [0, 8, 20, 34, 55]
    assert (arm.steps, arm.flop, arm.predicted_seconds) == (15, 55, 25)
    assert made_plan().predicted_seconds(2) == 2 * (25 + 10)


@pytest.mark.parametrize("share", [0.2, 0.35, 0.6])
def test_the_narrower_model_has_the_flop_that_are_asked_for(share: float) -> None:
    model = ModelIdentity(name="gpt-tiny", width=256, heads=8, layers=2, vocabulary=1024)
    flop = share * capture(model).micro_batch_flop(1, 256)

    dials = narrower_model(model, flop, 256)

    narrow = request_of({"model.name": "gpt-tiny", "model.layers": 2, "model.vocabulary": 1024}
                        | dials).model_identity  # fmt: skip
    assert capture(narrow).micro_batch_flop(1, 256) == pytest.approx(flop, rel=0.01)
    assert dials["model.width"] < 256
    assert 2 < dials["model.ffn"] / dials["model.width"] < 8


def test_the_arms_of_sparse_then_dense_use_the_flop_of_the_dense_one(home: Path) -> None:
    plan = windlass.plan_recipe("sparse-then-dense", *SMALL, f"data.source={home / 'text'}")

    dense, sparse, then_dense, narrow = plan.arms
    assert [arm.name for arm in plan.arms] == [
        "dense", "sparse", "sparse-then-dense", "narrower-dense",
    ]  # fmt: skip
    for arm in (sparse, then_dense, narrow):
        last = arm.legs[-1].flop
        assert dense.flop <= arm.flop < dense.flop + last, arm.name
        assert arm.steps > dense.steps
    assert narrow.legs[0].flop == pytest.approx(sparse.legs[0].flop, rel=0.01)
    switch = then_dense.legs[0].steps
    assert round(then_dense.settings["sparsity.until"] * then_dense.steps) == switch
    assert [leg.flop for leg in then_dense.legs] == [sparse.legs[0].flop, dense.legs[0].flop]


def test_a_recipe_or_scale_that_does_not_exist_is_refused() -> None:
    with pytest.raises(RequestError, match="did you mean `sparse-then-dense`"):
        windlass.plan_recipe("sparse-than-dense")
    with pytest.raises(RequestError, match="no scale `huge`"):
        windlass.plan_recipe("sparse-then-dense", scale="huge")
    assert list(known_recipes()) == ["sparse-then-dense"]


def test_a_folder_with_another_recipe_is_refused(tmp_path: Path) -> None:
    made_plan().save(tmp_path / "recipe.json")

    with pytest.raises(InputErrors) as caught:
        windlass.run_recipe("sparse-then-dense", "train.steps=8", folder=tmp_path)

    assert "`recipe` = made, and not sparse-then-dense" in caught.value.messages[0]
    assert "`overrides` = none, and not train.steps=8" in caught.value.messages[1]
