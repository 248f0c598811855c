"""Micro-batches of one replica, each read while the one before is computed."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from windlass.data.batches import Batches
from windlass.data.examples import ExampleArray, ExampleBatches
from windlass.data.packing import RowBatches

TrainingBatches = Batches | ExampleBatches | RowBatches
"""The samples of every step: windows of text, examples such as images, or rows of whole
documents."""

Examples = tuple[ExampleArray, ExampleArray]
"""Inputs and targets of a micro-batch."""


class _Place(NamedTuple):
    step: int
    micro_batch: int


class ReadAhead:
    """Reads the micro-batches of one replica; a thread has the next one ready.

    What is read depends on the step and the micro-batch alone, in whatever order they are asked
    for. Text on a slow disk, masks and Python's own work then take no time of the device.

    Args:
        batches: the samples of every step.
        first: index of the replica's first sample in the global batch.
        micro: samples of a micro-batch.
        count: micro-batches of a step.
    """

    def __init__(self, batches: TrainingBatches, *, first: int, micro: int, count: int) -> None:
        self._batches, self._first, self._micro, self._count = batches, first, micro, count
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="windlass-batch")
        self._ahead: tuple[_Place, Future[Examples]] | None = None

    def read(self, step: int, micro_batch: int) -> Examples:
        """Inputs and targets of a micro-batch, and the start of reading the next one.

        Args:
            step: step, counted from 1.
        """
        place, ahead = _Place(step, micro_batch), self._ahead
        is_ready = ahead is not None and ahead[0] == place
        examples = ahead[1].result() if ahead is not None and is_ready else self._read(place)
        following = _Place(step, micro_batch + 1)
        if following.micro_batch == self._count:
            following = _Place(step + 1, 0)
        self._ahead = following, self._thread.submit(self._read, following)
        return examples

    def _read(self, place: _Place) -> Examples:
        first = self._first + place.micro_batch * self._micro
        return self._batches.samples(place.step, first, self._micro)

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(cancel_futures=True)
