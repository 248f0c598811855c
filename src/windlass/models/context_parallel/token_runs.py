"""Runs of adjacent tokens, which are all that a module computes with at a time.

Usually that is one run from position 0 on; behind cached tokens it begins later, and a
context-parallel rank has two runs of equal length.
"""

import torch
from torch import Tensor

FROM_START: tuple[int, ...] = (0,)
"""The first position of the only run."""


def token_positions(count: int, firsts: tuple[int, ...], device: torch.device) -> Tensor:
    """The position of each token as a float32 number, `Float[count]`: angles are computed with it.

    Args:
        count: number of tokens, a multiple of the number of runs.
        firsts: position of the first token of each run.
        device: where they are wanted.
    """
    length = count // len(firsts)
    runs = [
        torch.arange(first, first + length, device=device, dtype=torch.float32) for first in firsts
    ]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def rows_at_positions(table: Tensor, count: int, firsts: tuple[int, ...]) -> Tensor:
    """The rows of a table of learned positions `[s d]` for some tokens, `[count d]`.

    Args:
        table: a row for each position.
        count: number of tokens, a multiple of the number of runs.
        firsts: position of the first token of each run.
    """
    length = count // len(firsts)
    runs = [table[first : first + length] for first in firsts]
    return runs[0] if len(runs) == 1 else torch.cat(runs)
