"""The caching CPU allocator and its limit."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from windlass.torch_ext.cpu_allocator import (
    AllocatorStats,
    allocator_stats,
    install_allocator,
    set_memory_limit,
)

MIB = 2**20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture(autouse=True)
def _allocator() -> Iterator[None]:
    if not install_allocator():
        pytest.skip("no C++ compiler here")
    yield
    set_memory_limit(None)


def stats() -> AllocatorStats:
    current = allocator_stats()
    assert current is not None
    return current


def filled(nbytes: int, value: int) -> Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def huge_page_bytes() -> int:
    """Bytes of this process that lie in huge pages, as the kernel counts them."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    line = next(line for line in lines if line.startswith("AnonHugePages:"))
    return int(line.split()[1]) * 1024


def test_a_tensor_of_a_freed_size_maps_no_new_memory():
    set_memory_limit(None)
    tensor = filled(32 * MIB, 1)
    del tensor
    before = stats().total_mapped
    tensor = filled(32 * MIB, 2)
    assert stats().total_mapped == before
    assert int(tensor[-1]) == 2


def test_free_memory_above_the_limit_is_returned_to_the_system():
    set_memory_limit(0)
    allocated = stats().allocated
    tensors = [filled(16 * MIB, value) for value in range(4)]
    assert stats().reserved >= allocated + 64 * MIB
    del tensors
    assert stats().reserved == stats().allocated <= allocated


def test_under_a_limit_tensors_of_another_size_reuse_free_pages():
    set_memory_limit(0)
    set_memory_limit(stats().allocated + 64 * MIB)
    first = filled(60 * MIB, 1)
    del first
    before = stats().total_mapped
    others = [filled(20 * MIB, value) for value in (2, 3)]
    assert stats().total_mapped == before
    assert [int(other.min()) for other in others] == [2, 3]
    assert [int(other.max()) for other in others] == [2, 3]


def test_a_block_that_two_tensors_shared_serves_one_of_its_whole_size_again_in_place():
    set_memory_limit(0)
    set_memory_limit(stats().allocated + 64 * MIB)
    full = filled(60 * MIB, 1)
    address, before = full.data_ptr(), stats().total_mapped
    for order in ((0, 1), (1, 0)):
        del full
        parts = [filled(20 * MIB, 2), filled(40 * MIB, 3)]
        assert {part.data_ptr() for part in parts} == {address, address + 20 * MIB}
        assert [int(part.max()) for part in parts] == [2, 3]
        for index in order:
            parts[index] = torch.empty(0)
        full = filled(60 * MIB, 4)
        assert full.data_ptr() == address
    assert stats().total_mapped == before


@pytest.mark.skipif(
    not _HUGE_PAGES.exists() or "[never]" in _HUGE_PAGES.read_text(),
    reason="the system gives no huge pages",
)
def test_new_tensors_smaller_than_a_huge_page_lie_in_huge_pages():
    set_memory_limit(None)
    before = huge_page_bytes()
    tensors = [filled(300 * 1024, value) for value in range(200)]
    assert huge_page_bytes() - before >= sum(tensor.numel() for tensor in tensors) / 2


@pytest.mark.parametrize("seed", range(3))
def test_content_is_preserved_and_the_limit_holds_under_random_allocations(seed: int):
    draw = random.Random(seed)
    set_memory_limit(0)
    limit = stats().allocated + 48 * MIB
    set_memory_limit(limit)
    tensors: list[tuple[int, Tensor]] = []
    for turn in range(400):
        remaining = 40 * MIB - sum(tensor.numel() for _, tensor in tensors)
        if tensors and (remaining < 12 * MIB or draw.random() < 0.5):
            value, tensor = tensors.pop(draw.randrange(len(tensors)))
            assert int(tensor.min()) == int(tensor.max()) == value
            del tensor
        else:
            size = draw.choice((1000, 200_000, 3 * MIB, draw.randrange(1, 12 * MIB)))
            tensors.append((turn % 251, filled(size, turn % 251)))
        assert stats().reserved <= limit
    for value, tensor in tensors:
        assert int(tensor.min()) == int(tensor.max()) == value
