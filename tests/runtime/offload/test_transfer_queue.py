"""The lane, with threads of its own and without."""

import weakref
from collections.abc import Iterator

import pytest
import torch

from windlass.runtime.offload.transfer_queue import TransferQueue, TransferStats


@pytest.fixture(params=[True, False], ids=["threads", "at once"])
def lane(request: pytest.FixtureRequest) -> Iterator[TransferQueue]:
    made = TransferQueue(torch.device("cpu"), blocks=request.param)
    yield made
    made.close()


def test_moves_end_in_the_order_they_began(lane: TransferQueue):
    ended: list[int] = []
    tickets = [lane.begin(lambda _, at=at: ended.append(at)) for at in range(20)]
    tickets[-1].wait()
    assert ended == list(range(20))


def test_whoever_waits_for_a_move_learns_what_went_wrong(lane: TransferQueue):
    def fail(_: TransferStats) -> None:
        raise OSError("the disk is gone")

    ticket = lane.begin(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        ticket.wait()
    lane.wait()


def test_bytes_are_told_once(lane: TransferQueue):
    def move(moved: TransferStats) -> None:
        moved.read_bytes += 3
        moved.written_bytes += 5

    lane.begin(move)
    lane.begin(move)
    lane.wait()
    first, again = lane.moved(), lane.moved()
    assert (first.read_bytes, first.written_bytes) == (6, 10)
    assert (again.read_bytes, again.written_bytes) == (0, 0)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 10])
def test_every_piece_is_read_worked_on_and_written_in_a_set_of_its_own(lane: TransferQueue, count: int):
    home = list(range(count))
    sets = [[-1], [-1], [-1]]

    def read(memory: list[int], piece: int) -> None:
        memory[0] = home[piece]

    def work(memory: list[int], piece: int) -> None:
        memory[0] = 100 * memory[0] + piece

    def write(memory: list[int], piece: int) -> None:
        home[piece] = memory[0]

    lane.begin(lambda _: lane.pass_through(range(count), sets, read, work, write))
    lane.wait()
    assert home == [101 * piece for piece in range(count)]


def test_a_piece_that_cannot_be_written_fails_the_move(lane: TransferQueue):
    def write(_: list[int], piece: int) -> None:
        if piece == 2:
            raise OSError("full")

    def nothing(_: list[int], __: int) -> None:
        pass

    sets = [[0], [0], [0]]
    ticket = lane.begin(lambda _: lane.pass_through(range(6), sets, nothing, nothing, write))
    with pytest.raises(OSError, match="full"):
        ticket.wait()


def test_what_a_move_uses_is_held_no_longer_than_it_takes(lane: TransferQueue):
    held = torch.ones(3)
    seen = weakref.ref(held)
    ticket = lane.begin(lambda _: None, held)
    del held
    lane.wait()
    assert seen() is None
    ticket.wait()
