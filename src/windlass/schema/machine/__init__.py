"""Machines: hosts, devices with rates and memory, links, and the software that drives them."""

from windlass.schema.machine.device import Device, Tier
from windlass.schema.machine.machine import (
    HEAD_PARTS, MAX_CONTENTION, TYPICAL_HEAD_WIDTH, ExecutionModel, Link, Machine, MachinePart,
)  # fmt: skip
from windlass.schema.machine.provenance import ChosenDefault, Source, source_of
from windlass.schema.machine.rates import (
    CACHED_BYTES, AttentionRate, Curve, MatmulRate, MomentRate, OpRate, Point, ProductRate,
    ProductRole, SparseProductRate, TileRate,
)  # fmt: skip
from windlass.schema.machine.stack import (
    OWN_STACK, AttentionKernel, Capabilities, Fusion, Stack, StackMemory,
)  # fmt: skip

__all__ = [
    "CACHED_BYTES", "HEAD_PARTS", "MAX_CONTENTION", "OWN_STACK", "TYPICAL_HEAD_WIDTH",
    "AttentionKernel", "AttentionRate", "Capabilities", "ChosenDefault", "Curve", "Device",
    "ExecutionModel", "Fusion", "Link", "Machine", "MachinePart", "MatmulRate", "MomentRate",
    "OpRate", "Point", "ProductRate", "ProductRole", "Source", "SparseProductRate", "Stack",
    "StackMemory", "Tier", "TileRate", "source_of",
]  # fmt: skip
