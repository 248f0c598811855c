"""The interpreter: runs a program's instructions in order and times every one of them."""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from windlass.program.instruction import Kind, Program
from windlass.runtime.distributed.heartbeat import Marks
from windlass.schema.prediction import DeviceTimeline, Timeline

Handler = Callable[[int, int], None]
"""Does one instruction for (layer, micro-batch); 0 where the instruction names none."""

Call = tuple[Handler, int, int]


class Clock(Protocol):
    """Runs calls in order and keeps when each began and ended."""

    def run(self, calls: Sequence[Call]) -> None:
        """Runs all calls of one step."""

    def spans(self) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds at which each call of the last step began and ended, from the first's begin."""


class Interpreter:
    """A program with its handlers looked up and its clock wound.

    Args:
        program: of one step on one device.
        handlers: one for each kind of instruction in the program.
        clock: `clock_for` the device.
        beat: whose second number is set to each instruction's index as it begins; None for nobody
            watches.

    Raises:
        KeyError: a kind without a handler.
    """

    def __init__(
        self,
        program: Program,
        handlers: Mapping[Kind, Handler],
        clock: Clock,
        beat: Marks | None = None,
    ) -> None:
        self._program = program
        self._calls = tuple(
            (handlers[kind], layer or 0, micro or 0) for kind, layer, micro in program.instructions
        )
        if beat is not None:
            self._calls = tuple(
                (_beating(handler, index, beat), layer, micro)
                for index, (handler, layer, micro) in enumerate(self._calls)
            )
        self._clock = clock

    def run(self) -> None:
        """Runs one step."""
        self._clock.run(self._calls)

    def sample(self, measure: Callable[[], int]) -> tuple[float, ...]:
        """Runs one step and takes `measure`, such as memory in bytes, after each instruction."""
        taken = array("d", bytes(8 * len(self._calls)))

        def sampled(index: int, handler: Handler) -> Handler:
            def call(layer: int, micro: int) -> None:
                handler(layer, micro)
                taken[index] = measure()

            return call

        calls = [
            (sampled(index, handler), layer, micro)
            for index, (handler, layer, micro) in enumerate(self._calls)
        ]
        self._clock.run(calls)
        return tuple(taken)

    def seconds(self) -> float:
        """From the first instruction's begin to the last one's end."""
        _, ends = self._clock.spans()
        return ends[-1] if len(ends) else 0.0

    def by_kind(self) -> dict[str, float]:
        """Seconds of the last step by instruction kind."""
        total: dict[str, float] = {}
        starts, ends = self._clock.spans()
        for instruction, start, end in zip(self._program.instructions, starts, ends, strict=True):
            total[instruction.kind] = total.get(instruction.kind, 0.0) + end - start
        return total

    def timeline(self, memory_bytes: tuple[float, ...] = ()) -> Timeline:
        """The last step as it was measured.

        Args:
            memory_bytes: what `sample` gave, if the step ran under it.
        """
        starts, ends = self._clock.spans()
        lane = DeviceTimeline(
            device=self._program.device,
            kinds=tuple(i.kind for i in self._program.instructions),
            layers=tuple(i.layer for i in self._program.instructions),
            micros=tuple(i.micro for i in self._program.instructions),
            starts=tuple(starts),
            ends=tuple(ends),
            memory_bytes=memory_bytes,
        )
        return Timeline(predicted=False, devices=(lane,))


def _beating(handler: Handler, index: int, beat: Marks) -> Handler:
    """A handler that tells first which instruction it is."""

    def call(layer: int, micro: int) -> None:
        beat[1] = index
        handler(layer, micro)

    return call


def clock_for(device: torch.device, length: int) -> Clock:
    """The clock that tells the truth on a device.

    Args:
        device: where handlers compute; on CUDA they only enqueue, so events measure.
        length: instructions of one step.
    """
    return CudaClock(device, length) if device.type == "cuda" else HostClock(length)


class HostClock:
    """Reads the processor's clock before and after each call."""

    def __init__(self, length: int) -> None:
        self._starts = array("q", bytes(8 * length))
        self._ends = array("q", bytes(8 * length))

    def run(self, calls: Sequence[Call]) -> None:
        """Runs all calls of one step."""
        now, starts, ends = time.perf_counter_ns, self._starts, self._ends
        index = 0
        for handler, layer, micro in calls:
            starts[index] = now()
            handler(layer, micro)
            ends[index] = now()
            index += 1  # noqa: SIM113  enumerate builds a tuple more for each call

    def spans(self) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds at which each call of the last step began and ended."""
        first = self._starts[0] if self._starts else 0
        return (
            [(at - first) * 1e-9 for at in self._starts],
            [(at - first) * 1e-9 for at in self._ends],
        )


class CudaClock:
    """Puts an event before and after each call into the stream, and waits once, at the end."""

    def __init__(self, device: torch.device, length: int) -> None:
        self._device = device
        self._starts = [torch.cuda.Event(enable_timing=True) for _ in range(length)]
        self._ends = [torch.cuda.Event(enable_timing=True) for _ in range(length)]

    def run(self, calls: Sequence[Call]) -> None:
        """Runs all calls of one step and waits for the device."""
        stream = torch.cuda.current_stream(self._device)
        for (handler, layer, micro), start, end in zip(
            calls, self._starts, self._ends, strict=True
        ):
            start.record(stream)
            handler(layer, micro)
            end.record(stream)
        stream.synchronize()

    def spans(self) -> tuple[Sequence[float], Sequence[float]]:
        """Seconds at which each call of the last step began and ended."""
        if not self._starts:
            return [], []
        first = self._starts[0]
        return (
            [first.elapsed_time(event) * 1e-3 for event in self._starts],
            [first.elapsed_time(event) * 1e-3 for event in self._ends],
        )
