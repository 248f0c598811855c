"""Plans in phases over several devices, against all simulated plans of the space."""

import random
import re
from functools import cache
from math import inf

import numpy as np
import pytest

from factories import sharded_graph, tiny_graph, tiny_machine
from windlass.cost import ArrayClock, InstructionCosts, LayerConfig
from windlass.cost.predict import predict_plan
from windlass.planner.choose import choose_plan
from windlass.planner.explain import explain_result
from windlass.planner.result import PlanningResult
from windlass.planner.search.bounds import ConfigBounds
from windlass.planner.search.phase_bounds import (
    PhaseMemory,
    PhasePrices,
    chunked_seconds,
    min_step_seconds,
)
from windlass.planner.search.phase_search import PhaseSearch, PhaseSizes
from windlass.planner.search.truncated_plan import TruncatedPlan
from windlass.planner.space.options import offload_tiers
from windlass.planner.space.phase_space import (
    OffloadedState,
    base_plans,
    fullest_offloaded_bytes,
    phase_partitions,
    with_state_on,
)
from windlass.planner.space.phase_table import PhaseTable
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import Instruction, InstructionKind, PeerMap
from windlass.program.lowering.lower import lower
from windlass.program.validate_plan import plan_errors
from windlass.program.verify.verify import verify_programs
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Offload, Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import ResolvedRequest

GRAPHS = tuple(
    sharded_graph(
        tiny_graph(layers=layers, width=width, vocabulary=90, tied=tied, sparse=tied), (2,)
    )
    for layers, width, tied in ((3, 64, True), (4, 256, False), (6, 128, True))
)
WIDE = sharded_graph(tiny_graph(layers=6, width=2048, vocabulary=90), (2,))
"""A graph whose state is larger than its staging buffers."""
STEPS = 10
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 8))]
"""Of drawn cases, each of which is searched exhaustively."""
REPLICAS = (
    "precision=float32", "compile=false", "parallel.pipeline=1", "parallel.tensor=1",
    "parallel.context=1", "sharding.parameters=1", "sharding.optimizer=1",
)  # fmt: skip
"""Replicas with copies of their own, so that a device holds all layers or takes turns."""
ROUNDING = 1 + 1e-9
PASSES: tuple[tuple[InstructionKind, int], ...] = (
    ("forward", 1), ("recompute", 1), ("backward", 0), ("backward", 1),
)  # fmt: skip
"""Relative error of sums of the same numbers in another order."""


def machine(rate: float, *, devices: int = 4, in_turn: bool = False) -> Machine:
    found = tiny_machine(devices=devices, host="2 GiB", runtime=1000, compiler=20_000)
    link = found.links[0].model_copy(update={"rate": rate})
    rule = "bulk-synchronous" if in_turn else found.execution_model
    return found.model_copy(update={"links": (link,), "execution_model": rule})


def request(*overrides: str, batch: int = 8) -> ResolvedRequest:
    sizes = (f"train.batch={batch}", "train.sequence=32", f"train.steps={STEPS}")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


def every(space: PlanSpace) -> list[tuple[Plan, Prediction]]:
    """All legal plans of the space on the nearest tier that holds them, wherever outputs are."""
    found: list[tuple[Plan, Prediction]] = []
    for base in base_plans(space):
        for plan in phase_partitions(base, space):
            for outputs in (False, True):
                offloaded = (
                    (with_state_on(plan, tier.name, activations=outputs), tier.capacity_bytes)
                    for tier in offload_tiers(space.machine)
                )
                offloaded_plan = next(
                    (
                        offloaded_plan
                        for offloaded_plan, room in offloaded
                        if fullest_offloaded_bytes(offloaded_plan, space.graph) <= room
                    ),
                    None,
                )
                if offloaded_plan is not None and not plan_errors(
                    offloaded_plan, space.graph, space.machine
                ):
                    found.append(
                        (offloaded_plan, predict_plan(offloaded_plan, space.graph, space.machine))
                    )
    return found


@cache
def case(seed: int) -> tuple[PlanSpace, list[tuple[Plan, Prediction]]]:
    """A small request on a small machine, and all its plans."""
    chance = random.Random(seed)
    pins = chance.sample(
        [
            "recompute=full",
            "parallel.tensor=1",
            "train.clip=inf",
            "parallel.pipeline=2",
            "phases=2",
        ],
        k=2,
    )
    pins += ["parallel.context=1"] * (seed % 2)
    asked = request("precision=float32", "compile=false", *pins, batch=chance.choice([4, 8, 12]))
    on = machine(chance.choice([1e9, 1e10]), in_turn=chance.random() < 0.5)
    space = PlanSpace(asked, chance.choice(GRAPHS), on)
    return space, every(space)


def test_the_least_memory_of_a_plan_hangs_on_no_plan_that_was_asked_for_before():
    space = PlanSpace(request(batch=16), GRAPHS[0], machine(1e9))
    asked = PhaseSizes(space, state := OffloadedState(space))

    for base in base_plans(space):
        assert asked.least_bytes(base) == PhaseSizes(space, state).least_bytes(base)


