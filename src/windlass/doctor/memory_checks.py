"""Checks of memory on one device: the allocator, pinned host memory, statistics, running out."""

import time
from functools import partial

import torch

from windlass.doctor.findings import (
    Check,
    Finding,
    NotAvailableError,
    WorkerTask,
    WrongResultError,
)
from windlass.jobs import Progress
from windlass.torch_ext import Device, allocator_stats, install_allocator, set_memory_limit
from windlass.units import format_bytes, format_rate

_BYTES = 2**27
"""Bytes of the tensors that are allocated, copied and counted."""
_COUNTED = 0.9
"""Share of them by which memory statistics must rise: parts of a page may have been there."""
_IMPOSSIBLE_BYTES = 2**50
"""More than any host has, and less than an address can say."""


def memory_checks(task: WorkerTask, _: Progress) -> tuple[Check, ...]:
    """The CPU allocator, copies from pinned memory, memory statistics, and running out of it."""
    device = task.computes_on()
    device.activate()
    return (
        Check(
            "CPU allocator",
            _allocator,
            "report it; until then runs may take more memory than predicted",
        ),
        Check(
            "pinned host memory",
            partial(_pinned_memory, device),
            "raise the limit of locked memory (`ulimit -l`), and see the driver's log",
        ),
        Check(
            "memory statistics",
            partial(_statistics, device),
            "report it; until then measured peaks of runs are wrong",
        ),
        Check(
            "out of memory",
            partial(_out_of_memory, device),
            "keep `memory` of a plan below what is free: a run that needs more may be killed",
        ),
    )


def _allocator() -> Finding:
    if not install_allocator():
        return Finding(
            "the C library's heap: Windlass's own allocator could not be built",
            slow="install a C++ compiler, such as `g++`: memory is then as predicted",
        )
    before = allocator_stats()
    block = torch.ones(_BYTES, dtype=torch.uint8)
    during = allocator_stats()
    del block
    set_memory_limit(0)
    after = allocator_stats()
    set_memory_limit(None)
    if before is None or during is None or after is None:
        raise WrongResultError("it is installed but counts no memory")
    if not during.allocated - before.allocated >= _BYTES * _COUNTED:
        raise WrongResultError(f"{format_bytes(_BYTES)} were allocated without it")
    if after.reserved > before.reserved:
        raise WrongResultError(f"{format_bytes(after.reserved)} stay reserved beyond the limit")
    return Finding(f"{format_bytes(_BYTES)} allocated, freed and returned to the system")


def _pinned_memory(device: Device) -> Finding:
    if not device.has_pinned_memory:
        raise NotAvailableError("this device has no copies that overlap")
    buffer = torch.randint(256, (_BYTES,), dtype=torch.uint8)
    device.register_host_memory(buffer)
    try:
        stream = device.new_stream()
        copy = torch.empty_like(buffer, device=device.torch_device)
        rates: list[float] = []
        for _ in range(3):
            device.synchronize()
            start = time.perf_counter()
            with device.use_stream(stream):
                copy.copy_(buffer, non_blocking=True)
            stream.synchronize()
            rates.append(_BYTES / (time.perf_counter() - start))
    finally:
        device.synchronize()
        device.unregister_host_memory(buffer)
    if not torch.equal(copy.cpu(), buffer):
        raise WrongResultError("what a side stream copied is not what was in host memory")
    return Finding(f"{format_rate(max(rates))} to the device")


def _statistics(device: Device) -> Finding:
    device.synchronize()
    before, resets = device.memory_allocated(), device.reset_peak_memory()
    block = torch.ones(_BYTES, dtype=torch.uint8, device=device.torch_device)
    device.synchronize()
    now, peak = device.memory_allocated(), device.peak_memory()
    del block
    for name, value in (("current", now), ("peak", peak)):
        if value - before < _BYTES * _COUNTED:
            raise WrongResultError(
                f"{name} memory rose by {format_bytes(value - before)} for a tensor of "
                f"{format_bytes(_BYTES)}"
            )
    total = device.total_memory()
    text = f"{format_bytes(device.free_memory())} of {format_bytes(total)} free"
    return Finding(text if resets else f"{text}; peaks cannot be reset here")


def _out_of_memory(device: Device) -> Finding:
    x = torch.ones(64, 64, device=device.torch_device)
    nbytes = 2 * device.total_memory() if device.is_asynchronous else _IMPOSSIBLE_BYTES
    try:
        torch.empty(nbytes, dtype=torch.uint8, device=device.torch_device)
    except (RuntimeError, MemoryError) as error:
        refusal = type(error).__name__
    else:
        raise WrongResultError(f"{format_bytes(nbytes)} were allocated on a device without them")
    if float((x @ x).sum()) != 64.0**3:
        raise WrongResultError("a product after the refusal is wrong")
    return Finding(f"{format_bytes(nbytes)} are refused with `{refusal}`, and work goes on")
