"""A simulated accelerator for tests: work is put off, and runs as late or as oddly as events allow.

Its tensors are CPU tensors behind a wrapper, on the device `cpu:1`, so results are those of the CPU
bit for bit. What a GPU would do wrong, it does wrong too: results that nobody waited for are NaN,
memory that was freed is overwritten by its next owner, copies from pinned memory read it late.
"""

from simulated_device.device import SimulatedDevice
from simulated_device.schedules import AT_ONCE, SCHEDULES, Schedule
from simulated_device.simulation import Site, callers

__all__ = ["AT_ONCE", "SCHEDULES", "Schedule", "SimulatedDevice", "Site", "callers"]
