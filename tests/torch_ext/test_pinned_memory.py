"""The host memory that an accelerator copies from and to."""

import sys
from pathlib import Path

import pytest
from torch import Tensor

from windlass.torch_ext import PinnedMemory, device_for


def flags(buffer: Tensor) -> set[str]:
    """What Linux keeps of the mapping of a buffer: `sh` is shared, `dc` not in a forked child."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= buffer.data_ptr() < end
        elif inside and first == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError("no mapping holds the buffer")


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what it maps")
def test_pinned_memory_is_private_and_not_in_forked_processes():
    memory = PinnedMemory(4 * 2**20 + 1, device_for("cpu"))
    found = flags(memory.buffer)
    assert "dc" in found
    assert "sh" not in found
    assert not memory.buffer.any()
    memory.close()


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097])
def test_pinned_memory_has_whole_pages_and_at_least_one(nbytes: int):
    memory = PinnedMemory(nbytes, device_for("cpu"))
    pages, rest = divmod(memory.buffer.numel(), 4096)
    assert rest == 0
    assert pages == max(1, -(-nbytes // 4096))
    assert memory.buffer.data_ptr() % 4096 == 0
    memory.close()
