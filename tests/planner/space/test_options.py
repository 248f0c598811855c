import pytest
from hypothesis import given, strategies as st

from factories import sharded_graph, tiny_graph, tiny_machine
from windlass.errors import InputErrors
from windlass.planner.space.options import (
    divisors,
    open_single_stage_plans,
    vary,
)
from windlass.planner.space.tensor_degrees import open_tensor_degrees
from windlass.schema.plan import Plan
from windlass.schema.request import ResolvedRequest
from windlass.schema.tensor_grid import TensorGrid

GRAPH, MACHINE = tiny_graph(), tiny_machine()


def request(*overrides: str) -> ResolvedRequest:
    sizes = ("train.batch=6", "train.sequence=16", "train.steps=400")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


@given(st.integers(1, 5000))
def test_divisors_are_all_that_divide_in_rising_order(count: int):
    assert divisors(count) == tuple(size for size in range(1, count + 1) if count % size == 0)


def test_an_open_request_has_every_micro_batch_precision_mode_and_recompute():
    plans = open_single_stage_plans(request(), GRAPH, MACHINE)
    assert len(set(plans)) == len(plans) == 4 * 2 * 2 * 2
    assert {plan.batch.micro for plan in plans} == {1, 2, 3, 6}
    assert all(plan.global_batch == 6 and plan.batch.sequence == 16 for plan in plans)


def test_a_pinned_number_of_recomputed_layers_is_kept_up_to_those_there_are():
    for count, told in ((1, 1), (2, None), (9, None)):
        plans = open_single_stage_plans(request(f"recompute_layers={count}"), GRAPH, MACHINE)
        assert len(plans) == 4 * 2 * 2
        assert {plan.stages[0].recompute_layers for plan in plans} == {told}
        assert {plan.recompute for plan in plans} == {"full"}


def test_every_plan_would_pass_validation():
    for plan in open_single_stage_plans(request(), GRAPH, MACHINE):
        assert Plan.model_validate(plan.model_dump()) == plan


@pytest.mark.parametrize(
    ("pin", "number"),
    [
        ("batch.micro=2", 8),
        ("batch.accumulation=2", 8),
        ("recompute=full", 16),
        ("precision=float32", 16),
        ("compile=true", 16),
        ("parallel.schedule=gpipe", 32),
        ("parallel.pipeline=1", 32),
    ],
)
def test_a_pin_is_kept(pin: str, number: int):
    plans = open_single_stage_plans(request(pin), GRAPH, MACHINE)
    assert len(plans) == number
    key, value = pin.split("=")
    for plan in plans:
        values = {
            "batch.micro": plan.batch.micro,
            "batch.accumulation": plan.batch.accumulation,
            "recompute": plan.recompute,
            "precision": plan.precision,
            "compile": str(plan.compile).lower(),
            "parallel.schedule": plan.parallel.schedule,
            "parallel.pipeline": plan.parallel.pipeline,
        }
        assert str(values[key]) == value


def test_bfloat16_is_left_out_where_the_machine_states_no_rate_for_it():
    plans = open_single_stage_plans(request(), GRAPH, tiny_machine(precisions=("float32",)))
    assert {plan.precision for plan in plans} == {"float32"}


def test_all_impossible_pins_are_reported_at_once():
    asked = request(
        "parallel.tensor=2", "sharding.parameters=2", "parallel.schedule=interleaved",
        "batch.micro=4", "train.sequence=65", "precision=bfloat16",
    )  # fmt: skip
    with pytest.raises(InputErrors) as caught:
        open_single_stage_plans(asked, GRAPH, tiny_machine(precisions=("float32",)))
    assert [fault.split(";")[0] for fault in caught.value.messages] == [
        "`parallel.schedule` = interleaved on one device, which has no pipeline",
        "`sharding.parameters` = 2 on one device",
        (
            "`batch.micro` = 4 cannot make `train.batch` = 6: micro-batch x accumulation must be "
            "6, so a micro-batch is one of 1, 2, 3, 6"
        ),
        "`train.sequence` = 65, but `tiny` takes at most 64 tokens",
        "`precision` = bfloat16, but `tiny` states no rate for it",
        "`parallel.tensor` = 2, but `tiny` has 1 device",
    ]


def test_varying_the_micro_batch_keeps_the_global_batch():
    plan = open_single_stage_plans(request(), GRAPH, MACHINE)[0]
    assert vary(plan, micro=3).global_batch == plan.global_batch


SLICED = sharded_graph(tiny_graph(layers=2, tied=False), degrees=(2, 4, 8))
EIGHT = tiny_machine(devices=8)


def test_tensor_parallelism_is_open_on_several_devices_if_the_graph_can_be_sharded():
    assert {plan.parallel.tensor for plan in open_single_stage_plans(request(), SLICED, EIGHT)} == {
        1,
        2,
        4,
        8,
    }
    assert {
        plan.parallel.tensor for plan in open_single_stage_plans(request(), SLICED, MACHINE)
    } == {1}
    assert {plan.parallel.tensor for plan in open_single_stage_plans(request(), GRAPH, EIGHT)} == {
        1
    }
    odd = request("train.sequence=18")
    assert {plan.parallel.tensor for plan in open_single_stage_plans(odd, SLICED, EIGHT)} == {1, 2}
    assert open_tensor_degrees(request(), EIGHT) == (2, 4, 8, TensorGrid(2, 2), TensorGrid(4, 2))
    assert open_tensor_degrees(request(), tiny_machine(devices=6)) == (2, 4, TensorGrid(2, 2))
    assert open_tensor_degrees(request(), MACHINE) == ()


def test_if_a_model_cannot_be_sharded_by_the_quickest_grid_the_next_is_open():
    assert open_tensor_degrees(request(), EIGHT, {8, TensorGrid(4, 2)}) == (
        2,
        4,
        8,
        TensorGrid(2, 2),
        TensorGrid(2, 4),
    )
    assert open_tensor_degrees(request(), EIGHT, {TensorGrid(2, 2)}) == (2, 4, 8, TensorGrid(4, 2))


def test_a_tensor_degree_is_kept_and_refused_if_impossible():
    assert {
        plan.parallel.tensor
        for plan in open_single_stage_plans(request("parallel.tensor=4"), SLICED, EIGHT)
    } == {4}
    assert open_tensor_degrees(request("parallel.tensor=3"), EIGHT) == (3,)
    faults = {
        ("parallel.tensor=4", MACHINE): "`parallel.tensor` = 4, but `tiny` has 1 device",
        (
            "parallel.tensor=3",
            EIGHT,
        ): "`batch.sequence` = 16 is not a multiple of `parallel.tensor` = 3: "
        "between layers each tensor-parallel rank holds an equal part of the tokens",
    }
    for (pin, machine), fault in faults.items():
        with pytest.raises(InputErrors) as caught:
            open_single_stage_plans(request(pin), SLICED, machine)
        assert caught.value.messages[0].split(";")[0] == fault
