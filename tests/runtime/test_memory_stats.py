"""Memory statistics of the process."""

import mmap

import pytest
import torch

from windlass.runtime.memory_stats import PeakMemory, current_bytes, peak_bytes

CPU = torch.device("cpu")
BLOCK = 64 * 2**20
TOLERANCE = 8 * 2**20


def hold(count: int) -> None:
    """Touches `count` bytes and gives them back to the system."""
    with mmap.mmap(-1, count) as block:
        for start in range(0, count, mmap.PAGESIZE):
            block[start] = 1


def test_the_peak_is_never_below_the_current_memory():
    assert peak_bytes(CPU) >= current_bytes(CPU) > 2**20


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
