from .block_linear_ops import block_linear, implementation
from .block_sparse_linear import BlockSparseLinear
from .feed_forward_section import block_feed_forward
from .levels import BlockPart, WeightPart, column_groups, kept_counts, kept_share
from .mask_file import LayerMask, kept_rows, load_masks, save_masks
from .masked_linear import MaskedLinear, MaskedPart
from .native_library import BuildProgress, build_native_library
from .regrow import BlockGrid, MaskUpdate, largest_blocks, mask_update, random_scores
from .schedule import (
    Leg, describe_leg, describe_legs, drop_share, last_step_of_leg, leg_before_others, leg_of_step,
    legs, level_share, sparsity_of_leg, updates_masks,
)  # fmt: skip
from .section_sizes import SECTION_ACTIVATION, SectionSizes

__all__ = [
    "SECTION_ACTIVATION", "BlockGrid", "BlockPart", "BlockSparseLinear", "BuildProgress",
    "LayerMask", "Leg", "MaskUpdate", "MaskedLinear", "MaskedPart", "SectionSizes", "WeightPart",
    "block_feed_forward", "block_linear", "build_native_library", "column_groups", "describe_leg",
    "describe_legs", "drop_share", "implementation", "kept_counts", "kept_rows", "kept_share",
    "largest_blocks", "last_step_of_leg", "leg_before_others", "leg_of_step", "legs", "level_share",
    "load_masks", "mask_update", "random_scores", "save_masks", "sparsity_of_leg", "updates_masks",
]  # fmt: skip
