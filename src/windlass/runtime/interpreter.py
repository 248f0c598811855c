"""Interpreter: runs a program's instructions in order and times every one of them."""

import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from windlass.program import BLOCKING_KINDS, InstructionKind, Program
from windlass.schema import DeviceTimeline, Timeline
from windlass.torch_ext import Device

Handler = Callable[[int, int], None]
"""Executes one instruction for (layer, micro-batch); 0 where the instruction names none."""

Handlers = Mapping[InstructionKind, Handler]
"""The handler of each instruction kind."""

HandlerCall = tuple[Handler, int, int]

Seconds = npt.NDArray[np.floating[Any]]
"""`Float[instruction]`."""


OTHER_WORK_SLOT = 2
"""The heartbeat slot that counts work between instructions: saving, evaluating, compiling."""


class HeartbeatSlots(Protocol):
    """Where a rank writes its progress.

    Slot 0 is the step and slot 1 the index of the current instruction.
    """

    def __getitem__(self, slot: int, /) -> int: ...

    def __setitem__(self, slot: int, value: int, /) -> None: ...


class InstructionTimer(Protocol):
    """Runs handler calls in order and records when each began and ended."""

    def run(self, calls: Sequence[HandlerCall]) -> None:
        """Runs all calls of one step."""

    def start_end_seconds(self) -> tuple[Seconds, Seconds]:
        """Start and end times of the last step's calls, in seconds after the first start."""

    def finished_calls(self, submitted: int) -> int:
        """How many of the step's first `submitted` calls the device has finished.

        Another thread may ask while a step runs.
        """


class Interpreter:
    """Runs a rank's program once per step, and times it.

    Args:
        heartbeat: its slot 1 is set to the index of each instruction as it begins; None if no
            watchdog reads it.

    Raises:
        KeyError: an instruction kind has no handler.
    """

    def __init__(
        self,
        program: Program,
        handlers: Handlers,
        timer: InstructionTimer,
        heartbeat: HeartbeatSlots | None = None,
    ) -> None:
        self._program = program
        self._calls = tuple(
            (handlers[kind], layer or 0, micro or 0) for kind, layer, micro in program.instructions
        )
        if heartbeat is not None:
            self._calls = tuple(
                (_with_heartbeat(handler, index, heartbeat), layer, micro)
                for index, (handler, layer, micro) in enumerate(self._calls)
            )
        self._timer = timer
        self._times: tuple[Seconds, Seconds] | None = None
        kinds = [instruction.kind for instruction in program.instructions]
        self._kinds = tuple(dict.fromkeys(kinds))
        self._kind_of_call = np.array([self._kinds.index(kind) for kind in kinds], dtype=np.intp)
        self._calls_of_kind = np.bincount(self._kind_of_call, minlength=len(self._kinds))

    def run(self) -> None:
        """Runs one step."""
        self._run(self._calls)

    def _run(self, calls: Sequence[HandlerCall]) -> None:
        self._times = None
        self._timer.run(calls)

    def _start_end_seconds(self) -> tuple[Seconds, Seconds]:
        """The times of the last step, which a timer may have to ask a device for."""
        if self._times is None:
            self._times = self._timer.start_end_seconds()
        return self._times

    def run_sampled(self, measure: Callable[[], int]) -> tuple[float, ...]:
        """Runs one step and returns `measure()`, e.g. memory in bytes, after each instruction."""
        samples = array("d", bytes(8 * len(self._calls)))

        def sampled(index: int, handler: Handler) -> Handler:
            def call(layer: int, micro: int) -> None:
                handler(layer, micro)
                samples[index] = measure()

            return call

        calls = [
            (sampled(index, handler), layer, micro)
            for index, (handler, layer, micro) in enumerate(self._calls)
        ]
        self._run(calls)
        return tuple(samples)

    def step_seconds(self) -> float:
        """Seconds of the last step, from its first instruction's start to its last one's end."""
        _, ends = self._start_end_seconds()
        return float(ends[-1]) if len(ends) else 0.0

    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds that the last step spent in each instruction kind."""
        starts, ends = self._start_end_seconds()
        return dict(zip(self._kinds, self._sum_by_kind(ends - starts), strict=True))

    def arrivals_by_kind(self) -> dict[str, float]:
        """When this rank came to the instructions that wait for other ranks, by kind.

        It is the mean start of the kind's instructions in the last step, in seconds after the
        step's. Ranks end a step together. So, where ranks do the same work, the differences of
        these numbers say which rank lets the others wait, without clocks that agree.
        """
        starts, _ = self._start_end_seconds()
        sums = zip(self._kinds, self._sum_by_kind(starts), self._calls_of_kind, strict=True)
        return {kind: total / int(count) for kind, total, count in sums if kind in BLOCKING_KINDS}

    def _sum_by_kind(self, seconds: Seconds) -> list[float]:
        sums = np.bincount(self._kind_of_call, weights=seconds, minlength=len(self._kinds))
        totals: list[float] = sums.tolist()
        return totals

    def timeline(self, memory_bytes: tuple[float, ...] = ()) -> Timeline:
        """The measured timeline of the last step."""
        starts, ends = self._start_end_seconds()
        lane = DeviceTimeline(
            device=self._program.device,
            kinds=tuple(i.kind for i in self._program.instructions),
            layers=tuple(i.layer for i in self._program.instructions),
            micro_batches=tuple(i.micro_batch for i in self._program.instructions),
            starts=tuple(starts.tolist()),
            ends=tuple(ends.tolist()),
            memory_bytes=memory_bytes,
        )
        return Timeline(predicted=False, devices=(lane,))


def _with_heartbeat(handler: Handler, index: int, heartbeat: HeartbeatSlots) -> Handler:
    """A handler that first writes its instruction's index to the heartbeat."""

    def call(layer: int, micro: int) -> None:
        heartbeat[1] = index
        handler(layer, micro)

    return call


