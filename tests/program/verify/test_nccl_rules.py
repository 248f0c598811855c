"""Programs under NCCL's rules: none deadlocks, the communicators of before did."""

import random
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import given, settings, strategies as st

from factories import HOST_OFFLOAD, late_tied_graph, tiny_graph, tiny_machine, tiny_plan
from program.distributed_plans import distributed_plans
from program.verify.random_scheduler import ends_under_random_scheduling
from windlass.errors import PlanError
from windlass.program.communication_groups import (
    Communicator,
    PeerMap,
    communicator_partitions,
)
from windlass.program.instruction import MATCHING_RECEIVE, Program
from windlass.program.lowering.lower import lower
from windlass.program.verify.communication_trace import (
    CommunicationEvent,
    CommunicationTraces,
    _Tracer,
    communication_traces,
)
from windlass.program.verify.deadlock import simulate_buffered
from windlass.program.verify.nccl_rules import NcclRules, simulate_nccl
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

MACHINE = tiny_machine(host="1 GiB", devices=64)
ONE_QUEUE = NcclRules(one_queue=True)
LAZY = NcclRules(made_before=False, host_waits=False)
"""Communicators made by their first message; the host runs ahead, as it does on a GPU."""
AHEAD = NcclRules(host_waits=False)

MESSAGES = {*MATCHING_RECEIVE, *MATCHING_RECEIVE.values()}

Carriers = Mapping[Communicator, Hashable]


def directed(plan: Plan, graph: Graph) -> Carriers:
    """A communicator for each direction and channel, as the runtime makes them."""
    partitions = communicator_partitions(plan, graph)
    return {item: item for partition in partitions for item in partition if item.is_channel}


def kind_of(communicator: Communicator) -> str:
    return communicator.use.partition(" of layer")[0]


def pairs(plan: Plan, graph: Graph) -> Carriers:
    """As before: a group for each kind of message, in which torch makes a communicator a pair."""
    return {item: (kind_of(item), frozenset(item.ranks)) for item in directed(plan, graph)}


def one_group(plan: Plan, graph: Graph) -> Carriers:
    """As before, with `device_id` given: one communicator of all ranks for each kind of message."""
    return {item: kind_of(item) for item in directed(plan, graph)}


def ends(
    traces: CommunicationTraces,
    carriers: Carriers,
    rules: NcclRules = NcclRules(),  # noqa: B008  a frozen value
) -> bool:
    try:
        simulate_nccl(traces, carriers, rules)
    except PlanError:
        return False
    return True


def ends_buffered(traces: CommunicationTraces) -> bool:
    try:
        simulate_buffered(traces)
    except PlanError:
        return False
    return True


def resident_plans(*, tied: bool) -> Iterator[tuple[Graph, Plan]]:
    """Each schedule with 2 to 8 stages, 1 to 6 model chunks a stage and 1 to 17 micro-batches."""
    for pipeline, schedule in product(range(2, 9), ("gpipe", "1f1b", "zero-bubble", "interleaved")):
        interleaved = schedule == "interleaved"
        for chunks in range(2, 7) if interleaved else (1,):
            graph = tiny_graph(layers=pipeline * chunks, tied=tied)
            few = {pipeline, 2 * pipeline}
            for micro_batches in few if interleaved else {1, 2, pipeline - 1, 2 * pipeline + 1}:
                yield graph, tiny_plan(
                    graph, MACHINE, pipeline=pipeline, schedule=schedule, virtual_stages=chunks,
                    accumulation=micro_batches,
                )  # fmt: skip


