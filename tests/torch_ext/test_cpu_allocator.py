import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from windlass.torch_ext.cpu_allocator import AllocatorStats, allocator_stats, set_memory_limit, install_allocator

MIB = 2**20


@pytest.fixture(autouse=True)
def _blocks() -> Iterator[None]:
    if not install_allocator():
        pytest.skip("no C++ compiler here")
    yield
    set_memory_limit(None)


def _held() -> AllocatorStats:
    held = allocator_stats()
    assert held is not None
    return held


def _filled(nbytes: int, value: int) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def test_a_result_of_a_size_that_was_freed_takes_no_fresh_memory():
    set_memory_limit(None)
    block = _filled(32 * MIB, 1)
    del block
    before = _held().total_mapped
    block = _filled(32 * MIB, 2)
    assert _held().total_mapped == before
    assert int(block[-1]) == 2


def test_free_memory_above_the_limit_goes_back_to_the_system():
    set_memory_limit(0)
    alive = _held().allocated
    blocks = [_filled(16 * MIB, value) for value in range(4)]
    assert _held().reserved >= alive + 64 * MIB
    del blocks
    assert _held().reserved == _held().allocated <= alive


def test_under_a_limit_results_of_another_size_are_made_of_what_is_free():
    set_memory_limit(0)
    set_memory_limit(_held().allocated + 64 * MIB)
    first = _filled(60 * MIB, 1)
    del first
    before = _held().total_mapped
    others = [_filled(20 * MIB, value) for value in (2, 3)]
    assert _held().total_mapped == before
    assert [int(other.min()) for other in others] == [2, 3]
    assert [int(other.max()) for other in others] == [2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_what_is_written_stays_and_the_limit_holds_whatever_comes_and_goes(seed: int):
    draw = random.Random(seed)
    set_memory_limit(0)
    limit = _held().allocated + 48 * MIB
    set_memory_limit(limit)
    blocks: list[tuple[int, Tensor]] = []
    for turn in range(400):
        room = 40 * MIB - sum(block.numel() for _, block in blocks)
        if blocks and (room < 12 * MIB or draw.random() < 0.5):
            value, block = blocks.pop(draw.randrange(len(blocks)))
            assert int(block.min()) == int(block.max()) == value
            del block
        else:
            size = draw.choice((1000, 200_000, 3 * MIB, draw.randrange(1, 12 * MIB)))
            blocks.append((turn % 251, _filled(size, turn % 251)))
        assert _held().reserved <= limit
    for value, block in blocks:
        assert int(block.min()) == int(block.max()) == value
