import pytest
from hypothesis import given, strategies as st

from cost.equal_blocks import equal_blocks
from factories import sharded_graph, tiny_graph, tiny_machine, tiny_plan
from program.distributed_plans import MACHINE, distributed_plans
from windlass.cost.communication_time import CommunicationCosts
from windlass.cost.instruction_time import InstructionCosts
from windlass.cost.predict import predict_plan
from windlass.cost.simulator.event_simulator import simulate, simulate_programs
from windlass.cost.simulator.offload_queue import step_seconds
from windlass.program.instruction import Instruction
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.machine.stack import Stack
from windlass.schema.optimizers import OtherOptimizer
from windlass.schema.plan import PipelineSchedule, Plan

GRAPH = tiny_graph(layers=2, tied=False)
SQUARE_BYTES = 32 * 32 * 4
CUT = sharded_graph(tiny_graph(layers=2, tied=False))
TOKENS_BYTES = 2 * 16 * 32 * 4
"""Bytes of all vectors of one micro-batch of `tiny_plan`."""


def linked(rate: float) -> Machine:
    """A machine with all devices on one link of this many bytes/s."""
    (link,) = MACHINE.links
    return MACHINE.model_copy(update={"links": (link.model_copy(update={"rate": rate}),)})


@given(
    pipeline=st.integers(1, 4),
    groups=st.integers(1, 3),
    extra=st.integers(0, 3),
    interleave=st.sampled_from([2, 3]),
    order=st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"]),
)
def test_simulated_programs_take_the_time_of_their_schedules_formulas(
    pipeline: int, groups: int, extra: int, interleave: int, order: PipelineSchedule
):
    chunks = interleave if order == "interleaved" and pipeline > 1 else 1
    micros = groups * pipeline + (0 if order == "interleaved" else extra)
    graph, machine = equal_blocks(2 * pipeline * chunks)
    plan = tiny_plan(
        graph,
        machine,
        pipeline=pipeline,
        schedule=order if chunks > 1 or order != "interleaved" else "1f1b",
        virtual_stages=chunks,
        accumulation=micros,
        clip=False,
    )
    product = 2 * (2 * 16) * 32 * 32 / 1e9
    part = 2 * chunks * product  # of a stage: tf = tb = tw
    waiting = {"zero-bubble": 2 * (pipeline - 1) - (min(micros, pipeline) - 1)}
    turns = 3 * micros + waiting.get(order, 3 * (pipeline - 1) / chunks)
    # The rest takes 1e-21 of the time: loads, sums, messages.
    assert predict_plan(plan, graph, machine).step_seconds == pytest.approx(turns * part, rel=1e-9)


@given(drawn=distributed_plans())
def test_every_distributed_plan_has_a_time_whose_kinds_sum_to_the_step(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    programs = lower(plan, graph)
    prediction = predict_plan(plan, graph, MACHINE, programs)
    assert sum(prediction.by_kind.values()) == pytest.approx(prediction.step_seconds)
    if plan.parallel.devices > 1:
        assert sum(prediction.by_term.values()) == pytest.approx(prediction.step_seconds)
    for lane in simulate(plan, graph, MACHINE, programs).devices:
        assert len(lane.starts) == len(programs[lane.device].instructions)
        assert all(end >= start for start, end in zip(lane.starts, lane.ends, strict=True))


@given(drawn=distributed_plans(), rate=st.floats(1e6, 1e12), times=st.floats(1, 100))
def test_a_slower_link_never_makes_a_step_shorter(
    drawn: tuple[Graph, Plan], rate: float, times: float
):
    graph, plan = drawn
    fast, slow = (predict_plan(plan, graph, linked(each)) for each in (rate, rate / times))
    assert fast.step_seconds <= slow.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("sharding", "kind", "sent", "hops"),
    [
        # Four rings of two lie side by side among eight replicas, and share one link.
        ((2, 2), "unshard_weights", 4 * SQUARE_BYTES / 2, 1),
        ((8, 8), "unshard_weights", 7 * SQUARE_BYTES / 8, 7),
        ((2, 8), "all_gather_params", 2 * 3 * SQUARE_BYTES / 8, 3),
        ((1, 1), "reduce_grads", 2 * 7 * SQUARE_BYTES / 8, 14),
        # Scattered among four, then summed over the two blocks by four rings at once.
        ((1, 4), "reduce_grads", 2 * 3 * SQUARE_BYTES / 4 + 4 * 2 * SQUARE_BYTES / 4 / 2, 3 + 2),
    ],
)
def test_collectives_take_the_time_of_rings(
    sharding: tuple[int, int], kind: str, sent: float, hops: int
):
    machine = tiny_machine(devices=8)
    other = machine.model_copy(
        update={"device": machine.device.model_copy(update={"kind": "cuda"})}
    )
    plan = tiny_plan(GRAPH, machine, data=8, sharding=sharding)
    (link,) = machine.links
    instruction = Instruction(kind, 1)  # type: ignore[arg-type]
    seconds = CommunicationCosts(plan, GRAPH, other).seconds(instruction)
    assert seconds == pytest.approx(sent / link.rate + hops * link.latency)
    # CPUs also copy and sum what they scatter: 3 bytes for each, and its part of the result.
    moved = SQUARE_BYTES * (3 + 1 / 4) if kind == "reduce_grads" and sharding == (1, 4) else 0.0
    copying = moved / machine.device.traffic.at(max(moved, 1.0))
    assert CommunicationCosts(plan, GRAPH, machine).seconds(instruction) == pytest.approx(
        seconds + copying
    )