@pytest.mark.parametrize("tied", [False, True])
def test_no_schedule_deadlocks_and_the_communicators_of_before_did_where_weights_are_tied(
    tied: bool,
):
    plans = deadlocks_of_pairs = deadlocks_of_one_group = 0
    for graph, plan in resident_plans(tied=tied):
        traces = communication_traces(lower(plan, graph), plan, graph)
        simulate_buffered(traces)
        for rules in (NcclRules(), ONE_QUEUE):
            simulate_nccl(traces, directed(plan, graph), rules)
        interleaved = plan.parallel.schedule == "interleaved"
        two_ways = interleaved and plan.parallel.pipeline == 2
        assert ends(traces, pairs(plan, graph), LAZY) == (not tied and not two_ways)
        assert ends(traces, one_group(plan, graph), AHEAD) == (not interleaved)
        plans += 1
        deadlocks_of_pairs += tied or two_ways
        deadlocks_of_one_group += interleaved
    assert (plans, deadlocks_of_one_group) == (148, 70)
    assert deadlocks_of_pairs == (148 if tied else 10)


def phased_plans() -> Iterator[tuple[Graph, Plan]]:
    """Pipelines of 2 to 4 stages, weights on the host: 2 phases each, and 1 or 2 in the last."""
    for pipeline, last, micro_batches in product((2, 3, 4), (1, 2), (1, 2, 4)):
        count = 2 * (pipeline - 1) + last
        for graph in (
            tiny_graph(layers=count, tied=False),
            tiny_graph(layers=count, tied=True),
            late_tied_graph(before=1, between=count),
        ):
            ends = [round(index * graph.layers / count) for index in range(count + 1)]
            phases = list(pairwise(ends))
            stages = tuple(tuple(phases[index : index + 2]) for index in range(0, count, 2))
            yield graph, tiny_plan(
                graph, MACHINE, pipeline=pipeline, offload=HOST_OFFLOAD, stages=stages,
                schedule="gpipe", accumulation=micro_batches,
            )  # fmt: skip


def test_phases_in_a_pipeline_do_not_deadlock_where_each_stream_has_a_queue():
    plans = with_one_queue = 0
    for graph, plan in phased_plans():
        traces = communication_traces(lower(plan, graph), plan, graph)
        simulate_buffered(traces)
        simulate_nccl(traces, directed(plan, graph))
        plans += 1
        with_one_queue += not ends(traces, directed(plan, graph), ONE_QUEUE)
    assert plans == 54
    assert with_one_queue > 0  # so the runtime asks CUDA for a queue for each stream


