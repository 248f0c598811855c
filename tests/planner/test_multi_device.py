"""The plan for several devices, against every simulated plan of the space."""

import random
import re
from itertools import product

import numpy as np
import pytest

from factories import sharded_graph, tiny_graph, tiny_machine
from windlass.cost.predict import predict_plan
from windlass.errors import InputErrors, WindlassError
from windlass.planner.choose import choose_plan
from windlass.planner.result import PlanningResult, run_seconds
from windlass.planner.space.options import vary
from windlass.planner.space.plan_space import PlanSpace
from windlass.program.activation_checkpointing import recomputable_layers, with_recompute
from windlass.program.layer_mode_errors import selective_recompute_errors
from windlass.program.lowering.lower import lower
from windlass.program.validate_plan import plan_errors
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.request import ResolvedRequest

GRAPHS = tuple(
    sharded_graph(tiny_graph(layers=layers, width=width, vocabulary=90, tied=tied), (2,))
    for layers, width, tied in ((2, 64, True), (3, 256, False), (4, 32, True))
)
WIDE = tuple(
    sharded_graph(tiny_graph(layers=layers, width=2048, vocabulary=4000, tied=tied), (2,))
    for layers, tied in ((2, True), (4, False))
)
"""Graphs with more optimizer state than the staging buffers that it passes when offloaded."""
STEPS = 10
QUICK = (1, 5)
"""Random cases of few plans, whose search takes a second."""
AWAY = (5, 7)
"""The same of machines with a host, of which one plan keeps its state there and one does not."""


def machine(devices: int, rate: float, host: int | None = None, kind: str = "cpu") -> Machine:
    found = tiny_machine(devices=devices, runtime=1000, compiler=20_000, host=host)
    link = found.links[0].model_copy(update={"rate": rate})
    device = found.device.model_copy(update={"kind": kind})
    return found.model_copy(update={"links": (link,), "device": device})


def request(*overrides: str, batch: int = 4) -> ResolvedRequest:
    sizes = (f"train.batch={batch}", "train.sequence=32", f"train.steps={STEPS}")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


def every(asked: ResolvedRequest, graph: Graph, on: Machine) -> list[Plan]:
    """All plans that are open, each with nothing recomputed and in each mode in which all is."""
    space = PlanSpace(asked, graph, on)
    configs = np.arange(space.table.count)
    found = [
        vary(space.plan(columns, row), recompute=mode)
        for pipeline in space.pipeline_degrees
        for option in space.options(pipeline)
        for columns, _ in space.columns(option, space.legal(option, configs))
        for row in range(columns.count)
        for mode in space.recomputes(option, columns.configs[columns.config[row]])
    ]
    assert len(found) == space.count()
    return found


def fewer(plan: Plan, graph: Graph) -> list[Plan]:
    """A fully recomputing plan with every other amount of recompute on each stage."""
    pipeline = plan.parallel.pipeline
    selective = not any(selective_recompute_errors(plan, graph))
    parts = []
    for stage in range(pipeline):
        chunks = plan.stages[stage::pipeline]
        most = max(len(recomputable_layers(plan, chunk)) for chunk in chunks)
        counts = [(full, 0) for full in range(most + 1)]
        if selective:
            counts += [(0, some) for some in range(1, most + 1)]
            counts += [(full, most) for full in range(1, most)]
        parts.append(counts)
    chosen = [list(each) * plan.parallel.virtual_stages for each in product(*parts)]
    plans = [with_recompute(plan, *zip(*counts, strict=True)) for counts in chosen]
    return list(dict.fromkeys(plans))


def counted(plans: list[Plan], asked: ResolvedRequest, graph: Graph) -> list[Plan]:
    """The plans and those with less recompute, if that is open."""
    if asked.recompute is not None:
        return plans
    again = [plan for plan in plans if plan.recompute == "full"]
    return [*plans, *(each for plan in again for each in fewer(plan, graph))]


def exhaustive(seed: int, pins: int = 3, named: tuple[str, ...] = ()) -> None:
    """Checks on one random small case that the chosen plan is the fastest of all that fit."""
    chance = random.Random(seed)
    graph = chance.choice(GRAPHS)
    on = machine(chance.choice([2, 3, 4, 5]), chance.choice([1e9, 1e10]))
    compared(chance, graph, on, pins=pins, named=named)


def exhaustive_away(seed: int, pins: int = 3) -> str:
    """The same where optimizer state may be offloaded to the host; returns the chosen tier."""
    chance = random.Random(seed)
    graph = chance.choice(WIDE)
    host = chance.choice([2 * 10**7, 10**8, 10**12])
    kind = chance.choice(["cpu", "other"])
    on = machine(chance.choice([2, 4]), chance.choice([1e9, 1e10]), host, kind)
    plan = compared(chance, graph, on, smallest=0.2, pins=pins, named=("phases=1",))
    return plan.offload.optimizer


