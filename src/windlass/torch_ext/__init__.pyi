from .compile_cache import compile_method, sealed_compile_cache
from .cpu_allocator import (
    FREE_MEMORY_BYTES, allocator_stats, install_allocator, set_memory_limit, trim_heap,
)  # fmt: skip
from .device import Device
from .device_kinds import CpuDevice, CudaDevice, accelerator_device, device_for
from .numeric_settings import missing_deterministic_kernel, numerics, set_deterministic_libraries
from .pinned_memory import PinnedMemory
from .process_memory import bytes_left_under_limits, resident_bytes
from .quantized_moments import (
    PART_ELEMENTS, MomentCodec, StochasticRounding, StoredMoment, block_count, dither_key,
    moment_dtypes,
)  # fmt: skip
from .streams import Event, RecordedWork, Stream

__all__ = [
    "FREE_MEMORY_BYTES", "PART_ELEMENTS", "CpuDevice", "CudaDevice", "Device", "Event",
    "MomentCodec", "PinnedMemory", "RecordedWork", "StochasticRounding", "StoredMoment", "Stream",
    "accelerator_device", "allocator_stats", "block_count", "bytes_left_under_limits",
    "compile_method", "device_for", "dither_key", "install_allocator",
    "missing_deterministic_kernel", "moment_dtypes", "numerics", "resident_bytes",
    "sealed_compile_cache", "set_deterministic_libraries", "set_memory_limit", "trim_heap",
]  # fmt: skip
