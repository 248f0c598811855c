"""A downscaled plan keeps its structure; only numbers that do not affect communication shrink."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from windlass.models import catalog as catalogue
from windlass.planner.downscale import STAGE_LAYERS, divided_parallelism, downscale_plan
from windlass.schema.plan import Batch, Offload, Parallelism, Plan, ShardingDegrees, Stage
from windlass.schema.tensor_grid import TensorGrid, grid_columns, grid_rows, tensor_degree

DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32])


@given(st.builds(Parallelism, pipeline=DEGREES, tensor=DEGREES, data=DEGREES))
def test_divided_parallelism_takes_few_devices_and_keeps_every_kind(cut: Parallelism) -> None:
    small = divided_parallelism(cut, 8)
    assert small.devices <= 8
    for name in ("pipeline", "tensor", "data"):
        before, after = getattr(cut, name), getattr(small, name)
        assert after <= before
        assert (after > 1) == (before > 1)


GRIDS = st.builds(tensor_degree, DEGREES, DEGREES)


@given(st.builds(Parallelism, tensor=GRIDS, data=DEGREES))
def test_a_divided_grid_stays_a_grid(cut: Parallelism) -> None:
    small = divided_parallelism(cut, 8)
    assert small.devices <= 8
    for side in (grid_rows, grid_columns):
        assert side(small.tensor) <= side(cut.tensor)
        assert (side(small.tensor) > 1) == (side(cut.tensor) > 1)


def test_small_parallelism_stays() -> None:
    assert divided_parallelism(Parallelism(pipeline=2, tensor=4), 8) == Parallelism(
        pipeline=2, tensor=4
    )


def large(order: str = "1f1b", interleave: int = 1, layers: int = 98) -> Plan:
    """A plan of 256 devices, in phases, for 98 layers."""
    count = 8 * interleave
    ends = [round(layers * at / count) for at in range(count + 1)]
    far = order == "1f1b"
    return Plan(
        graph="gpt3-175b@3f9c1e0a7b52",
        machine="ipu-pod256@a81d90c2f6e4",
        precision="bfloat16",
        parallel=Parallelism(
            pipeline=8, tensor=8, data=4, schedule=order, virtual_stages=interleave
        ),
        sharding=ShardingDegrees(parameters=4, optimizer=4),
        offload=Offload(parameters="far", gradients="far", optimizer="far") if far else Offload(),
        batch=Batch(sequence=2048, micro=4, accumulation=64),
        stages=tuple(
            Stage(
                phases=tuple(pairwise([a, a + 3, a + 6, a + 9, b])) if far else ((a, b),),
                recompute="full",
            )
            for a, b in pairwise(ends)
        ),
    )


def small_of(plan: Plan) -> Plan:
    return downscale_plan(
        plan, catalogue.model_config("gpt3-175b"), devices=8, tiers=("disk",)
    ).plan


def test_a_plan_of_256_devices_keeps_its_structure_on_8() -> None:
    plan = large()
    small = small_of(plan)
    assert small.parallel == Parallelism(pipeline=2, tensor=2, data=2)
    assert small.sharding == ShardingDegrees(parameters=2, optimizer=2)
    assert small.parallel.schedule == plan.parallel.schedule
    assert [len(stage.phases) for stage in small.stages] == [4, 4]
    assert {stage.recompute for stage in small.stages} == {"full"}
    assert set(small.offload_tiers.values()) == {"disk"}
    assert small.offload_tiers.keys() == plan.offload_tiers.keys()
    assert small.batch.accumulation >= 2 * small.parallel.pipeline
    assert all(stage.end_layer - stage.first_layer <= STAGE_LAYERS for stage in small.stages)


@pytest.mark.parametrize(("name", "heads"), [("gpt3-175b", 6), ("gpt-neox-20b", 8)])
def test_heads_that_a_grid_does_not_divide_stay_indivisible(name: str, heads: int) -> None:
    plan = large().model_copy(
        update={
            "parallel": Parallelism(tensor=TensorGrid(8, 8), data=4),
            "stages": large().stages[:1],
        }
    )
    found = downscale_plan(plan, catalogue.model_config(name), devices=8, tiers=("disk",))
    assert found.plan.parallel == Parallelism(tensor=TensorGrid(2, 2), data=2)
    assert found.model.heads == heads


def test_virtual_stages_stay_interleaved() -> None:
    small = small_of(large(order="interleaved", interleave=3))
    assert (small.parallel.schedule, small.parallel.virtual_stages, len(small.stages)) == (
        "interleaved",
        2,
        4,
    )
    assert small.batch.accumulation % small.parallel.pipeline == 0


def test_stages_of_unequal_length_stay_so() -> None:
    ends = (0, 4, 11, 18, 26)
    plan = large("gpipe", layers=26).model_copy(
        update={
            "parallel": Parallelism(pipeline=4, data=2, schedule="gpipe"),
            "offload": Offload(), "sharding": ShardingDegrees(),
            "stages": tuple(Stage(phases=(pair,)) for pair in pairwise(ends)),
        }
    )  # fmt: skip
    found = downscale_plan(plan, catalogue.model_config("gpt2-355m"), devices=8, tiers=())
    assert [stage.end_layer - stage.first_layer for stage in found.plan.stages] == [4, 7, 7, 8]
    assert found.model.layers == 24


def test_all_changes_are_noted() -> None:
    notes = " ".join(
        downscale_plan(
            large(), catalogue.model_config("llama2-7b"), devices=8, tiers=("disk",)
        ).notes
    )
    for said in ("`parallel.pipeline` 8 -> 2", "`parallel.tensor` 8 -> 2", "`parallel.data` 4 -> 2",
                 "`sharding.parameters` 4 -> 2", "`layers` 98 -> 16", "width 4096 -> 32",
                 "far -> disk", "stages 0, 7 stand for all 8"):  # fmt: skip
        assert said in notes


@pytest.mark.parametrize("name", catalogue.text_model_names())
def test_every_model_has_a_small_one_whose_features_divide(name: str) -> None:
    found = downscale_plan(large(), catalogue.model_config(name), devices=64, tiers=("disk",))
    model, slices = found.model, found.plan.parallel.tensor
    assert slices == 4
    for count in (model.heads, model.ffn, model.kv_heads or model.heads):
        assert count is not None
        assert count % slices == 0


def test_a_stage_too_short_for_a_rest_has_none() -> None:
    plan = large(order="gpipe")
    stages = tuple(
        stage.model_copy(update={"recompute_layers": 1, "recompute_rest": "selective"})
        for stage in plan.stages
    )
    first, last = stages[0], stages[-1]
    short = last.model_copy(update={"phases": ((last.end_layer - 2, last.end_layer),)})
    longer = stages[-2].model_copy(
        update={"phases": ((stages[-2].first_layer, last.end_layer - 2),)}
    )
    small = small_of(plan.model_copy(update={"stages": (*stages[:-2], longer, short)}))
    assert [stage.recompute_rest for stage in small.stages] == [first.recompute_rest, None]
