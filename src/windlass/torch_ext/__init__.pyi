from .compile_cache import (
    sealed_compile_cache,
)
from .cpu_allocator import (
    FREE_MEMORY_BYTES,
    AllocatorStats,
    allocator_stats,
    install_allocator,
    set_memory_limit,
    trim_heap,
)
from .quantized_moments import (
    PART_ELEMENTS,
    MomentCodec,
    StoredMoment,
    block_count,
    dither_key,
    moment_dtypes,
)

__all__ = [
    "FREE_MEMORY_BYTES",
    "PART_ELEMENTS",
    "AllocatorStats",
    "MomentCodec",
    "StoredMoment",
    "allocator_stats",
    "block_count",
    "dither_key",
    "install_allocator",
    "moment_dtypes",
    "sealed_compile_cache",
    "set_memory_limit",
    "trim_heap",
]
