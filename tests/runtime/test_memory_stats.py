"""What the process holds."""

import mmap

import pytest
import torch

from windlass.runtime.memory_stats import PeakMemory, current_bytes, peak_bytes

CPU = torch.device("cpu")
BLOCK = 64 * 2**20
NEAR = 8 * 2**20


def hold(count: int) -> None:
    """Touches `count` bytes and gives them back to the system."""
    with mmap.mmap(-1, count) as block:
        for start in range(0, count, mmap.PAGESIZE):
            block[start] = 1


def test_the_peak_is_never_below_what_is_held():
    assert peak_bytes(CPU) >= current_bytes(CPU) > 2**20


def test_a_look_sees_what_was_held_since_the_last_look_only():
    peak = PeakMemory(CPU)
    before = peak.sample()
    hold(BLOCK)
    during, after = peak.sample(), peak.sample()
    if during == after:
        pytest.skip("this system does not let a process begin its peak anew")
    assert during - before == pytest.approx(BLOCK, abs=NEAR)
    assert after == pytest.approx(before, abs=NEAR)


def test_the_highest_is_kept_through_looks():
    peak = PeakMemory(CPU)
    hold(BLOCK)
    during = peak.sample()
    peak.sample()
    assert peak.overall_bytes() >= during
