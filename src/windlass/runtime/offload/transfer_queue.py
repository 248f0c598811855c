"""The far lane: moves between tiers, done one after the other beside the computing.

What the program begins here ends in the order it began. A reader, a writer and the lane itself are
threads that compute next to nothing, and that on one core each, for the computing needs them all.

On an accelerator each of the three has a stream of its own, so that copies in, updates and copies
out go on at once. A move begins when all that was asked of the device before it is done; whoever
needs what it brings waits by an event, in its own stream, and the host goes on. Where moves never
wait for a file nobody needs threads: the caller itself asks the device for them. On a CPU streams
and events are torch's own that do nothing, so that the same lines run there.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from windlass.runtime.offload.cuda_streams import StreamEvent, StreamModule, stream_module
from windlass.schema.plan import HOST_TIER, Plan

Piece = TypeVar("Piece")
Memory = TypeVar("Memory")
Given = TypeVar("Given")
Arguments = ParamSpec("Arguments")


@dataclass(slots=True)
class TransferStats:
    """What a lane has done."""

    seconds: float = 0.0
    """Busy; on an accelerator only as long as it took to ask for the moves."""
    read_bytes: int = 0
    written_bytes: int = 0


class TransferHandle:
    """A move that was begun.

    Args:
        done: gives the device's event after it.
        device: its streams.
        uses: tensors that must not be given to others before it has ended.
    """

    def __init__(self, done: Future[StreamEvent], device: StreamModule, uses: list[Tensor]) -> None:
        self._done, self._device, self._uses = done, device, uses

    def wait(self) -> None:
        """What the caller asks of the device from now on comes after the move.

        On a CPU it has ended when this returns.

        Raises:
            StorageError: it failed.
        """
        self._done.result().wait(self._device.current_stream())
        self._uses.clear()

    def end(self) -> None:
        """Returns when the move has ended, on the device too."""
        self._done.result().synchronize()
        self._uses.clear()


class TransferQueue:
    """Runs moves in order; `close` it at the end.

    Args:
        device: that computes.
        blocks: whether moves wait on the host: on a CPU, or for files. If not, they are asked for
            by whoever begins them.
    """

    def __init__(self, device: torch.device, *, blocks: bool = True) -> None:
        self._device = stream_module(device)
        self._at_once = device.type == "cpu"
        # Threads begun later take this setting over, so it has to be known before it changes.
        torch.get_num_threads()
        pools: list[Executor] = [
            ThreadPoolExecutor(1, f"windlass-{name}", initializer=_one_core) if blocks else _Here()
            for name in ("far", "read", "write")
        ]
        self._mover, self._reader, self._writer = pools
        self._moves, self._reads, self._writes = (self._device.Stream() for _ in range(3))
        self._moved = TransferStats()
        self._told = TransferStats()

    def begin(self, move: Callable[[TransferStats], None], *uses: Tensor) -> TransferHandle:
        """Begins a move when all before it have ended.

        Args:
            move: adds the bytes it reads and writes.
            uses: tensors that nothing else holds until it has ended.
        """
        before = self._event(self._device.current_stream())
        held = list(uses)
        return TransferHandle(self._mover.submit(self._timed, move, before, held), self._device, held)

    def pass_through(
        self,
        pieces: Sequence[Piece],
        sets: Sequence[Memory],
        read: Callable[[Memory, Piece], None],
        work: Callable[[Memory, Piece], None],
        write: Callable[[Memory, Piece], None],
    ) -> None:
        """Reads, works on and writes pieces, three at once, inside a move.

        Args:
            pieces: in order.
            sets: memory for one piece each, used in turn; at least three.
            read: fills a set.
            work: changes it.
            write: takes it away.
        """
        begun = self._event(self._moves)
        written: list[Future[StreamEvent] | None] = [None] * len(sets)

        def begin(index: int) -> Future[StreamEvent]:
            before = written[index % len(sets)]

            def fill() -> StreamEvent:
                after = begun if before is None else before.result()
                return self._in(self._reads, after, read, sets[index % len(sets)], pieces[index])

            return self._reader.submit(fill)

        ahead = deque(begin(index) for index in range(min(len(sets) - 1, len(pieces))))
        try:
            for index, piece in enumerate(pieces):
                memory = sets[index % len(sets)]
                worked = self._in(self._moves, ahead.popleft().result(), work, memory, piece)
                written[index % len(sets)] = self._writer.submit(
                    self._in, self._writes, worked, write, memory, piece
                )
                following = index + len(sets) - 1
                if following < len(pieces):
                    ahead.append(begin(following))
        finally:
            wait([future for future in (*ahead, *written) if future is not None])
        for future in written:
            if future is not None:
                future.result().wait(self._moves)

    def moved(self) -> TransferStats:
        """What was done since this was asked last; of a move under way, what it has done so far."""
        now, told = replace(self._moved), self._told
        self._told = now
        return TransferStats(
            seconds=now.seconds - told.seconds,
            read_bytes=now.read_bytes - told.read_bytes,
            written_bytes=now.written_bytes - told.written_bytes,
        )

    def wait(self) -> None:
        """Returns when nothing is under way."""
        self.begin(lambda _: None).end()

    def close(self) -> None:
        """Ends the threads; what has not begun is dropped."""
        for pool in (self._mover, self._reader, self._writer):
            pool.shutdown(wait=True, cancel_futures=True)

    def _timed(self, move: Callable[[TransferStats], None], before: StreamEvent, uses: list[Tensor]) -> StreamEvent:
        start = time.perf_counter()
        done = self._in(self._moves, before, move, self._moved)
        self._moved.seconds += time.perf_counter() - start
        if self._at_once:
            uses.clear()
        return done

    def _in(
        self,
        stream: object,
        after: StreamEvent,
        call: Callable[Arguments, None],
        *args: Arguments.args,
        **named: Arguments.kwargs,
    ) -> StreamEvent:
        """Calls in a stream, after an event; gives the event after that."""
        after.wait(stream)
        with self._device.stream(stream):
            call(*args, **named)
        return self._event(stream)

    def _event(self, stream: object) -> StreamEvent:
        event = self._device.Event()
        event.record(stream)
        return event


class _Here(Executor):
    """Does at once whatever is submitted."""

    def submit(
        self,
        call: Callable[Arguments, Given],
        /,
        *args: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Future[Given]:
        done: Future[Given] = Future()
        try:
            done.set_result(call(*args, **named))
        except BaseException as error:  # noqa: BLE001  as a thread would hand it on
            done.set_exception(error)
        return done


def _one_core() -> None:
    torch.set_num_threads(1)


def transfer_queue_for(plan: Plan, device: torch.device) -> TransferQueue | None:
    """The lane of all that a plan moves between tiers; None where nothing moves."""
    if not plan.offloads:
        return None
    in_memory = set(plan.offload_tiers.values()) == {HOST_TIER}
    return TransferQueue(device, blocks=device.type == "cpu" or not in_memory)
