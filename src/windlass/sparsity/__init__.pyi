from .block_linear import (
    block_linear,
)
from .block_masks import (
    BlockPart,
    column_groups,
)
from .block_sparse_linear import (
    BlockSparseLinear,
)
from .masked_linear import (
    MaskedLinear,
    MaskedPart,
)

__all__ = [
    "BlockPart",
    "BlockSparseLinear",
    "MaskedLinear",
    "MaskedPart",
    "block_linear",
    "column_groups",
]
