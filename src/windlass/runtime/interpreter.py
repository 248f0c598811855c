"""Interpreter: runs a program's instructions in order and times every one of them."""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from windlass.program import InstructionKind, Program
from windlass.schema import DeviceTimeline, Timeline

Handler = Callable[[int, int], None]
"""Executes one instruction for (layer, micro-batch); 0 where the instruction names none."""

Handlers = Mapping[InstructionKind, Handler]
"""The handler of each instruction kind."""

HandlerCall = tuple[Handler, int, int]


class HeartbeatSlots(Protocol):
    """Where a rank writes its progress.

    Slot 0 is the step, slot 1 the index of the current instruction, and slot 2 counts work other
    than instructions: saving and evaluating.
    """

    def __getitem__(self, slot: int, /) -> int: ...

    def __setitem__(self, slot: int, value: int, /) -> None: ...


class InstructionTimer(Protocol):
    """Runs handler calls in order and records when each began and ended."""

    def run(self, calls: Sequence[HandlerCall]) -> None:
        """Runs all calls of one step."""

    def start_end_seconds(self) -> tuple[Sequence[float], Sequence[float]]:
        """Start and end times of the last step's calls, in seconds after the first start."""


class Interpreter:
    """Runs a rank's program once per step, and times it.

    Args:
        program: the instructions of one step on one rank.
        handlers: a handler for each instruction kind in the program.
        timer: `timer_for` the device.
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

    def run(self) -> None:
        """Runs one step."""
        self._timer.run(self._calls)

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
        self._timer.run(calls)
        return tuple(samples)

    def step_seconds(self) -> float:
        """Seconds of the last step, from its first instruction's start to its last one's end."""
        _, ends = self._timer.start_end_seconds()
        return ends[-1] if len(ends) else 0.0

    def seconds_by_kind(self) -> dict[str, float]:
        """Seconds that the last step spent in each instruction kind."""
        total: dict[str, float] = {}
        starts, ends = self._timer.start_end_seconds()
        for instruction, start, end in zip(self._program.instructions, starts, ends, strict=True):
            total[instruction.kind] = total.get(instruction.kind, 0.0) + end - start
        return total

    def timeline(self, memory_bytes: tuple[float, ...] = ()) -> Timeline:
        """The measured timeline of the last step.

        Args:
            memory_bytes: result of `run_sampled`, if the step ran under it.
        """
        starts, ends = self._timer.start_end_seconds()
        lane = DeviceTimeline(
            device=self._program.device,
            kinds=tuple(i.kind for i in self._program.instructions),
            layers=tuple(i.layer for i in self._program.instructions),
            micro_batches=tuple(i.micro_batch for i in self._program.instructions),
            starts=tuple(starts),
            ends=tuple(ends),
            memory_bytes=memory_bytes,
        )
        return Timeline(predicted=False, devices=(lane,))


def _with_heartbeat(handler: Handler, index: int, heartbeat: HeartbeatSlots) -> Handler:
    """A handler that first writes its instruction's index to the heartbeat."""

    def call(layer: int, micro: int) -> None:
        heartbeat[1] = index
        handler(layer, micro)

    return call


def timer_for(device: torch.device, length: int) -> InstructionTimer:
    """The timer that measures handlers correctly on a device.

    Args:
        device: the device that computes; on CUDA handlers only enqueue, so events are timed.
        length: number of instructions in one step.
    """
    return CudaEventTimer(device, length) if device.type == "cuda" else HostTimer(length)


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

    def start_end_seconds(self) -> tuple[Sequence[float], Sequence[float]]:
        """Start and end times of the last step's calls, in seconds after the first start."""
        first = self._starts[0] if self._starts else 0
        return (
            [(nanoseconds - first) * 1e-9 for nanoseconds in self._starts],
            [(nanoseconds - first) * 1e-9 for nanoseconds in self._ends],
        )


class CudaEventTimer:
    """Records a CUDA event before and after each call, and synchronizes once, at the end."""

    def __init__(self, device: torch.device, length: int) -> None:
        self._device = device
        self._starts = [torch.cuda.Event(enable_timing=True) for _ in range(length)]
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(length)]

    def run(self, calls: Sequence[HandlerCall]) -> None:
        """Runs all calls of one step and waits for the device."""
        stream = torch.cuda.current_stream(self._device)
        for (handler, layer, micro), start, end in zip(
            calls, self._starts, self._ends, strict=True
        ):
            start.record(stream)
            handler(layer, micro)
            end.record(stream)
        stream.synchronize()

    def start_end_seconds(self) -> tuple[Sequence[float], Sequence[float]]:
        """Start and end times of the last step's calls, in seconds after the first start."""
        if not self._starts:
            return [], []
        first = self._starts[0]
        return (
            [first.elapsed_time(event) * 1e-3 for event in self._starts],
            [first.elapsed_time(event) * 1e-3 for event in self._ends],
        )
