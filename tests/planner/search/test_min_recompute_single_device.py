from itertools import product

from hypothesis import given, settings, strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from windlass.cost.predict import predict_plan
from windlass.planner.search.extrapolate import stage_peak_bytes
from windlass.planner.search.min_recompute import RecomputeSteps, min_recompute_plans
from windlass.program.activation_checkpointing import with_recompute
from windlass.program.lowering.lower import lower
from windlass.program.memory.liveness import memory_profile
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

MACHINE = tiny_machine(devices=8, runtime=1000)


def peaks(plan: Plan, graph: Graph) -> list[int]:
    """Peak bytes of each stage, by its full program."""
    return [
        memory_profile(program, plan, graph, runtime_bytes=1000).peak_bytes
        for program in lower(plan, graph)
    ]


orders = st.sampled_from([("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)])


@settings(max_examples=40)
@given(
    layers=st.integers(4, 6), pipeline=st.integers(1, 3), rounds=st.integers(1, 3), order=orders,
    share=st.floats(0, 1),
)  # fmt: skip
def test_no_plan_that_fits_recomputes_fewer_layers_or_is_faster(
    layers: int, pipeline: int, rounds: int, order: tuple[str, int], share: float
):
    graph = tiny_graph(layers=layers, tied=False)
    name, chunks = order if pipeline > 1 else ("1f1b", 1)
    plan = tiny_plan(
        graph, MACHINE, pipeline=pipeline, accumulation=rounds * pipeline, schedule=name,
        virtual_stages=chunks, recompute="full",
    )  # fmt: skip
    keeping = tiny_plan(
        graph, MACHINE, pipeline=pipeline, accumulation=rounds * pipeline, schedule=name,
        virtual_stages=chunks,
    )  # fmt: skip
    low, high = max(peaks(plan, graph)), max(peaks(keeping, graph))
    budget = int(low + share * max(0, high - low))
    plans = min_recompute_plans(plan, graph, MACHINE, budget)
    assert all(max(peaks(each, graph)) <= budget for each in plans)
    seconds = min(predict_plan(each, graph, MACHINE).step_seconds for each in plans)
    for selects in (False, True)[: 1 if name == "zero-bubble" else 2]:
        steps = RecomputeSteps(plan, selects=(selects,) * pipeline)
        for counts in product(*(range(last + 1) for last in steps.last)):
            other = steps.plan(counts)
            if max(peaks(other, graph)) <= budget:
                assert predict_plan(other, graph, MACHINE).step_seconds >= seconds * (1 - 1e-9)


def test_stages_with_more_live_micro_batches_recompute_more_layers():
    graph = tiny_graph(layers=18, tied=False, vocabulary=8)
    parts = (((0, 7),), ((7, 13),), ((13, 20),))
    plan = tiny_plan(
        graph, MACHINE, pipeline=3, accumulation=12, recompute="full", stages=parts
    )  # fmt: skip
    budget = peaks(with_recompute(plan, [5, 6, 6]), graph)[0]
    whole, _ = min_recompute_plans(plan, graph, MACHINE, budget)
    plans = [stage.recompute_layers or 0 for stage in whole.stages]
    assert plans[0] == 5 > plans[1] > plans[2] == 0


def test_the_peaks_of_many_micro_batches_are_those_of_few():
    graph = tiny_graph(layers=6, tied=False, vocabulary=5000, sparse=True)
    for order, chunks in (("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)):
        plan = tiny_plan(
            graph, MACHINE, pipeline=2, accumulation=24, schedule=order, virtual_stages=chunks,
            recompute="full", recompute_layers=1,
        )  # fmt: skip
        assert list(stage_peak_bytes(plan, graph, MACHINE)) == peaks(plan, graph)
