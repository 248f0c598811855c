"""Memory statistics of the process."""

import mmap

import pytest
import torch

from windlass.runtime.memory_stats import MemoryLimit, PeakMemory
from windlass.torch_ext import allocator_stats, device_for, install_allocator, set_memory_limit

CPU = device_for("cpu")
BLOCK = 64 * 2**20
TOLERANCE = 8 * 2**20


def hold(count: int) -> None:
    """Touches `count` bytes and gives them back to the system."""
    with mmap.mmap(-1, count) as block:
        for start in range(0, count, mmap.PAGESIZE):
            block[start] = 1


def test_the_peak_is_never_below_the_current_memory():
    # The current memory first: Python itself may take a page between the two.
    current = CPU.memory_allocated()
    assert CPU.peak_memory() >= current > 2**20


def test_a_sample_is_the_peak_since_the_last_sample():
    peak = PeakMemory(CPU)
    before = peak.sample()
    hold(BLOCK)
    during, after = peak.sample(), peak.sample()
    if during == after:
        pytest.skip("this system does not let a process reset its peak")
    assert during - before == pytest.approx(BLOCK, abs=TOLERANCE)
    assert after == pytest.approx(before, abs=TOLERANCE)


def test_the_overall_peak_is_kept_across_samples():
    peak = PeakMemory(CPU)
    hold(BLOCK)
    during = peak.sample()
    peak.sample()
    assert peak.overall_bytes() >= during


@pytest.mark.parametrize(("slack", "kept"), [(2**30, BLOCK // 4), (0, 0)])
def test_memory_kept_free_gives_way_to_the_budget(slack: int, kept: int):
    if not install_allocator():
        pytest.skip("no compiler, or not Linux: the allocator cannot be built")
    torch.empty(BLOCK, dtype=torch.uint8)  # free now, and kept by the allocator
    used = CPU.memory_allocated()
    try:
        MemoryLimit(tensor_bytes=0, budget_bytes=used + slack).apply()
        stats = allocator_stats()
    finally:
        set_memory_limit(None)
    assert stats is not None
    assert stats.reserved - stats.allocated <= kept + BLOCK // 4