def compared(
    chance: random.Random,
    graph: Graph,
    on: Machine,
    smallest: float = 1.0,
    pins: int = 3,
    named: tuple[str, ...] = (),
) -> Plan:
    """The plan that is chosen, which is as fast as the fastest of all that fit.

    The near tier has what one of so large a share of the plans, the smallest, needs.
    """
    pinned = chance.sample(
        ["recompute=none", "precision=float32", "compile=false", "parallel.schedule=1f1b",
         "batch.micro=1", "parallel.tensor=1", "train.clip=inf"],
        k=pins,
    )  # fmt: skip
    asked = request(*pinned, *named, batch=chance.choice([4, 6]))
    predictions = [
        predict_plan(plan, graph, on) for plan in counted(every(asked, graph, on), asked, graph)
    ]
    far = on.device.tiers[-1].capacity_bytes
    held = [each for each in predictions if each.peaks[-1].peak_bytes <= far]
    peaks = sorted(each.peaks[0].peak_bytes for each in held)
    budget = peaks[chance.randrange(round(smallest * len(peaks)))]
    fitting = [each for each in held if each.peaks[0].peak_bytes <= budget]
    best = min(run_seconds(each, STEPS) for each in fitting)
    choice = choose_plan(asked.model_copy(update={"memory": budget}), graph, on)
    assert choice.plan is not None
    assert choice.prediction is not None
    assert choice.run_seconds == pytest.approx(best, rel=1e-9), (pinned, budget)
    assert choice.prediction.peaks[0].peak_bytes <= budget
    return choice.plan


@pytest.mark.parametrize("seed", QUICK)
def test_the_choice_is_the_fastest_of_all_simulated_plans(seed: int):
    exhaustive(seed, pins=4, named=("parallel.context=1",))


def test_optimizer_state_is_offloaded_if_that_is_fastest_of_all_simulated_plans():
    homes = [exhaustive_away(seed, pins=5) for seed in AWAY]
    assert set(homes) == {"device", "host"}


@pytest.mark.slow
def test_it_is_so_in_a_hundred_cases():
    for seed in sorted({*range(105)} - {*AWAY}):
        exhaustive_away(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted({*range(206)} - {*QUICK}))
def test_the_choice_is_the_fastest_of_all_plans_of_two_hundred_cases(seed: int):
    exhaustive(seed)


@pytest.mark.slow
def test_the_choice_is_the_fastest_of_all_plans_whose_ranks_divide_sequences():
    plan = compared(
        random.Random(3), GRAPHS[2], machine(4, 1e9), pins=2, named=("parallel.context=2",)
    )
    assert plan.parallel.context == 2


def test_ranks_divide_sequences_in_phases_too():
    named = (
        "parallel.context=2", "phases=2", "recompute=full", "precision=float32", "compile=false",
        "parallel.tensor=1", "parallel.data=2", "batch.micro=1",
    )  # fmt: skip
    graph, on = GRAPHS[2], machine(4, 1e9, host=10**10)
    plan = choose_plan(request(*named), graph, on).plan
    assert plan is not None
    assert (plan.parallel.context, plan.parallel.devices) == (2, 4)
    assert all(len(stage.phases) == 2 for stage in plan.stages)
    verify_programs(lower(plan, graph), plan, graph, dict.fromkeys(("device", "host"), 2**40))


@pytest.mark.parametrize("named", [(), ("parallel.context=2",)], ids=str)
def test_every_plan_of_the_space_is_legal(named: tuple[str, ...]):
    asked, on = request(*named, batch=4), machine(4, 1e9)
    plans = every(asked, GRAPHS[0], on)
    assert len(plans) > (30 if named else 100)
    assert len({plan.label for plan in plans}) == len(plans)
    for plan in plans:
        assert plan_errors(plan, GRAPHS[0], on, global_batch=4) == ()


def test_the_chosen_plan_verifies_at_its_own_peak():
    graph, on = GRAPHS[0], machine(4, 1e9)
    choice = choose_plan(request(), graph, on)
    assert choice.plan is not None
    assert choice.prediction is not None
    held = on.device.process_bytes(compiled=choice.plan.compile)
    budget = choice.prediction.peaks[0].peak_bytes - held
    verify_programs(lower(choice.plan, graph), choice.plan, graph, {"device": budget})


