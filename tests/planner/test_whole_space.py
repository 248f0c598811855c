"""The open choice against pins and against all legal plans of small requests."""

import random
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from factories import sharded_graph, tiny_graph, tiny_machine
from windlass.cost.predict import predict_plan
from windlass.errors import WindlassError
from windlass.planner.choose import choose_plan, seek_plan
from windlass.planner.result import PlanningResult, run_seconds
from windlass.planner.search.fastest import Findings
from windlass.planner.space.options import divisors, is_captured, vary
from windlass.planner.space.phase_space import phase_partitions, with_state_on
from windlass.planner.space.plan_space import PlanSpace
from windlass.program.activation_checkpointing import recomputable_layers, with_recompute
from windlass.program.validate_plan import plan_errors
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import (
    Batch,
    Offload,
    Parallelism,
    Plan,
    ShardingDegrees,
    Stage,
)
from windlass.schema.request import ResolvedRequest

GRAPHS = tuple(
    sharded_graph(tiny_graph(layers=layers, width=width, vocabulary=90, tied=tied), (2,))
    for layers, width, tied in ((3, 256, False), (3, 64, True), (4, 512, True))
)
STEPS = 10
PINS = (
    "parallel.context=2", "parallel.context=1", "parallel.pipeline=1", "parallel.pipeline=2",
    "parallel.data=2", "parallel.tensor=2", "parallel.tensor=1", "parallel.schedule=gpipe",
    "parallel.schedule=zero-bubble", "recompute=full", "recompute=selective", "recompute=none",
    "sharding.parameters=2", "sharding.optimizer=2", "batch.micro=1", "batch.micro=2", "phases=2",
    "phases=1", "offload.optimizer=host", "offload.optimizer=device",
)  # fmt: skip


def machine(chance: random.Random) -> Machine:
    found = tiny_machine(devices=4, host="2 GiB", runtime=1000, compiler=20_000)
    link = found.links[0].model_copy(update={"rate": chance.choice([1e8, 1e9, 1e10])})
    rule = chance.choice(["bulk-synchronous", found.execution_model])
    return found.model_copy(update={"links": (link,), "execution_model": rule})


def request(*overrides: str, batch: int = 4) -> ResolvedRequest:
    sizes = (f"train.batch={batch}", "train.sequence=32", f"train.steps={STEPS}")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


def seconds_of(asked: tuple[str, ...], graph: Graph, on: Machine) -> float | None:
    """Seconds of the chosen run; None if no plan keeps the pins, or none fits."""
    try:
        return choose_plan(request(*asked), graph, on).run_seconds
    except WindlassError:
        return None


def no_pin_is_faster(seed: int, count: int, *named: str) -> None:
    chance = random.Random(seed)
    graph, on = chance.choice(GRAPHS), machine(chance)
    memory = f"memory={chance.choice([4, 8, 20, 200])}MB"
    asked = ("precision=float32", "compile=false", memory, *named)
    best = seconds_of(asked, graph, on)
    for _ in range(count):
        pins = chance.sample(PINS, k=chance.choice([1, 2]))
        pinned = seconds_of((*asked, *pins), graph, on)
        if pinned is not None:
            assert best is not None, (memory, pins)
            assert pinned >= best * (1 - 1e-9), (memory, pins)


@pytest.mark.parametrize("seed", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_no_pin_makes_a_plan_faster(seed: int):
    no_pin_is_faster(seed, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5, 65))
def test_no_pin_of_thirty_makes_a_plan_faster(seed: int):
    no_pin_is_faster(seed, 30)


def test_what_other_batches_have_found_changes_no_choice():
    graph, on, findings = GRAPHS[1], machine(random.Random(1)), Findings()
    pins = ("precision=float32", "compile=false", "memory=8MB", "parallel.tensor=1")
    for batch in (4, 12):
        asked = request(*pins, "parallel.pipeline=1", batch=batch)
        alone, later = (seek_plan(asked, graph, on, findings=each) for each in (None, findings))
        assert isinstance(alone, PlanningResult)
        assert isinstance(later, PlanningResult)
        assert later.run_seconds == pytest.approx(alone.run_seconds, rel=1e-9)


