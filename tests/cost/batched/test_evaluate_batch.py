"""The batched cost model against the simulator, on random plans."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from factories import late_tied_graph, sharded_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.cost.batched.config_keys import (
    ComputeConfig,
    LayerConfig,
    RecomputeConfig,
    ShardingOption,
    ShardingOptions,
)
from windlass.cost.batched.evaluate_batch import PlanTotals, evaluate_batch, stage_bytes
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.plan_table import PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.cost.predict import predict_plan
from windlass.planner.search.min_recompute import RecomputeSteps
from windlass.program.validate_plan import selective_recompute_errors
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine, Tier
from windlass.schema.plan import Offload, Plan

GRAPHS = tuple(
    sharded_graph(graph)
    for graph in (
        tiny_graph(layers=10, width=256, vocabulary=500, tied=False),
        tiny_graph(layers=10, width=256, vocabulary=500, tied=True),
        tiny_graph(layers=7, width=64, vocabulary=5000, tied=True, sparse=True),
        late_tied_graph(before=3, between=4),
    )
)
SLOW_LINKS = tiny_machine(devices=64, runtime=1000, compiler=20_000)
"""A message takes as long as a pass of a layer."""
FAST_LINKS = SLOW_LINKS.model_copy(
    update={"links": (SLOW_LINKS.links[0].model_copy(update={"rate": 2e10, "latency": 1e-5}),)}
)
BESIDE = tuple(
    machine.model_copy(update={"device": machine.device.model_copy(update={"kind": "cuda"})})
    for machine in (FAST_LINKS, SLOW_LINKS)
)
"""The same machines with overlapping gradient reduction."""
IN_TURN = FAST_LINKS.model_copy(update={"execution_model": "bulk-synchronous"})


def with_host(machine: Machine, rate: float, **device: object) -> Machine:
    """The machine with memory of its hosts, so many bytes/s away."""
    host = Tier(name="host", capacity_bytes=10**12, read=rate, write=rate, both=1.5 * rate)
    tiers = (*machine.device.tiers, host)
    changed = machine.device.model_copy(update={"tiers": tiers, **device})
    return machine.model_copy(update={"device": changed})


WITH_HOSTS = (
    with_host(FAST_LINKS, 2e10),
    with_host(FAST_LINKS, 2e9),
    with_host(FAST_LINKS, 2e10, kind="other"),
    with_host(FAST_LINKS, 2e9, kind="other"),
    with_host(IN_TURN, 2e9, kind="other", moving_share=0.1),
)
"""Far tiers that updates wait for and such that they do not; `other` devices do not update with the
cores that compute."""

CLOSE = 0.02
"""Asked of the closed form, which is exact for nearly all plans."""
FEW = 0.01
"""So large a share may be off by more, not twice that: links as slow as layers whose steps repeat
later than it looks."""
ROUNDING = 1e-12
"""Relative. Bytes are the clock's, which adds them in another order."""


