"""The array clock against the event simulator, on random plans."""

import random
from dataclasses import replace

import numpy as np
import pytest

from cost.clock.plan_draws import (
    EXPERTS,
    FROZEN_GRAPHS,
    GRAPHS,
    MACHINES,
    OVERLAPPING,
    draw,
    draw_on_stack,
    draw_with_experts,
)
from cost.equal_blocks import equal_blocks
from factories import sharded_graph, tiny_graph, tiny_plan
from windlass.cost.clock.array_clock import ArrayClock
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.predict import StepTotals, clock_totals, simulated_totals
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.optimizers import OtherOptimizer
from windlass.schema.plan import DEVICE_TIER, PipelineSchedule, Plan

ROUNDING = 1e-11
"""Relative error of sums in another order."""
NEARLY = 1e-6
"""Largest share of a product that everything else takes in `equal_blocks`."""
STEADY = 0.005
"""Asked where a step of many micro-batches is walked for fewer and prolonged."""


ON_CORES = 0.01
"""Share of a step by which a term may differ where updates take the cores of what comes after."""
TERMS = 1e-6
"""Share of a step by which a term may differ: of sums whose waits are differences."""
RECEIVES = ("receive", "recv_tied_weights", "accumulate_tied_grads")
"""Kinds that wait for a message, which the clock does not tell apart."""


def simulated(plan: Plan, graph: Graph, machine: Machine) -> float:
    costs = InstructionCosts(plan, graph, machine)
    totals = simulated_totals(plan, graph, machine, costs, lower(plan, graph))
    pace = machine.straggler_factor(plan.parallel.devices)
    return pace * sum(totals.by_kind.values()) + machine.fixed_seconds


def errors(
    seed: int,
    count: int,
    *,
    accumulation: int = 0,
    optimizer: OtherOptimizer | None = None,
    graphs: tuple[Graph, ...] = GRAPHS,
) -> list[float]:
    """Errors of so many random plans; few micro-batches have none, but for rounding."""
    chance, found = random.Random(seed), []
    for _ in range(count):
        graph, machine = chance.choice(graphs), chance.choice(MACHINES)
        plan = draw(chance, graph, machine, accumulation=accumulation)
        if optimizer is not None:
            tier = plan.offload.optimizer if optimizer == "lion" else DEVICE_TIER
            offload = plan.offload.model_copy(update={"optimizer": tier})
            changes = {"optimizer": optimizer, "moments": "float32", "offload": offload}
            plan = plan.model_copy(update=changes)
        columns, clock = PlanColumns.of([plan]), ArrayClock(plan, graph, machine)
        seconds = simulated(plan, graph, machine)
        found.append(abs(float(clock.step_seconds(columns)[0]) / seconds - 1))
        assert found[-1] < (STEADY if columns.shape.repeats else ROUNDING), plan
        assert clock.least_seconds(columns)[0] <= seconds * (1 + ROUNDING), plan
    return found


def test_a_step_of_few_micro_batches_takes_what_the_event_simulator_says():
    assert max(errors(seed=1, count=30)) < ROUNDING


@pytest.mark.parametrize("optimizer", ["lion", "lamb", "muon", "adafactor"])
def test_so_does_a_step_of_another_optimizer(optimizer: OtherOptimizer):
    assert max(errors(seed=3, count=8, optimizer=optimizer)) < ROUNDING


def test_so_does_a_step_whose_replicas_divide_experts():
    chance = random.Random(5)
    for _ in range(25):
        graph, machine = chance.choice(EXPERTS), chance.choice(MACHINES)
        plan = draw_with_experts(chance, graph, machine)
        seconds = ArrayClock(plan, graph, machine).step_seconds(PlanColumns.of([plan]))
        assert float(seconds[0]) == pytest.approx(simulated(plan, graph, machine), rel=ROUNDING)


def test_so_does_a_step_of_a_model_whose_first_layers_are_frozen():
    assert max(errors(seed=4, count=20, graphs=FROZEN_GRAPHS)) < ROUNDING


def test_a_step_of_many_micro_batches_is_prolonged_from_a_shorter_one():
    found = errors(seed=2, count=8, accumulation=100)
    assert sum(found) / len(found) < STEADY / 10


def test_so_does_a_step_under_another_stack():
    chance = random.Random(5)
    for _ in range(20):
        graph = chance.choice(GRAPHS)
        plan, machine = draw_on_stack(chance, graph, chance.choice(MACHINES))
        seconds = ArrayClock(plan, graph, machine).step_seconds(PlanColumns.of([plan]))[0]
        assert seconds == pytest.approx(simulated(plan, graph, machine), rel=ROUNDING), plan


