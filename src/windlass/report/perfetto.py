"""Timelines as a trace file for ui.perfetto.dev and chrome://tracing.

Source: Trace Event Format (Google), the JSON object form. Each timeline is a process and each rank
a thread. Events of one thread must not overlap, so transfers between memory tiers that run beside
compute get threads of their own, as copy streams do in a profiler.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from windlass.program import BLOCKING_KINDS, MATCHING_RECEIVE, TRANSFER_KINDS
from windlass.report.figures.memory import memory_over_time
from windlass.schema import DeviceTimeline, Timeline

_TRANSFERS = frozenset(TRANSFER_KINDS)
_COMMUNICATION = frozenset((*BLOCKING_KINDS, *MATCHING_RECEIVE))
_NANOSECONDS = 1e9


def perfetto_trace(timelines: Mapping[str, Timeline]) -> str:
    """The JSON text of a trace: one complete event (`ph` = X) for each instruction.

    Times are microseconds since the step began, to a nanosecond. A process is numbered from 1 in
    the order of `timelines`. A thread is numbered `rank + 1`, because Perfetto merges thread 0 with
    the thread that has the number of its process; threads of transfers get the numbers after all
    ranks. Ranks with known memory also get a counter of device memory.

    Args:
        timelines: the name of each process, such as `predicted` and `measured`, and its timeline.

    Returns:
        One JSON object, to be written as a `.json` file.
    """
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items(), 1)
        for event in _process(process, name, timeline)
    ]
    trace = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False)


def _process(process: int, name: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", process, process, name=name)
    yield _metadata("process_sort_index", process, process, sort_index=process)
    extra_threads = count(2 + max((lane.device for lane in timeline.devices), default=0))
    positions = count()
    for lane in timeline.devices:
        for track, (title, indices) in enumerate(_tracks(lane)):
            thread = lane.device + 1 if track == 0 else next(extra_threads)
            yield _metadata("thread_name", process, thread, name=title)
            yield _metadata("thread_sort_index", process, thread, sort_index=next(positions))
            yield from (_complete(process, thread, lane, index) for index in indices)
        yield from _memory_counter(process, lane)


def _metadata(event: str, process: int, thread: int, **args: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": process, "tid": thread, "args": args}


def _complete(process: int, thread: int, lane: DeviceTimeline, index: int) -> dict[str, Any]:
    kind, layer, micro = lane.kinds[index], lane.layers[index], lane.micro_batches[index]
    start, end = _span(lane, index)
    args = {"layer": layer, "micro_batch": micro}
    return {
        "ph": "X", "name": kind, "cat": _category(kind), "pid": process, "tid": thread,
        "ts": start / 1000, "dur": (end - start) / 1000,
        "args": {name: value for name, value in args.items() if value is not None},
    }  # fmt: skip


def _memory_counter(process: int, lane: DeviceTimeline) -> Iterator[dict[str, Any]]:
    name = f"rank {lane.device} device memory"
    for seconds, nbytes in memory_over_time(lane) if lane.memory_bytes else ():
        yield {
            "ph": "C", "name": name, "pid": process, "tid": lane.device + 1,
            "ts": round(seconds * _NANOSECONDS) / 1000, "args": {"bytes": nbytes},
        }  # fmt: skip


def _category(kind: str) -> str:
    if kind in _COMMUNICATION:
        return "communication"
    return "transfer" if kind in _TRANSFERS else "compute"


def _tracks(lane: DeviceTimeline) -> Iterator[tuple[str, list[int]]]:
    """A title and the instructions of each thread of a rank, of which no two overlap."""
    name = f"rank {lane.device}"
    everything = _without_overlap(lane, range(len(lane.kinds)))
    if len(everything) <= 1:
        yield name, everything[0] if everything else []
        return
    transfers = [index for index, kind in enumerate(lane.kinds) if kind in _TRANSFERS]
    others = [index for index, kind in enumerate(lane.kinds) if kind not in _TRANSFERS]
    for title, indices in ((name, others), (f"{name} transfers", transfers)):
        for number, track in enumerate(_without_overlap(lane, indices) or [[]], 1):
            yield title if number == 1 else f"{title} ({number})", track


def _without_overlap(lane: DeviceTimeline, indices: Sequence[int]) -> list[list[int]]:
    """Instructions in order of time, each in the first list that is free when it starts."""
    tracks: list[list[int]] = []
    free_from: list[int] = []
    for start, end, index in sorted((*_span(lane, index), index) for index in indices):
        track = next((i for i, end_time in enumerate(free_from) if end_time <= start), len(tracks))
        if track == len(tracks):
            tracks.append([])
            free_from.append(0)
        tracks[track].append(index)
        free_from[track] = end
    return tracks


def _span(lane: DeviceTimeline, index: int) -> tuple[int, int]:
    """Start and end in whole nanoseconds, the resolution of a trace viewer."""
    return round(lane.starts[index] * _NANOSECONDS), round(lane.ends[index] * _NANOSECONDS)