def timer_for(device: Device, length: int) -> InstructionTimer:
    """The timer that measures handlers correctly on a device.

    Args:
        device: the device that computes; handlers only enqueue on an asynchronous one, so its
            events are timed.
    """
    return EventTimer(device, length) if device.is_asynchronous else HostTimer(length)


class HostTimer:
    """Reads the host clock before and after each call."""

    def __init__(self, length: int) -> None:
        self._starts = array("q", bytes(8 * length))
        self._ends = array("q", bytes(8 * length))

    def run(self, calls: Sequence[HandlerCall]) -> None:
        """Runs all calls of one step."""
        now, starts, ends = time.perf_counter_ns, self._starts, self._ends
        index = 0
        for handler, layer, micro in calls:
            starts[index] = now()
            handler(layer, micro)
            ends[index] = now()
            index += 1  # noqa: SIM113  enumerate would build one more tuple per call

    def finished_calls(self, submitted: int) -> int:
        """All of them: a call that has returned is done."""
        return submitted

    def start_end_seconds(self) -> tuple[Seconds, Seconds]:
        """Start and end times of the last step's calls, in seconds after the first start."""
        first = self._starts[0] if self._starts else 0
        starts, ends = (np.array(times, dtype=np.int64) for times in (self._starts, self._ends))
        return (starts - first) * 1e-9, (ends - first) * 1e-9


class EventTimer:
    """Records an event before and after each call, and synchronizes once, at the end."""

    def __init__(self, device: Device, length: int) -> None:
        self._device = device
        self._starts = [device.new_event(timing=True) for _ in range(length)]
        self._ends = [device.new_event(timing=True) for _ in range(length)]

    def run(self, calls: Sequence[HandlerCall]) -> None:
        """Runs all calls of one step and waits for the device."""
        stream = self._device.current_stream()
        for (handler, layer, micro), start, end in zip(
            calls, self._starts, self._ends, strict=True
        ):
            start.record(stream)
            handler(layer, micro)
            end.record(stream)
        stream.synchronize()

    def finished_calls(self, submitted: int) -> int:
        """How many of the step's first `submitted` calls the device has finished."""
        return bisect_left(range(submitted), True, key=lambda index: not self._ends[index].query())

    def start_end_seconds(self) -> tuple[Seconds, Seconds]:
        """Start and end times of the last step's calls, in seconds after the first start."""
        first = self._starts[0] if self._starts else None
        starts, ends = (
            np.array(
                [first.elapsed_time(event) * 1e-3 for event in events] if first else [],
                dtype=np.float64,
            )
            for events in (self._starts, self._ends)
        )
        return starts, ends
