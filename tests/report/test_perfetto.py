"""A trace file holds every instruction of a timeline at its time, in the form that viewers read."""

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st

from factories import tiny_graph, tiny_machine, tiny_plan
from report.made_runs import timeline as made_timeline
from windlass.cost.simulator.event_simulator import simulate
from windlass.program.lowering.lower import lower
from windlass.report.perfetto import perfetto_trace
from windlass.schema.plan import Offload
from windlass.schema.prediction import DeviceTimeline, Timeline

HALF_A_NANOSECOND = 0.5e-3 + 1e-9
"""In microseconds: how far a rounded time may lie from the exact one."""


def events(text: str, phase: str) -> list[dict[str, Any]]:
    return [event for event in json.loads(text)["traceEvents"] if event["ph"] == phase]


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Up to three ranks with instructions that may overlap."""
    lanes = []
    for rank in range(draw(st.integers(0, 3))):
        spans = draw(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 10)), max_size=12))
        count = len(spans)
        kinds = st.sampled_from(["forward", "send", "prefetch_weights", "update"])
        lanes.append(
            DeviceTimeline(
                device=rank,
                kinds=tuple(draw(kinds) for _ in spans),
                layers=tuple(draw(st.none() | st.integers(0, 9)) for _ in spans),
                micro_batches=tuple(draw(st.none() | st.integers(0, 9)) for _ in spans),
                starts=tuple(start for start, _ in spans),
                ends=tuple(start + length for start, length in spans),
                memory_bytes=tuple(float(index) for index in range(count)),
            )
        )
    return Timeline(predicted=True, devices=tuple(lanes))


@given(timeline=timelines())
def test_the_timeline_can_be_read_back_from_the_trace(timeline: Timeline):
    text = perfetto_trace({"predicted": timeline})
    rank_of = {
        event["tid"]: int(event["args"]["name"].split()[1])
        for event in events(text, "M")
        if event["name"] == "thread_name"
    }
    found = sorted(
        (rank_of[event["tid"]], event["ts"], event["ts"] + event["dur"], event["name"],
         str(event["args"]))
        for event in events(text, "X")
    )  # fmt: skip
    expected = []
    for lane in timeline.devices:
        for kind, layer, micro, start, end in zip(
            lane.kinds, lane.layers, lane.micro_batches, lane.starts, lane.ends, strict=True
        ):
            args = {} if layer is None else {"layer": layer}
            args |= {} if micro is None else {"micro_batch": micro}
            times = (round(start * 1e9) / 1e3, round(end * 1e9) / 1e3)
            assert times == pytest.approx(
                (start * 1e6, end * 1e6), abs=HALF_A_NANOSECOND, rel=1e-15
            )
            expected.append((lane.device, *times, kind, str(args)))
    for one, other in zip(found, sorted(expected), strict=True):
        assert one[0] == other[0]
        assert one[1:3] == pytest.approx(other[1:3], abs=1e-6)
    assert sorted((e[0], *e[3:]) for e in found) == sorted((e[0], *e[3:]) for e in expected)


@given(timeline=timelines())
def test_events_of_one_thread_never_overlap(timeline: Timeline):
    threads: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in events(perfetto_trace({"predicted": timeline}), "X"):
        start, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
        threads[event["tid"]].append((start, start + length))
    for spans in threads.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(sorted(spans)))


def test_processes_and_threads_have_names_and_an_order():
    both = {"predicted": made_timeline(predicted=True), "measured": made_timeline(predicted=False)}
    named = {
        (event["name"], event["pid"]): event["args"] for event in events(perfetto_trace(both), "M")
    }
    assert named["process_name", 1] == {"name": "predicted"}
    assert named["process_name", 2] == {"name": "measured"}
    assert named["process_sort_index", 2] == {"sort_index": 2}
    assert named["thread_name", 1] == {"name": "rank 0"}


@given(timeline=timelines())
def test_each_rank_has_a_thread_and_none_has_the_number_0(timeline: Timeline):
    # Perfetto reads thread 0 as the thread that has the number of its process.
    text = perfetto_trace({"predicted": timeline})
    named = [event for event in events(text, "M") if event["name"] == "thread_name"]
    threads = {event["args"]["name"]: event["tid"] for event in named}
    assert len(set(threads.values())) == len(named)
    assert all(threads[f"rank {lane.device}"] == lane.device + 1 for lane in timeline.devices)


def test_every_event_lies_within_its_step_and_has_the_keys_that_viewers_need():
    both = {"predicted": made_timeline(predicted=True), "measured": made_timeline(predicted=False)}
    text = perfetto_trace(both)
    for process, timeline in enumerate(both.values(), 1):
        step = max(timeline.devices[0].ends) * 1e6
        drawn = [event for event in events(text, "X") if event["pid"] == process]
        assert len(drawn) == len(timeline.devices[0].kinds)
        for event in drawn:
            assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= step + HALF_A_NANOSECOND
            assert set(event) == {"ph", "name", "cat", "pid", "tid", "ts", "dur", "args"}


def test_device_memory_is_a_counter_where_it_is_known():
    timeline = made_timeline(predicted=True)
    text = perfetto_trace({"predicted": timeline, "measured": made_timeline(predicted=False)})
    counters = events(text, "C")
    assert {event["pid"] for event in counters} == {1}
    assert {event["name"] for event in counters} == {"rank 0 device memory"}
    highest = max(event["args"]["bytes"] for event in counters)
    assert highest == max(timeline.devices[0].memory_bytes)
    times = [event["ts"] for event in counters]
    assert times == sorted(times)


def test_transfers_beside_compute_have_a_thread_of_their_own():
    graph, machine = tiny_graph(layers=4, tied=False), tiny_machine(host="1 GiB")
    plan = tiny_plan(
        graph, machine, phases=((0, 3), (3, 6)),
        offload=Offload(parameters="host", gradients="host", optimizer="host"),
    )  # fmt: skip
    timeline = simulate(plan, graph, machine, lower(plan, graph))
    text = perfetto_trace({"predicted": timeline})
    names = {
        event["tid"]: event["args"]["name"]
        for event in events(text, "M")
        if event["name"] == "thread_name"
    }
    threads = {event["name"]: names[event["tid"]] for event in events(text, "X")}
    assert threads["forward"] == "rank 0"
    assert threads["prefetch_weights"].startswith("rank 0 transfers")
    assert len(names) == len(set(names.values()))
