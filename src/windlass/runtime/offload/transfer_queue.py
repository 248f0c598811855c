"""The queue of transfers between device memory and offload tiers; they overlap with computation.

Transfers end in the order in which they were submitted. A reader, a writer and the queue itself are
threads that compute almost nothing, and use one core each, because the computation needs all cores.

On an accelerator each of the three has a stream of its own, so that copies in, updates and copies
out run at once. A transfer starts when all work submitted to the device before it is done; whoever
needs its result waits for an event in its own stream, and the host continues. Transfers that never
wait for a file need one thread: an update of a large layer is thousands of small pieces of work,
and while that thread submits them the passes are submitted too. Not yet tested on a GPU. On a CPU
streams and events do nothing, so the same code runs there.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from windlass.schema import HOST_TIER, Plan
from windlass.torch_ext import Device, Event, Stream

_Item = TypeVar("_Item")
_Buffers = TypeVar("_Buffers")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


@dataclass(slots=True)
class TransferStats:
    """Time and bytes of transfers."""

    seconds: float = 0.0
    """Busy time; on an accelerator only the time it took to submit the transfers."""
    read_bytes: int = 0
    """Bytes read from offload tiers."""
    written_bytes: int = 0
    """Bytes written to offload tiers."""


class TransferHandle:
    """A submitted transfer.

    Args:
        uses: tensors whose memory must not be reused before the transfer has ended.
    """

    def __init__(self, done: Future[Event], device: Device, uses: list[Tensor]) -> None:
        self._done, self._device, self._uses = done, device, uses

    def wait(self) -> None:
        """Makes the caller's stream wait for the transfer.

        On a CPU the transfer has ended when this returns.

        Raises:
            StorageError: the transfer failed.
        """
        self._done.result().wait(self._device.current_stream())
        self._uses.clear()

    def synchronize(self) -> None:
        """Returns when the transfer has ended, on the device too."""
        self._done.result().synchronize()
        self._uses.clear()


class TransferQueue:
    """Runs transfers in order; must be closed at the end.

    Args:
        blocks: whether transfers wait on the host, because the device is a CPU or files take part.
            If not, the thread that runs them reads and writes too.
    """

    def __init__(self, device: Device, *, blocks: bool = True) -> None:
        self._device = device
        # New threads inherit this setting, so torch has to determine it before it is changed.
        torch.get_num_threads()
        pools: list[Executor] = [
            ThreadPoolExecutor(1, f"windlass-{name}", initializer=self._begin_thread)
            if blocks or name == "transfer"
            else _InlineExecutor()
            for name in ("transfer", "read", "write")
        ]
        self._transfer_pool, self._read_pool, self._write_pool = pools
        self._stream, self._read_stream, self._write_stream = (
            device.new_stream() for _ in range(3)
        )
        self._stats = TransferStats()
        self._taken_stats = TransferStats()

    def submit(self, transfer: Callable[[TransferStats], None], *uses: Tensor) -> TransferHandle:
        """Runs a transfer once all earlier ones have ended.

        Args:
            transfer: called with the statistics, to which it adds the bytes it moves.
        """
        before, kept = self._record_event(self._device.current_stream()), list(uses)
        done = self._transfer_pool.submit(self._run, transfer, before, kept)
        return TransferHandle(done, self._device, kept)

    def pipelined(
        self,
        items: Sequence[_Item],
        buffers: Sequence[_Buffers],
        read: Callable[[_Buffers, _Item], None],
        compute: Callable[[_Buffers, _Item], None],
        write: Callable[[_Buffers, _Item], None],
    ) -> None:
        """Reads, computes and writes items, three at a time, inside a transfer.

        Args:
            buffers: memory for one item each, used in rotation; at least three.
        """
        start = self._record_event(self._stream)
        written: list[Future[Event] | None] = [None] * len(buffers)

        def submit_read(index: int) -> Future[Event]:
            previous_write, buffer = written[index % len(buffers)], buffers[index % len(buffers)]

            def read_item() -> Event:
                after = start if previous_write is None else previous_write.result()
                return self._run_in(self._read_stream, after, read, buffer, items[index])

            return self._read_pool.submit(read_item)

        reads = deque(submit_read(index) for index in range(min(len(buffers) - 1, len(items))))
        try:
            for index, item in enumerate(items):
                buffer = buffers[index % len(buffers)]
                computed = self._run_in(
                    self._stream, reads.popleft().result(), compute, buffer, item
                )
                written[index % len(buffers)] = self._write_pool.submit(
                    self._run_in, self._write_stream, computed, write, buffer, item
                )
                following = index + len(buffers) - 1
                if following < len(items):
                    reads.append(submit_read(following))
        finally:
            wait([future for future in (*reads, *written) if future is not None])
        for future in written:
            if future is not None:
                future.result().wait(self._stream)

    def take_stats(self) -> TransferStats:
        """Statistics since the last call, including what a running transfer has done so far."""
        now, previous = replace(self._stats), self._taken_stats
        self._taken_stats = now
        return TransferStats(
            seconds=now.seconds - previous.seconds,
            read_bytes=now.read_bytes - previous.read_bytes,
            written_bytes=now.written_bytes - previous.written_bytes,
        )

    def wait(self) -> None:
        """Returns when all transfers have ended."""
        self.submit(lambda _: None).synchronize()

    def close(self) -> None:
        """Ends the threads, and waits for the device; transfers that have not begun are dropped."""
        for pool in (self._transfer_pool, self._read_pool, self._write_pool):
            pool.shutdown(wait=True, cancel_futures=True)
        # After an error copies may still be running, and their pinned memory is freed next.
        for stream in (self._stream, self._read_stream, self._write_stream):
            stream.synchronize()

    def _run(
        self, transfer: Callable[[TransferStats], None], before: Event, uses: list[Tensor]
    ) -> Event:
        start = time.perf_counter()
        done = self._run_in(self._stream, before, transfer, self._stats)
        self._stats.seconds += time.perf_counter() - start
        if not self._device.is_asynchronous:
            uses.clear()
        return done

    def _run_in(
        self,
        stream: Stream,
        after: Event,
        call: Callable[_Arguments, None],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> Event:
        """Calls a function in a stream, after an event; returns the event that follows."""
        after.wait(stream)
        with self._device.use_stream(stream):
            call(*args, **kwargs)
        return self._record_event(stream)

    def _begin_thread(self) -> None:
        self._device.activate()
        torch.set_num_threads(1)

    def _record_event(self, stream: Stream) -> Event:
        event = self._device.new_event()
        event.record(stream)
        return event


class _InlineExecutor(Executor):
    """Runs whatever is submitted at once, in the calling thread."""

    def submit(
        self,
        call: Callable[_Arguments, _Result],
        /,
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> Future[_Result]:
        done: Future[_Result] = Future()
        try:
            done.set_result(call(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001  as a thread would hand it on
            done.set_exception(error)
        return done


def transfer_queue_for(plan: Plan, device: Device) -> TransferQueue | None:
    """The queue of all transfers of a plan; None for a plan that offloads nothing."""
    if not plan.offloads:
        return None
    only_host = set(plan.offload_tiers.values()) == {HOST_TIER}
    return TransferQueue(device, blocks=not device.is_asynchronous or not only_host)
