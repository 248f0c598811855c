from .block_linear_ops import (
    block_linear,
    implementation,
)
from .block_masks import (
    BlockPart,
    column_groups,
)
from .block_sparse_linear import (
    BlockSparseLinear,
)
from .levels import (
    WeightPart,
    kept_counts,
    kept_share,
)
from .masked_linear import (
    MaskedLinear,
    MaskedPart,
)
from .native_library import (
    BuildProgress,
    build_native_library,
)
from .regrow import (
    BlockGrid,
    MaskUpdate,
    largest_blocks,
    mask_update,
    random_scores,
)
from .schedule import (
    Leg,
    drop_share,
    leg_of_step,
    legs,
    level_share,
    sparsity_of_leg,
    updates_masks,
)

__all__ = [
    "BlockGrid",
    "BlockPart",
    "BlockSparseLinear",
    "BuildProgress",
    "Leg",
    "MaskUpdate",
    "MaskedLinear",
    "MaskedPart",
    "WeightPart",
    "block_linear",
    "build_native_library",
    "column_groups",
    "drop_share",
    "implementation",
    "kept_counts",
    "kept_share",
    "largest_blocks",
    "leg_of_step",
    "legs",
    "level_share",
    "mask_update",
    "random_scores",
    "sparsity_of_leg",
    "updates_masks",
]
