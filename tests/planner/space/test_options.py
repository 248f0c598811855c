import numpy as np
import pytest
from hypothesis import given, strategies as st

from factories import sharded_graph, tiny_graph, tiny_machine
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.planner.space.options import batch_faults, divisors, vary
from windlass.planner.space.pins import broken_pins
from windlass.planner.space.plan_space import PlanSpace
from windlass.planner.space.tensor_degrees import open_tensor_degrees
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
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


def open_plans(asked: ResolvedRequest, graph: Graph = GRAPH, on: Machine = MACHINE) -> list[Plan]:
    """All plans of one stage, with nothing recomputed."""
    space = PlanSpace(asked, graph, on)
    return [
        space.plan(columns, row)
        for option in space.options(1)
        for columns, _ in space.columns(option, np.arange(space.table.count))
        for row in range(columns.count)
    ]


def test_an_open_request_has_every_micro_batch_precision_and_mode():
    plans = open_plans(request())
    assert len(set(plans)) == len(plans) == 4 * 2 * 2
    assert {plan.batch.micro for plan in plans} == {1, 2, 3, 6}
    assert all(plan.global_batch == 6 and plan.batch.sequence == 16 for plan in plans)


def test_every_plan_would_pass_validation():
    for plan in open_plans(request()):
        assert Plan.model_validate(plan.model_dump()) == plan


@pytest.mark.parametrize(
    ("pin", "number"),
    [
        ("batch.micro=2", 4),
        ("batch.accumulation=2", 4),
        ("recompute=full", 16),
        ("precision=float32", 8),
        ("compile=true", 8),
        ("parallel.schedule=gpipe", 16),
        ("parallel.pipeline=1", 16),
    ],
)
def test_a_pin_is_kept(pin: str, number: int):
    plans = open_plans(request(pin))
    assert len(plans) == number
    assert not [broken for plan in plans for broken in broken_pins(request(pin), plan)]


def test_bfloat16_is_left_out_where_the_machine_states_no_rate_for_it():
    plans = open_plans(request(), on=tiny_machine(precisions=("float32",)))
    assert {plan.precision for plan in plans} == {"float32"}


def test_all_impossible_pins_are_reported_at_once():
    asked = request(
        "parallel.tensor=2", "sharding.parameters=2", "parallel.schedule=interleaved",
        "batch.micro=4", "train.sequence=65", "precision=bfloat16",
    )  # fmt: skip
    with pytest.raises(InputErrors) as caught:
        choose_plan(asked, GRAPH, tiny_machine(precisions=("float32",)))
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


def test_micro_batches_are_refused_by_what_a_replica_takes():
    faults = {
        (("batch.micro=4",), 1): "`batch.micro` = 4 cannot make `train.batch` = 6:",
        (("batch.accumulation=4",), 2): "`train.batch` = 6 over `parallel.data` = 2: ",
        (("batch.micro=2", "batch.accumulation=2"), 1): "must be 6, so",
        (("batch.micro=2", "batch.accumulation=3"), 1): None,
        (("batch.micro=3",), 2): None,
        (("batch.accumulation=2",), 3): None,
    }
    for (pins, replicas), fault in faults.items():
        found = list(batch_faults(request(*pins), replicas))
        assert fault in found[0] if fault else not found


def test_varying_the_micro_batch_keeps_the_global_batch():
    plan = open_plans(request())[0]
    assert vary(plan, micro=3).global_batch == plan.global_batch


SLICED = sharded_graph(tiny_graph(layers=2, tied=False), degrees=(2, 4, 8))
EIGHT = tiny_machine(devices=8)


def test_tensor_parallelism_is_open_on_several_devices_if_the_graph_can_be_sharded():
    assert PlanSpace(request(), SLICED, EIGHT).tensor_degrees == (1, 2, 4, 8)
    assert PlanSpace(request(), SLICED, MACHINE).tensor_degrees == (1,)
    assert PlanSpace(request(), GRAPH, EIGHT).tensor_degrees == (1,)
    odd = request("train.sequence=18")
    assert PlanSpace(odd, SLICED, EIGHT).tensor_degrees == (1, 2)
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


def test_a_tensor_degree_is_kept():
    assert PlanSpace(request("parallel.tensor=4"), SLICED, EIGHT).tensor_degrees == (4,)
    assert open_tensor_degrees(request("parallel.tensor=3"), EIGHT) == (3,)
