"""Holds the C allocator to one behaviour, so that what is measured now holds for the run later.

glibc moves its own thresholds while a program runs: blocks up to 32 MiB are first mapped afresh and
later served from the heap, ten times faster. A probe and a run, or the first and the tenth step,
would thus see different machines. Pinning both where glibc itself ends makes them one machine.

Measured on 2 cores of an AMD EPYC (glibc 2.36, Linux 6.18, 2026-11), gpt2-124m, micro-batch 4,
sequence 512, bfloat16: keeping blocks of any size in the heap makes an eager step 18 % and a
compiled one 2 % faster, at a peak 26 % and 13 % higher and not foreseeable (holes); huge pages for
large blocks give eager 10 %, compiled nothing, at a compiled peak 9 % higher. Both were declined:
memory that is promised must hold.
"""

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_MMAP_BYTES = 32 * 2**20
_TRIM_BYTES = 2 * _MMAP_BYTES


def prepare_allocator() -> bool:
    """Pins glibc's thresholds for this process: blocks above 32 MiB are always mapped afresh.

    The probe and every run call it before the first large tensor. Calling it twice does no harm.

    Returns:
        Whether this system's allocator took it; False outside glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    try:
        set_option = libc.mallopt
        _ = libc.gnu_get_libc_version
    except AttributeError:
        return False
    taken = set_option(_M_MMAP_THRESHOLD, _MMAP_BYTES) and set_option(
        _M_TRIM_THRESHOLD, _TRIM_BYTES
    )
    return bool(taken)
