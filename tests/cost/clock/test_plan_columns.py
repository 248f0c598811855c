"""Plans as columns."""

import random

import numpy as np
import pytest

from cost.clock.plan_draws import GRAPHS, MACHINES, draw
from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.cost.clock.plan_columns import PipelineShape, PlanColumns
from windlass.program.activation_checkpointing import recompute_mode

GRAPH, MACHINE = tiny_graph(layers=6), tiny_machine(devices=8)


def test_recompute_modes_are_those_of_the_program():
    chance = random.Random(1)
    for _ in range(100):
        graph = chance.choice(GRAPHS)
        plan = draw(chance, graph, chance.choice(MACHINES))
        full, selective = (each[:, 0] for each in PlanColumns.of([plan]).recompute_modes())
        modes = np.array([recompute_mode(plan, layer) for layer in range(graph.layers)])
        assert (full == (modes == "full")).all()
        assert (selective == (modes == "selective")).all()


def test_plans_of_several_shapes_or_cuts_have_no_common_columns():
    one = tiny_plan(GRAPH, MACHINE, pipeline=2)
    other = tiny_plan(GRAPH, MACHINE, pipeline=2, stages=(((0, 1),), ((1, 8),)))
    with pytest.raises(ValueError, match="2 pipeline shapes"):
        PlanColumns.of([one, tiny_plan(GRAPH, MACHINE, pipeline=4)])
    with pytest.raises(ValueError, match="2 cuts"):
        PlanColumns.of([one, other])


def test_selected_columns_are_those_of_the_selected_plans():
    plans = [tiny_plan(GRAPH, MACHINE, data=data, micro=2 * data) for data in (1, 2, 4)]
    some, alone = PlanColumns.of(plans).select([0, 2]), PlanColumns.of(plans[::2])
    assert some.count == 2
    for name in ("micro", "accumulation", "data", "parameters", "optimizer", "full", "devices"):
        assert (getattr(some, name) == getattr(alone, name)).all()


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3)])
def test_many_micro_batches_share_a_shape_that_repeats(schedule: str, chunks: int):
    shape = PipelineShape.of(schedule, 8, chunks, 1000)  # type: ignore[arg-type]
    assert shape.repeats
    assert shape == PipelineShape.of(schedule, 8, chunks, 800)  # type: ignore[arg-type]
    fewer = PipelineShape.of(schedule, 8, chunks, shape.settled)  # type: ignore[arg-type]
    assert fewer.microbatches == shape.settled
    assert not fewer.repeats
    assert shape.period % 8 == 0
