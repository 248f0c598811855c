"""Plans of one device, against all plans: in memory, with offloaded state or in phases."""

import random
from functools import cache

import pytest

from factories import tiny_graph, tiny_machine
from planner.single_stage import single_stage_plans
from windlass.cost import ArrayClock
from windlass.cost.predict import predict_plan
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.planner.result import run_seconds
from windlass.planner.search.evaluate import evaluate
from windlass.planner.search.phase_bounds import (
    PhasePrices,
    min_step_seconds,
)
from windlass.planner.search.truncated_plan import TruncatedPlan
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_space import (
    base_plans,
    fullest_offloaded_bytes,
    phase_partitions,
    with_state_on,
)
from windlass.planner.space.phase_table import PhaseTable
from windlass.planner.space.plan_space import PlanSpace
from windlass.program.activation_checkpointing import with_recompute
from windlass.program.lowering.lower import lower
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Offload, Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import ResolvedRequest

GRAPHS = tuple(tiny_graph(layers=layers, width=2048, vocabulary=90) for layers in (3, 6))
"""Graphs whose state is larger than its staging buffers."""
STEPS = 10
SEEDS = [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 1))]
"""Of drawn cases, each of which is searched exhaustively; the last has the most plans."""


def machine(rate: float, kind: str, *, host: str = "2 GiB") -> Machine:
    """A machine whose host moves this many bytes a second."""
    found = tiny_machine(memory="4 GiB", host=host, runtime=1000, compiler=20_000)
    budget, beyond = found.device.tiers
    beyond = beyond.model_copy(update={"read": rate, "write": rate / 2})
    device = found.device.model_copy(update={"kind": kind, "tiers": (budget, beyond)})
    return found.model_copy(update={"device": device})


def request(*overrides: str, batch: int = 8) -> ResolvedRequest:
    sizes = (f"train.batch={batch}", "train.sequence=64", f"train.steps={STEPS}")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


def counted(plan: Plan, graph: Graph) -> list[Plan]:
    """The plan, and those in which less is recomputed, in both ways."""
    most = graph.layers - 2
    if plan.recompute == "none":
        return [plan]
    found = [with_recompute(plan, [count]) for count in range(1, most + 1)]
    if not plan.compile:
        found += [with_recompute(plan, [0], [count]) for count in range(1, most + 1)]
        found += [with_recompute(plan, [count], [most]) for count in range(1, most)]
    return found


def every(asked: ResolvedRequest, graph: Graph, on: Machine) -> list[tuple[Plan, Prediction]]:
    """All plans that the tiers have room for, with full programs simulated."""
    budget = [
        each for plan in single_stage_plans(asked, graph, on) for each in counted(plan, graph)
    ]
    found = list(budget)
    space = PlanSpace(asked, graph, on)
    in_phases = [turn for base in base_plans(space) for turn in phase_partitions(base, space)]
    for tier in offload_tiers(on):
        beyond = (
            *(each.model_copy(update={"offload": Offload(optimizer=tier.name)}) for each in budget),
            *(
                with_state_on(turn, tier.name, activations=out)
                for turn in in_phases
                for out in (False, True)
            ),
        )
        found += [
            plan for plan in beyond if fullest_offloaded_bytes(plan, graph) <= tier.capacity_bytes
        ]
    return [(plan, predict_plan(plan, graph, on)) for plan in found]


@cache
def case(seed: int) -> tuple[ResolvedRequest, Graph, Machine, list[tuple[Plan, Prediction]]]:
    chance = random.Random(seed)
    pins = chance.sample(["train.clip=inf", "precision=float32", "compile=true"], k=1)
    asked = request(*pins, batch=chance.choice([4, 8, 12]))
    on = machine(chance.choice([1e8, 1e9, 1e10, 1e11]), chance.choice(["cpu", "cuda"]))
    graph = chance.choice(GRAPHS)
    return asked, graph, on, every(asked, graph, on)


def chosen_kinds(seed: int, shares: tuple[float, ...] = (0.02, 0.1, 0.3, 0.9)) -> set[str]:
    """Compares the choice with all plans for some budgets; returns the kinds of plan chosen.

    Each budget holds this share of the plans, the smallest.
    """
    asked, graph, on, predictions = case(seed)
    peaks = sorted(prediction.peaks[0].peak_bytes for _, prediction in predictions)
    kinds = set()
    for share in shares:
        budget = peaks[int(len(peaks) * share)]
        fitting = [each for _, each in predictions if each.peaks[0].peak_bytes <= budget]
        choice = choose_plan(asked.model_copy(update={"memory": budget}), graph, on)
        assert choice.plan is not None
        best = min(run_seconds(each, STEPS) for each in fitting)
        assert choice.run_seconds == pytest.approx(best, rel=1e-9)
        held = on.device.process_bytes(compiled=choice.plan.compile)
        verify_programs(lower(choice.plan, graph), choice.plan, graph, {"device": budget - held})
        offloaded = "state away" if choice.plan.offloads else "near"
        kinds.add("phases" if choice.plan.is_offloaded("parameters") else offloaded)
    return kinds