@pytest.fixture(scope="module")
def choice_of_four() -> PlanningResult:
    return choose_plan(request(batch=8), GRAPHS[1], machine(4, 1e9))


def test_runners_up_are_the_fastest_of_each_family_that_lost(choice_of_four: PlanningResult):
    keys = "precision", "recompute", "parallel.pipeline", "parallel.schedule"
    runners_up = choice_of_four.runners_up
    for key in keys:
        assert any(key in runner.differs for runner in runners_up), key
    assert len({runner.plan for runner in runners_up}) == len(runners_up)
    slower = [runner.slower_seconds for runner in runners_up]
    assert slower == sorted(slower)


def test_no_better_constant_saves_more_than_the_step_spends_on_it(choice_of_four: PlanningResult):
    prediction = choice_of_four.prediction
    assert prediction is not None
    update = prediction.by_term["update"] / prediction.step_seconds
    assert 0 < choice_of_four.sensitivity["optimizer update rate"] < update
    assert all(0 <= saved < 1 for saved in choice_of_four.sensitivity.values())


def test_if_nothing_fits_the_nearest_plans_are_named_with_their_bytes():
    graph, on = GRAPHS[0], machine(4, 1e9)
    choice = choose_plan(request("memory=20kB"), graph, on)
    assert choice.plan is None
    assert choice.advice is not None
    assert choice.infeasible
    peaks = [refusal.peak_bytes for refusal in choice.infeasible]
    assert peaks == sorted(peaks)
    assert choice.advice.over_bytes == peaks[0] - 20_000 > 0
    fitting = choose_plan(request(f"memory={peaks[0]}"), graph, on)
    assert fitting.fits


def test_all_impossible_pins_are_reported():
    with pytest.raises(InputErrors, match=r"parallel\.data` = 3 does not divide"):
        choose_plan(request("parallel.data=3"), GRAPHS[0], machine(4, 1e9))


def test_a_pinned_plan_has_a_rank_and_a_loss():
    graph, on = GRAPHS[1], machine(4, 1e9)
    pins = ("precision=float32", "compile=false")
    best = choose_plan(request(*pins, batch=8), graph, on)
    named = choose_plan(
        request(*pins, "parallel.pipeline=1", "parallel.tensor=1", batch=8), graph, on
    )
    assert best.plan is not None
    assert best.pinned_rank is None
    assert named.pinned_rank is not None
    assert best.run_seconds is not None
    if named.pinned_rank.best is None:
        assert named.run_seconds == pytest.approx(best.run_seconds)
    else:
        loss = named.pinned_rank.best.slower_seconds
        assert named.run_seconds == pytest.approx(best.run_seconds + loss)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_chosen_plan_is_the_fastest_with_stragglers_too(seed: int):
    chance = random.Random(seed)
    two = machine(4, chance.choice([1e9, 1e10])).model_copy(
        update={"hosts": 2, "devices_per_host": 2, "stragglers": chance.choice([0.05, 0.5])}
    )
    compared(chance, chance.choice(GRAPHS), two, pins=4, named=("parallel.context=1",))


def test_better_constants_never_make_a_plan_slower():
    choice = choose_plan(request(batch=8), GRAPHS[1], machine(4, 1e9))
    assert choice.sensitivity
    shares = list(choice.sensitivity.values())
    assert min(shares) >= -1e-12
    assert sum(shares) <= 1 - 1 / 1.1 + 1e-9


def test_more_even_hosts_save_their_share_of_waiting_for_the_slowest():
    hosts = {"hosts": 4, "devices_per_host": 1, "stragglers": 0.05}
    on = machine(4, 1e9).model_copy(update=hosts)
    choice = choose_plan(request("parallel.pipeline=4", batch=8), GRAPHS[1], on)
    waited = 1 - 1 / on.straggler_factor(4)
    saved = choice.sensitivity["waiting for the slowest host"]
    assert saved == pytest.approx(waited * (1 - 1 / 1.1))


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        (("sharding.parameters=4", "parallel.pipeline=2"), "no plan of `tiny` for 4 devices"),
        (("phases=2",), "has no offload tier"),
        (("parallel.data=3",), "`parallel.data` = 3 does not divide `train.batch` = 4"),
        (("parallel.pipeline=4", "parallel.virtual_stages=3"), "= 4 x 3, but `tiny` has 4 layers"),
    ],
)
def test_pins_that_no_plan_keeps_at_once_are_refused_by_what_was_asked(
    pins: tuple[str, ...], sentence: str
):
    with pytest.raises(WindlassError, match=re.escape(sentence)):
        choose_plan(request(*pins), GRAPHS[0], machine(4, 1e9))
