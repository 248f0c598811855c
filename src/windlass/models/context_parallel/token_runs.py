"""Runs of adjacent tokens, which are all that a module computes with at a time.

Usually that is one run from position 0 on; behind cached tokens it begins later, and a
context-parallel rank has two runs of equal length.
"""

import torch
from torch import Tensor

FROM_START: tuple[int, ...] = (0,)
"""The first position of the only run."""


def count_in_runs(
    count: int, firsts: tuple[int, ...], device: torch.device, *, dtype: torch.dtype
) -> Tensor:
    """Numbers that rise by one within each of some equally long runs, `[count]`.

    Args:
        count: how many numbers, a multiple of the number of runs.
        firsts: the first number of each run.
        device: where they are wanted.
    """
    length = count // len(firsts)
    runs = [torch.arange(first, first + length, device=device, dtype=dtype) for first in firsts]
    return runs[0] if len(runs) == 1 else torch.cat(runs)


def at_positions(values: Tensor, count: int, firsts: tuple[int, ...], *, dim: int = 0) -> Tensor:
    """What `values` has for some tokens of a sequence, such as rows of a table of positions.

    Args:
        values: something for each token of a whole sequence, along `dim`.
        count: number of tokens, a multiple of the number of runs.
        firsts: position of the first token of each run.
        dim: the dimension of tokens.
    """
    length = count // len(firsts)
    runs = [values.narrow(dim, first, length) for first in firsts]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim=dim)