@pytest.mark.parametrize(
    ("optimizer", "sums"),
    [
        # Two norms of each weight; then squares over rows and columns beside two numbers, and one.
        ("lamb", (2,)),
        ("adafactor", (2 + 32 + 32, 1)),
    ],
)
def test_an_update_that_reads_norms_waits_for_one_ring_after_each_pass_but_the_last(
    optimizer: OtherOptimizer, sums: tuple[int, ...]
):
    plan = tiny_plan(GRAPH, MACHINE, data=4, sharding=(1, 4))
    plan = plan.model_copy(update={"optimizer": optimizer})
    (link,) = MACHINE.links
    seconds = CommunicationCosts(plan, GRAPH, MACHINE).seconds(Instruction("update", 1))
    ring = [2 * 3 * 4 * count / 4 / link.rate + 2 * 3 * link.latency for count in sums]
    assert seconds == pytest.approx(sum(ring))
    whole = plan.model_copy(update={"sharding": plan.sharding.model_copy(update={"optimizer": 1})})
    assert CommunicationCosts(whole, GRAPH, MACHINE).seconds(Instruction("update", 1)) == 0


def test_an_all_gather_waits_for_the_last_member_of_its_group():
    plan = tiny_plan(GRAPH, MACHINE, data=2, sharding=(2, 2), pipeline=2)
    lanes = simulate(plan, GRAPH, MACHINE, lower(plan, GRAPH)).devices
    for first, second in (lanes[:2], lanes[2:]):
        ends = [
            [
                end
                for kind, end in zip(lane.kinds, lane.ends, strict=True)
                if kind == "unshard_weights"
            ]
            for lane in (first, second)
        ]
        assert ends[0] == ends[1]
        assert len(ends[0]) == 2


def test_tied_weights_arrive_while_the_first_stage_computes():
    """Lent at the begin of the step, they are there before the last stage has anything to do."""
    graph = tiny_graph(layers=6, tied=True)
    machine = linked(1e11)
    tied, apart = (
        predict_plan(tiny_plan(each, machine, pipeline=2, micro=32, sequence=64), each, machine)
        for each in (graph, tiny_graph(layers=6, tied=False))
    )
    (link,) = machine.links
    handed = 2 * (link.latency + 64 * 32 * 4 / link.rate)
    assert tied.step_seconds < apart.step_seconds + handed