def legal(asked: ResolvedRequest, graph: Graph, on: Machine) -> Iterator[Plan]:
    """Every legal plan of layers that are cut evenly, spelled out without the planner's axes."""
    space, total = PlanSpace(asked, graph, on), asked.train.batch
    schedules = ("1f1b", "gpipe", "zero-bubble", "interleaved")
    degrees = product(range(1, 5), (1, 2), divisors(total), (None, 2, 4))
    for pipeline, tensor, data, context in degrees:
        replicas = data * (context or 1)
        if pipeline * tensor * replicas > on.devices or pipeline > graph.layers:
            continue
        for schedule, chunks, micro, parameters, optimizer, tier in product(
            schedules, range(1, 5), divisors(total // data), divisors(replicas),
            divisors(replicas), ("device", "host"),
        ):  # fmt: skip
            if pipeline * chunks > graph.layers:
                continue
            bounds = space.chunk_bounds(pipeline * chunks)
            plan = space.base.model_copy(
                update={
                    "precision": asked.precision,
                    "parallel": Parallelism(
                        pipeline=pipeline, tensor=tensor, data=data, context=context,
                        schedule=schedule, virtual_stages=chunks,
                    ),
                    "sharding": ShardingDegrees(parameters=parameters, optimizer=optimizer)
                    if optimizer % parameters == 0
                    else ShardingDegrees(),
                    "batch": Batch(sequence=32, micro=micro, accumulation=total // data // micro),
                    "offload": Offload(optimizer=tier),
                    "stages": tuple(Stage(phases=(each,)) for each in pairwise(bounds)),
                }
            )  # fmt: skip
            for mode in ("none", "selective", "full"):
                yield from _placed(vary(plan, recompute=mode), space, tier)


def _placed(plan: Plan, space: PlanSpace, tier: str) -> Iterator[Plan]:
    """The plan with each amount of recompute, and in phases if its tier is not the device."""
    plans = [plan]
    most = [len(recomputable_layers(plan, stage)) for stage in plan.stages]
    if plan.recompute == "full" and plan.parallel.virtual_stages == 1:
        counts = product(*(range(count + 1) for count in most))
        plans += [with_recompute(plan, each) for each in counts if any(each)]
    if tier != "device":
        bare = plan.model_copy(update={"offload": Offload()})
        plans += [
            with_state_on(each, tier, activations=activations)
            for each in phase_partitions(bare, space)
            for activations in (False, True)
        ]
    for each in plans:
        if not plan_errors(each, space.graph, space.machine):
            yield each


def whole_space(seed: int, *pins: str) -> None:
    """Compares the choice with all legal plans of a small request, in three budgets."""
    chance = random.Random(seed)
    graph, on = GRAPHS[seed % 2], machine(chance)
    asked = request("precision=float32", "compile=false", *pins, batch=chance.choice([2, 4]))
    assert is_captured(graph, "float32", compiled=False)
    plans = [plan for plan in dict.fromkeys(legal(asked, graph, on)) if _keeps(plan, pins)]
    predictions = [predict_plan(plan, graph, on) for plan in plans]
    peaks = sorted(each.peaks[0].peak_bytes for each in predictions)
    for share in (0.0, 0.1, 0.9):
        budget = peaks[int(share * len(peaks))]
        fitting = [each for each in predictions if each.peaks[0].peak_bytes <= budget]
        best = min(run_seconds(each, STEPS) for each in fitting)
        found = choose_plan(asked.model_copy(update={"memory": budget}), graph, on)
        assert found.run_seconds is not None, (share, budget)
        assert found.run_seconds <= best * (1 + 1e-9), (share, budget)
    refused = choose_plan(asked.model_copy(update={"memory": peaks[0] * 3 // 4}), graph, on)
    assert refused.advice is None or refused.advice.needed_bytes <= peaks[0]


def refusal(seed: int) -> None:
    """Compares what a random request is said to need at least with what fits."""
    chance = random.Random(seed)
    graph, on = chance.choice(GRAPHS), machine(chance)
    pins = chance.sample(PINS, k=chance.choice([0, 1, 2]))
    asked = ("precision=float32", "compile=false", *pins)
    try:
        refused = choose_plan(request(*asked, "memory=400kB"), graph, on)
    except WindlassError:
        return  # No plan is legal.
    if refused.advice is None or refused.advice.nearest_tiers:
        return
    nearest, needed = refused.advice.nearest, refused.advice.needed_bytes
    assert predict_plan(nearest, graph, on).peaks[0].peak_bytes == needed
    assert choose_plan(request(*asked, f"memory={needed}"), graph, on).fits, pins
    assert not choose_plan(request(*asked, f"memory={needed - 1}"), graph, on).fits, pins


@pytest.mark.parametrize("seed", [4, pytest.param(2, marks=pytest.mark.slow)])
def test_a_refusal_names_the_smallest_peak_that_fits(seed: int):
    refusal(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 120))
def test_a_random_refusal_names_the_smallest_peak_that_fits(seed: int):
    refusal(seed)


def _keeps(plan: Plan, pins: tuple[str, ...]) -> bool:
    """Whether a plan keeps pins of parallel degrees."""
    wanted = [pin.removeprefix("parallel.").split("=") for pin in pins]
    return all((getattr(plan.parallel, name) or 1) == int(value) for name, value in wanted)


def test_no_legal_plan_of_a_small_request_is_faster_than_the_choice():
    whole_space(0, "parallel.pipeline=1", "parallel.tensor=1", "parallel.data=2")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 13))
def test_no_legal_plan_of_any_of_twelve_requests_is_faster(seed: int):
    whole_space(seed)