@given(drawn=distributed_plans())
def test_tensor_and_data_parallel_ranks_and_offload_do_not_deadlock(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    traces = communication_traces(lower(plan, graph), plan, graph)
    simulate_buffered(traces)
    simulate_nccl(traces, directed(plan, graph))
    if not plan.is_offloaded("parameters"):
        simulate_nccl(traces, directed(plan, graph), ONE_QUEUE)


def by_stage_and_by_rank(
    programs: Sequence[Program], plan: Plan, graph: Graph
) -> tuple[CommunicationTraces, CommunicationTraces]:
    """The events of the first rank of each stage, and those of every rank."""
    devices = tuple(range(plan.parallel.devices))
    tracer = _Tracer(plan, graph, devices, is_uniform=False)
    every = {device: tracer.trace(programs[device]) for device in devices}
    return communication_traces(programs, plan, graph), every


@settings(max_examples=60)
@given(drawn=distributed_plans())
def test_the_first_rank_of_a_stage_stands_for_all_of_its_ranks(drawn: tuple[Graph, Plan]):
    graph, plan = drawn
    few, every = by_stage_and_by_rank(lower(plan, graph), plan, graph)
    for carriers, rules in ((directed, NcclRules()), (directed, ONE_QUEUE), (pairs, LAZY)):
        of_plan = carriers(plan, graph)
        assert ends(few, of_plan, rules) == ends(every, of_plan, rules)


@settings(max_examples=60)
@given(data=st.data(), drawn=distributed_plans())
def test_a_fault_of_a_stage_is_found_by_its_first_rank_if_by_all(
    data: st.DataObject, drawn: tuple[Graph, Plan]
):
    graph, plan = drawn
    programs = list(lower(plan, graph))
    width = plan.parallel.devices // plan.parallel.pipeline
    begin = width * data.draw(st.integers(0, plan.parallel.pipeline - 1))
    instructions = list(programs[begin].instructions)
    peers = PeerMap(plan, graph)
    met = [
        index
        for index, each in enumerate(instructions)
        if each.kind in MESSAGES or peers.is_collective(each)
    ]
    first, second = (data.draw(st.sampled_from(met)) for _ in range(2))
    instructions[first], instructions[second] = instructions[second], instructions[first]
    broken = tuple(instructions)
    for device in range(begin, begin + width):
        programs[device] = programs[device].model_copy(update={"instructions": broken})
    few, every = by_stage_and_by_rank(programs, plan, graph)
    assert len(few) == plan.parallel.pipeline
    assert ends_buffered(few) == ends_buffered(every)
    assert ends(few, directed(plan, graph)) == ends(every, directed(plan, graph))


def made(**choice: object) -> tuple[dict[int, list[CommunicationEvent]], Plan, Graph]:
    graph = tiny_graph(layers=6, tied=True)
    plan = tiny_plan(graph, MACHINE, pipeline=2, **choice)
    traces = communication_traces(lower(plan, graph), plan, graph)
    return {device: list(events) for device, events in traces.items()}, plan, graph


SCHEDULES = ({"schedule": "1f1b"}, {"schedule": "interleaved", "virtual_stages": 3})


@given(data=st.data(), choice=st.sampled_from(SCHEDULES))
def test_a_message_that_one_end_lost_is_always_found(
    data: st.DataObject, choice: Mapping[str, object]
):
    traces, plan, graph = made(accumulation=4, **choice)
    events = traces[data.draw(st.integers(0, 1))]
    messages = [index for index, event in enumerate(events) if event.communicator]
    del events[data.draw(st.sampled_from(messages))]
    with pytest.raises(PlanError):
        simulate_nccl(traces, directed(plan, graph))


@given(data=st.data(), choice=st.sampled_from(SCHEDULES))
def test_two_receives_in_another_order_are_always_found(
    data: st.DataObject, choice: Mapping[str, object]
):
    traces, plan, graph = made(accumulation=4, **choice)
    device = data.draw(st.integers(0, 1))
    events = traces[device]
    receives: dict[Communicator, list[int]] = {}
    for index, event in enumerate(events):
        if event.communicator and not event.sends:
            receives.setdefault(event.communicator, []).append(index)
    several = [indices for indices in receives.values() if len(indices) > 1]
    first, second = sorted(
        data.draw(st.permutations(data.draw(st.sampled_from(several))).map(lambda each: each[:2]))
    )
    events[first], events[second] = events[second], events[first]
    with pytest.raises(PlanError, match=f"device {device}, instruction .* sends layer"):
        simulate_nccl(traces, directed(plan, graph))


@settings(max_examples=150)
@given(data=st.data(), drawn=distributed_plans(), seed=st.integers(0, 2**32))
def test_hosts_and_streams_that_run_in_any_order_come_to_the_same_verdict(
    data: st.DataObject, drawn: tuple[Graph, Plan], seed: int
):
    graph, plan = drawn
    lowered = communication_traces(lower(plan, graph), plan, graph)
    traces = {device: list(events) for device, events in lowered.items()}
    events = traces[data.draw(st.sampled_from(sorted(traces)))]
    for _ in range(data.draw(st.integers(0, 2))):  # some events earlier or later than they are
        if events:
            index = st.integers(0, len(events) - 1)
            events.insert(data.draw(index), events.pop(data.draw(index)))
    carriers = data.draw(st.sampled_from([directed, pairs, one_group]))(plan, graph)
    rules = NcclRules(*(data.draw(st.booleans()) for _ in NcclRules._fields))
    chance = random.Random(seed)
    assert ends_under_random_scheduling(traces, carriers, rules, chance) == ends(
        traces, carriers, rules
    )