def fastest_in_phases(space: PlanSpace, budget: int) -> tuple[Plan, Prediction]:
    clock = ArrayClock(space.base, space.graph, space.machine)
    bounds, search = ConfigBounds(space, clock), PhaseSearch(space, PhasePrices(clock))
    return search.search(budget, bounds).best[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_found_is_the_fastest_of_all_that_fit(seed: int):
    space, told = case(seed)
    peaks = sorted(prediction.peaks[0].peak_bytes for _, prediction in told)
    budget = peaks[len(peaks) * (1 + seed) // 10]
    fitting = [each for _, each in told if each.peaks[0].peak_bytes <= budget]
    assert 0 < len(fitting) < len(told)
    best = min(each.step_seconds for each in fitting)
    plan, prediction = fastest_in_phases(space, budget)
    assert prediction.step_seconds == pytest.approx(best, rel=1e-9)
    assert (
        plan_errors(plan, space.graph, space.machine, global_batch=space.request.train.batch) == ()
    )
    process_bytes = space.machine.device.process_bytes(compiled=plan.compile)
    verify_programs(lower(plan, space.graph), plan, space.graph, {"device": budget - process_bytes})


@pytest.mark.parametrize("seed", SEEDS)
def test_no_lower_bound_exceeds_its_plan(seed: int):
    space, told = case(seed)
    graph, on = space.graph, space.machine
    prices = PhasePrices(ArrayClock(space.base, graph, on))
    for plan, prediction in told:
        process_bytes = on.device.process_bytes(compiled=plan.compile)
        budget, seconds = prediction.peaks[0].peak_bytes, prediction.step_seconds * ROUNDING
        short = TruncatedPlan(plan, prices)
        memory, table = PhaseMemory.of(plan, graph), PhaseTable.of(plan, [plan.stages], graph)
        outputs = plan.is_offloaded("activations")
        (least,) = memory.of_fullest_stage(table, offloads_activations=outputs)
        assert process_bytes + least <= budget, plan
        tier = offload_tiers(on)[0]
        both_ways = tier.transfer_seconds(1, 0) + tier.transfer_seconds(0, 1)
        moved = memory.offloaded_outputs(table) * both_ways if outputs else None
        least_seconds = min_step_seconds(plan, table, prices, moved)
        assert (least_seconds <= seconds).all(), plan
        if plan.parallel.virtual_stages > 1:
            assert chunked_seconds(plan, prices.clock) <= seconds, plan
        assert short.peak_bytes == budget, plan
        assert short.least_peak_bytes <= budget, plan
        assert short.step_seconds <= seconds, plan
        assert short.whole_step_seconds == pytest.approx(prediction.step_seconds, rel=1e-9), plan


@pytest.mark.parametrize("seed", SEEDS)
def test_no_lower_bound_of_a_configuration_exceeds_its_plans(seed: int):
    space, told = case(seed)
    bounds = ConfigBounds(space, ArrayClock(space.base, space.graph, space.machine))
    table, least = space.table, dict[tuple[int, int, bool], float]()
    batches = [*zip(table.mode, table.data, table.micro, table.accumulation, strict=True)]
    for plan, prediction in told:
        resident, parallel = plan.model_copy(update={"offload": Offload()}), plan.parallel
        batch = parallel.data, plan.batch.micro, plan.batch.accumulation
        config = next(
            each
            for each, (mode, *own) in enumerate(batches)
            if (table.modes[mode], *own) == (LayerConfig.of(resident), *batch)
        )
        shape = parallel.pipeline, config, parallel.schedule == "interleaved"
        least[shape] = min(least.get(shape, inf), prediction.step_seconds)
    for (pipeline, config, spans), seconds in least.items():
        of_shape = np.array([pipeline]), np.array([config])
        assert bounds.in_phases(*of_shape, inf, spans=spans)[0] <= seconds * ROUNDING


def partly_open(host_bytes: int) -> tuple[PlanSpace, list[Plan]]:
    """A space with a host tier of this size, and some of its plans of every kind, shuffled."""
    on = machine(1e9)
    tiers = (
        on.device.tiers[0],
        on.device.tiers[1].model_copy(update={"capacity_bytes": host_bytes}),
    )
    tight = on.model_copy(update={"device": on.device.model_copy(update={"tiers": tiers})})
    space = PlanSpace(request(batch=12), GRAPHS[2], tight)
    bases = list(base_plans(space))
    return space, random.Random(5).sample(bases, k=60)


def test_offloaded_bytes_that_plans_share_are_those_of_each():
    space, bases = partly_open(2**31)
    state, (host,) = OffloadedState(space), offload_tiers(space.machine)
    for base in bases:
        table = state.table(base)
        assert table is not None
        outputs = PhaseMemory.of(base, space.graph).offloaded_outputs(table)
        for activations in (False, True):
            needed = state.fullest_bytes(base, table, host, outputs if activations else None)
            plans = (
                with_state_on(plan, "host", activations=activations)
                for plan in phase_partitions(base, space)
            )
            assert needed.tolist() == [fullest_offloaded_bytes(each, space.graph) for each in plans]


def test_the_clock_prices_passes_in_phases_as_the_simulator_does():
    space, bases = partly_open(2**31)
    graph, machine = space.graph, space.machine
    clock = ArrayClock(space.base, graph, machine)
    for base in bases[:30]:
        plan = with_state_on(next(phase_partitions(base, space)), "host", activations=False)
        costs, peers = InstructionCosts(plan, graph, machine), PeerMap(plan, graph)
        passes: list[Instruction] = [
            Instruction(kind, layer, micro)
            for kind, micro in PASSES
            for layer in range(graph.layers)
        ]
        sent = [costs.communication_seconds(each) * peers.is_collective(each) for each in passes]
        expected = [costs.terms(each).total + more for each, more in zip(passes, sent, strict=True)]
        assert clock.pass_seconds(plan).ravel() == pytest.approx(expected, rel=1e-12)


def test_plans_are_left_out_if_no_tier_has_room_for_their_state():
    space, bases = partly_open(2**31)

    def least(base: Plan) -> int:
        plans = (
            with_state_on(plan, "host", activations=False) for plan in phase_partitions(base, space)
        )
        return min(fullest_offloaded_bytes(plan, space.graph) for plan in plans)

    needed = [least(base) for base in bases]
    room = sorted(needed)[len(needed) // 2]
    tight, _ = partly_open(room)
    state = OffloadedState(tight)
    found = [base for base in bases if state.table_with_room(base) is not None]
    assert found == [base for base, least in zip(bases, needed, strict=True) if least <= room]
    assert 0 < len(found) < len(bases)


def narrow(graph: Graph, on: Machine, *overrides: str) -> int:
    """Device memory that holds some plan in phases and no plan without."""
    told = every(PlanSpace(request(*overrides), graph, on))
    return min(prediction.peaks[0].peak_bytes for _, prediction in told)


def told(choice: PlanningResult) -> str:
    """The advice, line by line."""
    assert not choice.fits
    return "\n".join(explain_result(choice).help)


def test_a_model_that_no_device_holds_runs_in_phases_on_all():
    graph, on = WIDE, machine(1e10)
    budget = f"memory={narrow(graph, on, *REPLICAS)}"
    assert not choose_plan(request(budget, *REPLICAS, "phases=1"), graph, on).fits
    choice = choose_plan(request(budget, *REPLICAS), graph, on)
    assert choice.plan is not None
    assert choice.prediction is not None
    assert choice.plan.parallel.devices == on.devices
    assert set(choice.plan.offload_tiers) >= {"parameters", "gradients", "optimizer"}
    assert choice.prediction.fits


def test_outputs_stay_on_the_device_if_there_is_room():
    space = PlanSpace(request("precision=float32"), WIDE, machine(1e10))
    plan, _ = fastest_in_phases(space, 2**30)
    assert not plan.is_offloaded("activations")


def test_if_not_even_phases_fit_the_tier_and_the_missing_bytes_are_named():
    graph, on = WIDE, machine(1e10)
    budget = narrow(graph, on, *REPLICAS)
    choice = choose_plan(request(f"memory={budget - 1}", *REPLICAS), graph, on)
    assert re.search(r"phases a stage, PP=.* in `device`, .* too much", told(choice))


def test_a_suggested_change_makes_it_fit():
    graph, on = WIDE, machine(1e10)
    budget = f"memory={narrow(graph, on, *REPLICAS)}"
    two = choose_plan(request(budget, *REPLICAS, "phases=2"), graph, on)
    assert "leaving `phases` = 2 open" in told(two)
    assert choose_plan(request(budget, *REPLICAS), graph, on).plan is not None


def test_a_tier_that_is_too_small_is_named_with_smaller_moments_if_they_help():
    graph, on, replicas = WIDE, machine(1e10, devices=2), (*REPLICAS, "parallel.data=2")
    budget = narrow(graph, on, *replicas)
    space = PlanSpace(request(*replicas, "moments=bfloat16"), graph, on)
    peaks = [prediction.peaks for _, prediction in every(space)]
    small = min(far.peak_bytes for fullest, far in peaks if fullest.peak_bytes <= budget)
    near_tier, far = on.device.tiers
    tiers = (near_tier, far.model_copy(update={"capacity_bytes": small}))
    tight = on.model_copy(update={"device": on.device.model_copy(update={"tiers": tiers})})
    asked = request(f"memory={budget}", *replicas)
    words = told(choose_plan(asked, graph, tight))
    assert re.search(r"in `host`, .* too much(.|\n)*`moments=bfloat16`", words)


def test_plans_in_phases_may_leave_devices_idle():
    graph = sharded_graph(tiny_graph(layers=2), (2, 4))
    space = PlanSpace(request(batch=6), graph, machine(1e9, devices=6))
    assert {plan.parallel.devices for plan in base_plans(space)} >= {1, 2, 4, 6}
