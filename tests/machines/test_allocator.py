import subprocess
import sys

from windlass.machines.allocator import prepare_allocator

_GROWN = """
from windlass.machines.allocator import prepare_allocator
prepare_allocator()
import numpy
def resident():
    import os
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
block = numpy.ones(64 * 2**20, numpy.uint8)
full = resident()
del block
print(full - resident())
"""


def test_the_allocator_takes_the_setting_twice_over():
    assert prepare_allocator() == prepare_allocator()


def test_a_large_block_goes_back_to_the_system_as_soon_as_it_is_freed():
    done = subprocess.run(
        [sys.executable, "-c", _GROWN], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 60 * 2**20
