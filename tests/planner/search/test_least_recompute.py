"""As little recompute on each stage as fits, by programs, against every other amount."""

from itertools import product

import numpy as np
from hypothesis import given, settings, strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.cost import ArrayClock, PlanColumns
from windlass.cost.predict import predict_plan
from windlass.planner.search.evaluate import stage_peak_bytes
from windlass.planner.search.least_recompute import LeastRecompute, with_least_recompute
from windlass.program.activation_checkpointing import recomputable_layers, with_recompute
from windlass.program.lowering.lower import lower
from windlass.program.memory.liveness import memory_profile
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

MACHINE = tiny_machine(devices=8, runtime=1000)
SCHEDULES = st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)])


def peaks(plan: Plan, graph: Graph) -> list[int]:
    """Peak bytes of each stage, by its full program."""
    return [
        memory_profile(program, plan, graph, runtime_bytes=1000).peak_bytes
        for program in lower(plan, graph)
    ]


def least(plan: Plan, graph: Graph, budget_bytes: int, *, selective: bool) -> LeastRecompute:
    """The plan, which recomputes nothing, with the least recompute by its programs."""
    chunks = len(plan.stages)

    def holds(columns: PlanColumns) -> np.ndarray:
        assert columns.count == 1
        counts = columns.full[0].tolist(), columns.selective[0].tolist()
        assert len(counts[0]) == chunks
        return np.array([stage_peak_bytes(with_recompute(plan, *counts), graph, MACHINE)], float)

    clock = ArrayClock(plan, graph, MACHINE)
    ways = np.array([[True], [selective]])
    return with_least_recompute(PlanColumns.of((plan,)), holds, clock, budget_bytes, ways)


@settings(max_examples=25)
@given(
    layers=st.integers(4, 6), pipeline=st.integers(1, 3), rounds=st.integers(1, 3),
    schedule=SCHEDULES, share=st.floats(0, 1),
)  # fmt: skip
def test_no_plan_that_fits_recomputes_fewer_layers_or_is_faster(
    layers: int, pipeline: int, rounds: int, schedule: tuple[str, int], share: float
):
    graph = tiny_graph(layers=layers, tied=False)
    name, chunks = schedule if pipeline > 1 else ("1f1b", 1)
    plan = tiny_plan(
        graph, MACHINE, pipeline=pipeline, accumulation=rounds * pipeline, schedule=name,
        virtual_stages=chunks,
    )  # fmt: skip
    whole = with_recompute(plan, [layers] * len(plan.stages))
    low, high = max(peaks(whole, graph)), max(peaks(plan, graph))
    budget = int(low + share * max(0, high - low))
    selective = name != "zero-bubble"
    found = least(plan, graph, budget, selective=selective)
    assert found.fits.all()
    counts = found.columns.full[0].tolist(), found.columns.selective[0].tolist()
    fewest = with_recompute(plan, *counts)
    assert max(peaks(fewest, graph)) <= budget
    seconds = predict_plan(fewest, graph, MACHINE).step_seconds
    most = [
        max(len(recomputable_layers(plan, chunk)) for chunk in plan.stages[stage::pipeline])
        for stage in range(pipeline)
    ]
    for full in product(*(range(count + 1) for count in most)):
        other = with_recompute(plan, full * chunks)
        if max(peaks(other, graph)) <= budget:
            assert predict_plan(other, graph, MACHINE).step_seconds >= seconds * (1 - 1e-9)


def test_stages_with_more_live_micro_batches_recompute_more_layers():
    graph = tiny_graph(layers=18, tied=False, vocabulary=8)
    parts = (((0, 7),), ((7, 13),), ((13, 20),))
    plan = tiny_plan(graph, MACHINE, pipeline=3, accumulation=12, stages=parts)
    budget = peaks(with_recompute(plan, [5, 6, 6]), graph)[0]
    full = least(plan, graph, budget, selective=False).columns.full[0].tolist()
    assert full[0] == 5 > full[1] > full[2] == 0


def test_the_peaks_of_many_micro_batches_are_those_of_few():
    graph = tiny_graph(layers=6, tied=False, vocabulary=5000, sparse=True)
    for name, chunks in (("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)):
        plan = tiny_plan(
            graph, MACHINE, pipeline=2, accumulation=24, schedule=name, virtual_stages=chunks,
            recompute="full", recompute_layers=1,
        )  # fmt: skip
        assert list(stage_peak_bytes(plan, graph, MACHINE)) == peaks(plan, graph)


def test_a_plan_that_fits_as_it_is_recomputes_nothing():
    graph = tiny_graph(layers=4, tied=False)
    plan = tiny_plan(graph, MACHINE, pipeline=2, accumulation=4)
    found = least(plan, graph, max(peaks(plan, graph)), selective=True)
    assert found.fits.all()
    assert not found.columns.full.any()
    assert not found.columns.selective.any()