def draw(chance: random.Random, graph: Graph, machine: Machine) -> Plan:
    """A legal plan whose layers all stay near; optimizer state lives in the last tier."""
    layers = graph.layers
    pipeline = chance.choice([1, 1, 2, 3, 4])
    replicas = chance.choice([1, 2, 4])
    optimizer = chance.choice(divisors(replicas))
    order = chance.choice(["gpipe", "1f1b", "1f1b", "zero-bubble", "interleaved"])
    accumulation, chunks = chance.choice([1, 2, 3, 4, 7, 16, 40]), 1
    if order == "interleaved":
        order = "1f1b" if pipeline == 1 or 2 * pipeline > layers else order
    if order == "interleaved":
        chunks = chance.choice([each for each in (2, 3) if each * pipeline <= layers])
        accumulation = pipeline * chance.choice([1, 2, 5, 9])
    count = pipeline * chunks
    ends = [0, *sorted(chance.sample(range(1, layers), count - 1)), layers]
    if chunks > 1:  # as search cuts them
        ends = [layers * part // count for part in range(count + 1)]
    return tiny_plan(
        graph,
        machine,
        pipeline=pipeline,
        tensor=chance.choice([1, 2, 4]),
        data=replicas,
        sharding=(chance.choice(divisors(optimizer)), optimizer),
        schedule=order,
        virtual_stages=chunks,
        accumulation=accumulation,
        micro=chance.choice([1, 2, 4]),
        sequence=32,
        precision=chance.choice(["float32", "bfloat16"]),
        compiled=chance.random() < 0.5 and order != "zero-bubble",
        recompute=chance.choice(["none", "full"]),
        moments=chance.choice(["float32", "int8"]),
        clip=chance.random() < 0.5,
        offload=Offload(optimizer=machine.device.tiers[-1].name),
        stages=tuple((bounds,) for bounds in pairwise(ends)),
    )


def draw_again(chance: random.Random, graph: Graph, machine: Machine) -> Plan:
    """The plan with random recompute on its stages, in any mode that it can have."""
    plan = draw(chance, graph, machine)
    able = not any(selective_recompute_errors(plan, graph))
    ways = [able and chance.random() < 0.7 for _ in range(plan.parallel.pipeline)]
    steps = RecomputeSteps(plan, selects=ways)
    return steps.plan([chance.randrange(last + 1) for last in steps.last])


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def told(plan: Plan, graph: Graph, machine: Machine) -> PlanTotals:
    """The batched estimate of one plan."""
    return evaluate_batch(*parts(plan, graph, machine))


def parts(
    plan: Plan, graph: Graph, machine: Machine
) -> tuple[LayerCosts, PipelineShape, tuple[int, ...], PlanTable]:
    """One plan as arguments of the batched cost model."""
    cut, micros = plan.parallel, plan.batch.accumulation
    shape = PipelineShape.of(
        plan.parallel.schedule, cut.pipeline, plan.parallel.virtual_stages, micros
    )
    setting = LayerConfig(
        cut.tensor, plan.precision, plan.compile, plan.batch.micro, micros > 1, cut.pipeline > 1,
        cut.data, plan.offloads and machine.device.moving_share > 0,
    )  # fmt: skip
    share = ShardingOption(
        plan.sharding.parameters, plan.sharding.optimizer, plan.offload.optimizer
    )
    block = ShardingOptions(
        cut.tensor, plan.precision, micros > 1, cut.data, (share,), setting.offloads
    )
    run = ComputeConfig(setting, again(plan, graph.layers), micros)
    ends = (*(stage.first_layer for stage in plan.stages), graph.layers)
    return LayerCosts(plan, graph, machine), shape, ends, PlanTable.of([(block, [run])])


def again(plan: Plan, layers: int) -> RecomputeConfig:
    """A plan's recompute as the batched cost model takes it."""
    whole, selective = list[int](), list[int]()
    for stage in range(plan.parallel.pipeline):
        chunks = plan.stages[stage :: plan.parallel.pipeline]  # of which small ones tell no number
        count = next((chunk.recompute_layers for chunk in chunks if chunk.recompute_layers), layers)
        modes = {chunk.recompute for chunk in chunks}
        some = "selective" in modes or any(chunk.recompute_rest for chunk in chunks)
        whole.append(count if "full" in modes else 0)
        selective.append(count if some else 0)
    return RecomputeConfig(full=tuple(whole), selective=tuple(selective))


def errors(
    seed: int,
    count: int,
    machines: tuple[Machine, ...] = (FAST_LINKS, SLOW_LINKS),
    drawn: Callable[[random.Random, Graph, Machine], Plan] = draw,
) -> tuple[list[float], list[float]]:
    """Relative errors of time and memory of so many plans."""
    chance = random.Random(seed)
    seconds, nbytes = [], []
    for _ in range(count):
        graph, machine = chance.choice(GRAPHS), chance.choice(machines)
        plan = drawn(chance, graph, machine)
        totals, clocked = told(plan, graph, machine), predict_plan(plan, graph, machine)
        seconds.append(abs(totals.step_seconds[0] / clocked.step_seconds - 1))
        nbytes.append(abs(totals.peak_bytes[0] / clocked.peaks[0].peak_bytes - 1))
        assert seconds[-1] < 2 * CLOSE, (seconds[-1], plan)
        assert nbytes[-1] < ROUNDING, (nbytes[-1], plan)
    assert sum(each > CLOSE for each in seconds) <= FEW * count
    return seconds, nbytes


def test_batched_estimates_equal_simulated_times():
    seconds, _ = errors(seed=1, count=60)
    assert sum(seconds) / len(seconds) < CLOSE / 10


def test_no_stage_that_is_not_looked_at_is_fuller_than_those_that_are():
    chance = random.Random(4)
    for _ in range(60):
        graph, machine = chance.choice(GRAPHS), chance.choice((FAST_LINKS, SLOW_LINKS))
        plan = draw(chance, graph, machine)
        peak = told(plan, graph, machine).peak_bytes[0]
        assert stage_bytes(*parts(plan, graph, machine)).max() == pytest.approx(peak, rel=1e-12)


def test_so_do_batched_estimates_with_any_recompute():
    seconds, _ = errors(seed=5, count=100, drawn=draw_again)
    assert sum(seconds) / len(seconds) < CLOSE / 10


def test_so_do_batched_estimates_of_bulk_synchronous_machines():
    seconds, _ = errors(seed=3, count=30, machines=(IN_TURN,))
    assert sum(seconds) / len(seconds) < CLOSE / 4


def test_so_do_batched_estimates_with_offloaded_optimizer_state():
    seconds, _ = errors(seed=4, count=100, machines=WITH_HOSTS)
    assert sum(seconds) / len(seconds) < CLOSE / 10


def test_so_do_batched_estimates_with_overlapping_reductions():
    seconds, _ = errors(seed=4, count=60, machines=BESIDE)
    assert sum(seconds) / len(seconds) < CLOSE / 10


@pytest.mark.slow
def test_batched_estimates_equal_simulated_times_of_five_hundred_plans():
    seconds, nbytes = errors(seed=2, count=500)
    assert max(seconds) < CLOSE
    print(
        f"time: worst {max(seconds):.4f}, mean {sum(seconds) / len(seconds):.5f}; "
        f"memory: worst {max(nbytes):.1e}"
    )