@pytest.mark.parametrize("seed", SEEDS)
def test_the_choice_is_the_fastest_of_all_simulated_plans(seed: int):
    chosen_kinds(seed, ((0.02, 0.3), (0.1, 0.9))[seed // 2 % 2])


@pytest.mark.slow
def test_in_forty_cases_each_kind_of_plan_is_the_fastest_somewhere():
    kinds = [chosen_kinds(seed) for seed in range(3, 43)]
    assert set().union(*kinds) == {"near", "state away", "phases"}


def test_phases_are_chosen_if_every_plan_without_them_is_slower():
    on = machine(1e12, "cuda")
    asked = request("memory=272MiB", "precision=float32", "compile=false", batch=16)
    whole, best = (
        choose_plan(asked.model_copy(update={"phases": phases}), GRAPHS[1], on)
        for phases in (1, None)
    )
    assert whole.run_seconds is not None
    assert best.plan is not None
    assert best.run_seconds is not None
    assert best.plan.is_offloaded("parameters")
    assert best.run_seconds < whole.run_seconds


@pytest.mark.parametrize("seed", SEEDS[:2])
def test_no_plan_in_phases_is_faster_or_smaller_than_its_bounds(seed: int):
    _, graph, on, predictions = case(seed)
    in_phases = [each for each in predictions if each[0].is_offloaded("parameters")]
    assert in_phases
    for plan, prediction in in_phases:
        prices = PhasePrices(ArrayClock(plan, graph, on))
        short = TruncatedPlan(plan, prices)
        seconds = prediction.step_seconds * (1 + 1e-9)
        table = PhaseTable.of(plan, [plan.stages], graph)
        least_seconds = min_step_seconds(plan, table, prices)
        assert (least_seconds <= seconds).all()
        assert short.step_seconds <= seconds
        assert short.peak_bytes == prediction.peaks[0].peak_bytes


def test_a_plan_with_offloaded_state_is_no_faster_than_its_twin_without_updates():
    for seed in (2,):
        _, graph, on, predictions = case(seed)
        for plan, prediction in predictions:
            if plan.offloads and not plan.is_offloaded("parameters"):
                twin = plan.model_copy(update={"offload": Offload()})
                budget = predict_plan(twin, graph, on)
                passes = budget.step_seconds - budget.by_kind.get("update", 0.0)
                assert passes <= prediction.step_seconds * (1 + 1e-9)


def test_a_short_program_predicts_a_plan_with_offloaded_state():
    for rate in (1e7, 1e9, 1e11):
        for kind in ("cpu", "cuda"):
            on = machine(rate, kind)
            asked = request(
                "offload.optimizer=host", "precision=float32", "compile=false", batch=12
            )
            for plan in single_stage_plans(asked, GRAPHS[0], on):
                whole = predict_plan(plan, GRAPHS[0], on, lower(plan, GRAPHS[0]))
                clock = ArrayClock(plan, GRAPHS[0], on)
                short = evaluate(plan, clock, budget_bytes=whole.peaks[0].capacity_bytes)
                assert short.step_seconds == pytest.approx(whole.step_seconds, rel=1e-9)
                assert short.by_kind == pytest.approx(whole.by_kind)
                assert short.peaks == whole.peaks


def test_state_is_offloaded_only_to_a_tier_that_holds_it():
    on = machine(1e10, "cuda", host="100 MiB")
    with pytest.raises(
        InputErrors, match=r"`offload.optimizer` = host needs .* but it has 100 MiB"
    ):
        choose_plan(request("offload.optimizer=host"), GRAPHS[1], on)
    small = choose_plan(request("memory=200MiB"), GRAPHS[1], on)
    assert small.plan is None or not small.plan.offloads


def test_a_pin_on_recompute_is_kept_if_all_layers_fit():
    asked, graph, on, predictions = case(0)
    budget = min(
        each.peaks[0].peak_bytes
        for plan, each in predictions
        if plan.recompute == "full" and plan.stages[0].recompute_layers is None
    )
    pinned = asked.model_copy(update={"memory": budget, "recompute": "full"})
    plan = choose_plan(pinned, graph, on).plan
    assert plan is not None
    assert plan.recompute == "full"
    assert not plan.is_offloaded("parameters")