def test_the_clock_breaks_a_step_down_as_the_event_simulator_does():
    chance = random.Random(6)
    for index in range(30):
        graph, machine = chance.choice(GRAPHS), chance.choice(MACHINES)
        plan = draw(chance, graph, machine)
        if index % 3 == 0:
            plan, machine = draw_on_stack(chance, graph, machine)
        costs = InstructionCosts(plan, graph, machine)
        clock = clock_totals(plan, ArrayClock(plan, graph, machine), costs)
        whole = simulated_totals(plan, graph, machine, costs, lower(plan, graph))
        step, on_cores = sum(whole.by_kind.values()), machine.device.kind == "cpu"
        near = ON_CORES if plan.offloads and on_cores else TERMS
        for few, all_ in ((clock.by_term, whole.by_term), (kinds(clock), kinds(whole))):
            for key in few | all_:
                assert few.get(key, 0.0) == pytest.approx(all_.get(key, 0.0), abs=near * step), key
        if clock.offload is not None and whole.offload is not None:
            assert clock.offload.read_bytes == whole.offload.read_bytes
            assert clock.offload.seconds == pytest.approx(whole.offload.seconds, rel=ROUNDING)


def kinds(totals: StepTotals) -> dict[str, float]:
    """Seconds by kind, those that wait for a message together."""
    receiving = sum(totals.by_kind.get(kind, 0.0) for kind in RECEIVES)
    others = {kind: each for kind, each in totals.by_kind.items() if kind not in RECEIVES}
    return others | {"receive": receiving}


@pytest.mark.slow
def test_so_are_those_of_a_thousand_plans():
    few, many = errors(seed=3, count=600), errors(seed=4, count=400, accumulation=100)
    print(f"worst of few micro-batches {max(few):.1e}, of many {max(many):.1e}")


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble", "interleaved"])
def test_plans_of_a_batch_take_as_long_as_alone(schedule: PipelineSchedule):
    chance = random.Random(schedule)
    graph = sharded_graph(tiny_graph(layers=10, width=256, vocabulary=500))
    machine = chance.choice(OVERLAPPING)
    plans = [
        tiny_plan(
            graph,
            machine,
            pipeline=3,
            schedule=schedule,
            virtual_stages=2 if schedule == "interleaved" else 1,
            accumulation=chance.choice([60, 90]),
            micro=chance.choice([1, 2]),
            tensor=chance.choice([1, 2, 4]),
            data=4,
            sharding=chance.choice([(1, 1), (1, 2), (2, 2), (4, 4)]),
            precision=chance.choice(["float32", "bfloat16"]),
            recompute=chance.choice(["none", "full"]),
            recompute_layers=chance.choice([1, 2]),
        )
        for _ in range(12)
    ]
    clock = ArrayClock(plans[0], graph, machine)
    together = clock.step_seconds(PlanColumns.of(plans))
    alone = [float(clock.step_seconds(PlanColumns.of([plan]))[0]) for plan in plans]
    assert together.tolist() == pytest.approx(alone, rel=ROUNDING)
    least = clock.least_bytes(PlanColumns.of(plans))
    each = [clock.least_bytes(PlanColumns.of([plan]))[0] for plan in plans]
    assert least == pytest.approx(np.array(each), rel=ROUNDING)


def test_a_plan_priced_on_several_machines_at_once_takes_what_it_takes_on_each():
    chance = random.Random(8)
    for _ in range(6):
        graph, machine = chance.choice(GRAPHS), chance.choice(MACHINES)
        plan = draw(chance, graph, machine)
        links = tuple(each.model_copy(update={"rate": each.rate / 3}) for each in machine.links)
        machines = (machine, machine.model_copy(update={"links": links, "stragglers": 0.3}))
        together = ArrayClock(plan, graph, machine).seconds_by_machine(plan, machines)
        columns = PlanColumns.of([plan])
        alone = [ArrayClock(plan, graph, each).step_seconds(columns)[0] for each in machines]
        assert together.tolist() == pytest.approx(alone, rel=ROUNDING)


def test_stage_seconds_are_those_of_the_products_of_a_stage():
    """Blocks of one product forward and two backward; only inner layers are recomputed."""
    graph, machine = equal_blocks(4)
    plan = tiny_plan(graph, machine, pipeline=2, recompute="full")
    product = 2 * (2 * 16) * 32 * 32 / 1e9
    clock = ArrayClock(plan, graph, machine)
    forward, passes, _ = (each[0] / product for each in clock.stage_seconds(PlanColumns.of([plan])))
    assert forward.tolist() == pytest.approx([2, 2], rel=NEARLY)
    assert passes.tolist() == pytest.approx([7, 7], rel=NEARLY)


def test_a_bound_of_more_recompute_is_never_lower():
    chance = random.Random(7)
    for _ in range(10):
        graph, machine = chance.choice(GRAPHS), chance.choice(MACHINES)
        plan = draw(chance, graph, machine)
        columns, clock = PlanColumns.of([plan]), ArrayClock(plan, graph, machine)
        more = replace(columns, full=columns.full + 1)
        assert clock.least_seconds(more)[0] >= clock.least_seconds(columns)[0] * (1 - ROUNDING)
        assert (clock.least_bytes(more) <= clock.least_bytes(columns)).all()