@pytest.mark.parametrize(
    ("kind", "layer", "sent", "hops"),
    [
        # All tokens are gathered before a block's product, and its sum is scattered after it.
        ("forward", 1, 2 * 3 * TOKENS_BYTES / 4, 2 * 3),
        ("backward", 1, 2 * 3 * TOKENS_BYTES / 4, 2 * 3),
        ("backward_weight", 1, 0, 0),
        # The rows that slices have found are summed.
        ("forward", 0, 2 * 3 * TOKENS_BYTES / 4, 2 * 3),
        # Gradients of the norm, which slices have whole, are summed over slices alone.
        ("reduce_grads", 1, 2 * 3 * 32 * 4 / 4, 2 * 3),
    ],
)
def test_tensor_parallel_collectives_take_the_time_of_rings_of_neighbours(
    kind: str, layer: int, sent: float, hops: int
):
    """Four neighbours share a fast link; all eight share a slow one."""
    machine = tiny_machine(devices=8)
    (slow,) = machine.links
    fast = slow.model_copy(update={"joins": 4, "rate": 1e10, "latency": 1e-6})
    machine = machine.model_copy(update={"links": (fast, slow)})
    plan = tiny_plan(CUT, machine, tensor=4, pipeline=2)
    seconds = CommunicationCosts(plan, CUT, machine).seconds(Instruction(kind, layer, 0))  # type: ignore[arg-type]
    assert seconds == pytest.approx(sent / fast.rate + hops * fast.latency)


def test_replicas_of_tensor_parallel_ranks_use_the_outer_links():
    machine = tiny_machine(devices=8)
    (slow,) = machine.links
    fast = slow.model_copy(update={"joins": 4, "rate": 1e10})
    machine = machine.model_copy(update={"links": (fast, slow)})
    plan = tiny_plan(CUT, machine, tensor=4, data=2, sharding=(2, 2))
    own = (32 * 32 // 4 + 32) * 4
    seconds = CommunicationCosts(plan, CUT, machine).seconds(Instruction("unshard_weights", 1))
    # Four rings of two lie side by side on the outer link.
    assert seconds == pytest.approx(4 * own / 2 / slow.rate + slow.latency)


def test_tensor_parallel_ranks_wait_for_each_other_in_passes_with_collectives():
    plan = tiny_plan(CUT, MACHINE, tensor=2, accumulation=2)
    lanes = simulate(plan, CUT, MACHINE, lower(plan, CUT)).devices
    ends = [
        [end for kind, end in zip(lane.kinds, lane.ends, strict=True) if kind == "forward"]
        for lane in lanes
    ]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 2 * CUT.layers


def test_sharded_layers_take_less_time_and_memory():
    """On links that take none."""
    machine = linked(1e30)
    link = machine.links[0].model_copy(update={"latency": 0.0})
    machine = machine.model_copy(update={"links": (link,)})
    prediction = [
        predict_plan(tiny_plan(CUT, machine, tensor=degree, micro=16), CUT, machine)
        for degree in (1, 2, 4)
    ]
    assert [one.by_term["matmul"] for one in prediction] == sorted(
        (one.by_term["matmul"] for one in prediction), reverse=True
    )
    peaks = [one.peaks[0].peak_bytes for one in prediction]
    assert peaks == sorted(set(peaks), reverse=True)
    assert len({one.model_flop for one in prediction}) == 1


@given(drawn=distributed_plans())
def test_devices_with_equal_programs_take_the_simulated_time(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    programs = lower(plan, graph)
    prediction = predict_plan(plan, graph, MACHINE, programs)
    spans = simulate_programs(
        plan, graph, MACHINE, InstructionCosts(plan, graph, MACHINE), programs
    )
    ends = (step_seconds(*each) for each in zip(programs, spans, strict=True))
    assert prediction.step_seconds == pytest.approx(max(ends))


def test_passes_without_tensor_parallelism_wait_for_the_weights_that_they_gather():
    """Two stages of two replicas each gather a layer's weights in both of its passes."""
    graph, machine = equal_blocks(4)
    link = machine.links[0].model_copy(update={"rate": 1e8})
    machine = machine.model_copy(
        update={"links": (link,), "stack": Stack(name="made-up", about="gathers in passes")}
    )
    whole = tiny_plan(graph, machine, pipeline=2, data=2, sharding=(2, 2))
    resharding = whole.sharding.model_copy(update={"reshard": True})
    plan = whole.model_copy(update={"sharding": resharding})
    costs = CommunicationCosts(plan, graph, machine)
    gathers = sum(
        costs.gather_seconds(Instruction(kind, layer))
        for layer in range(4)
        for kind in ("forward", "backward")
    )
    product = 2 * (2 * 16) * 32 * 32 / 1e9
    messages = 2 * costs.seconds(Instruction("send", 1, 0))
    step = predict_plan(plan, graph, machine).step_seconds
    assert gathers > product
    assert step == pytest.approx(12 * product + gathers + messages, rel=1e-6)
