from .cpu_allocator import (
    FREE_MEMORY_FRACTION as FREE_MEMORY_FRACTION,
    install_allocator as install_allocator,
    set_memory_limit as set_memory_limit,
    trim_heap as trim_heap,
)
from .quantized_moments import (
    PART_ELEMENTS as PART_ELEMENTS,
    MomentCodec as MomentCodec,
    StoredMoment as StoredMoment,
    block_count as block_count,
    dither_key as dither_key,
    moment_dtypes as moment_dtypes,
)
