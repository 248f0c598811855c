"""The transfer queue, with a thread for each direction and with one for all."""

import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from windlass.runtime.offload.transfer_queue import TransferQueue, TransferStats
from windlass.torch_ext import device_for


@pytest.fixture(params=[True, False], ids=["three threads", "one thread"])
def queue(request: pytest.FixtureRequest) -> Iterator[TransferQueue]:
    made = TransferQueue(device_for("cpu"), blocks=request.param)
    yield made
    made.close()


def test_transfers_end_in_the_order_in_which_they_were_submitted(queue: TransferQueue):
    ended: list[int] = []
    handles = [queue.submit(lambda _, index=index: ended.append(index)) for index in range(20)]
    handles[-1].wait()
    assert ended == list(range(20))


def test_the_caller_goes_on_while_a_transfer_is_submitted(queue: TransferQueue):
    gone_on, seen = threading.Event(), list[bool]()
    queue.submit(lambda _: seen.append(gone_on.wait(timeout=5)))
    gone_on.set()
    queue.wait()
    assert seen == [True]


def test_waiting_for_a_failed_transfer_raises_its_error(queue: TransferQueue):
    def fail(_: TransferStats) -> None:
        raise OSError("the disk is gone")

    handle = queue.submit(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        handle.wait()
    queue.wait()


def test_statistics_are_taken_once(queue: TransferQueue):
    def transfer(stats: TransferStats) -> None:
        stats.read_bytes += 3
        stats.written_bytes += 5

    queue.submit(transfer)
    queue.submit(transfer)
    queue.wait()
    first, second = queue.take_stats(), queue.take_stats()
    assert (first.read_bytes, first.written_bytes) == (6, 10)
    assert (second.read_bytes, second.written_bytes) == (0, 0)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_each_item_is_read_computed_and_written_in_buffers_of_its_own(
    queue: TransferQueue, count: int
):
    stored = list(range(count))
    buffers = [[-1], [-1], [-1]]

    def read(buffer: list[int], item: int) -> None:
        buffer[0] = stored[item]

    def compute(buffer: list[int], item: int) -> None:
        buffer[0] = 100 * buffer[0] + item

    def write(buffer: list[int], item: int) -> None:
        stored[item] = buffer[0]

    queue.submit(lambda _: queue.pipelined(range(count), buffers, read, compute, write))
    queue.wait()
    assert stored == [101 * item for item in range(count)]


def test_an_item_that_cannot_be_written_fails_the_transfer(queue: TransferQueue):
    def write(_: list[int], item: int) -> None:
        if item == 2:
            raise OSError("full")

    def nothing(_: list[int], __: int) -> None:
        pass

    buffers = [[0], [0], [0]]
    handle = queue.submit(lambda _: queue.pipelined(range(6), buffers, nothing, nothing, write))
    with pytest.raises(OSError, match="full"):
        handle.wait()


def test_tensors_in_use_are_released_when_the_transfer_ends(queue: TransferQueue):
    tensor = torch.ones(3)
    reference = weakref.ref(tensor)
    handle = queue.submit(lambda _: None, tensor)
    del tensor
    queue.wait()
    assert reference() is None
    handle.wait()
