from .block_linear import (
    block_linear,
)

__all__ = [
    "block_linear",
]
