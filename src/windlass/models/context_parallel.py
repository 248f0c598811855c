"""What one context-parallel rank has of each sequence, and how its attention sees the rest.

A sequence is cut into `2 c` runs of equal length. Rank k has the runs k and `2 c - 1 - k`, so that
under a causal mask all ranks compute equally much. Before attention the ranks gather the keys and
values of all tokens, whose gradients are scattered back; queries and all other work stay apart.
Source: Llama Team 2024, arXiv:2407.21783, section 3.3.2.

Shape letters: b batch, s sequence, c ranks, g heads of keys, k head width.

Usually that is one run from position 0 on; behind cached tokens it begins later, and a
context-parallel rank has two runs of equal length.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from windlass.models.tensor_parallel.collectives import TensorParallelGroup, all_gather_autograd
from windlass.models.tensor_parallel.shard_params import EqualShard
from windlass.schema import CONTEXT_RUNS

_Array = TypeVar("_Array", bound=npt.NDArray[Any])

_WHOLE = EqualShard()


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelRank:
    """One of the ranks that divide the tokens of each sequence."""

    degree: int = 1
    """Context-parallel degree c, the number of ranks."""
    index: int = 0
    """Index of this rank, from 0."""
    group_name: str = ""
    """Name of the process group of all c ranks, in order."""

    def runs(self, part: EqualShard = _WHOLE) -> tuple[EqualShard, ...]:
        """The runs of adjacent tokens that this rank has, as shards of a whole sequence, in order.

        Args:
            part: the part of its tokens that is meant, as each of several tensor-parallel ranks has
                one.
        """
        if self.degree == 1:
            return (part,)
        last = CONTEXT_RUNS * self.degree - 1
        own = (self.index, last - self.index)
        # Cut into as few equal pieces as possible, so that runs and parts both have whole ones.
        common = gcd(CONTEXT_RUNS, part.total)
        per_run, per_part = part.total // common, CONTEXT_RUNS // common
        pieces = range(part.number * per_part, (part.number + 1) * per_part)
        total = CONTEXT_RUNS * self.degree * per_run
        return tuple(
            EqualShard(own[piece // per_run] * per_run + piece % per_run, total) for piece in pieces
        )

    def first_positions(self, count: int, part: EqualShard = _WHOLE) -> tuple[int, ...]:
        """Position of the first token of each of its runs.

        Args:
            count: number of its tokens of a sequence.
            part: the part of its tokens that is meant.
        """
        runs = self.runs(part)
        length = count // len(runs)
        return tuple(run.number * length for run in runs)

    def own_tokens(self, values: _Array) -> _Array:
        """This rank's tokens `[b ... s/c]` of `[b ... s]`; all values where nothing is divided."""
        if self.degree == 1:
            return values
        length = values.shape[-1] // (CONTEXT_RUNS * self.degree)
        firsts = (run.number * length for run in self.runs())
        parts = [values[..., first : first + length] for first in firsts]
        return cast("_Array", np.concatenate(parts, axis=-1))

    def all_tokens(self, own: Tensor) -> Tensor:
        """All tokens `[b s ...]` in their order, gathered from each rank's `[b s/c ...]`.

        Its gradient is this rank's part of the sum of all ranks' gradients.
        """
        group = TensorParallelGroup(rows=self.degree, name=self.group_name)
        by_rank = all_gather_autograd(own, group).unflatten(1, (self.degree, CONTEXT_RUNS, -1))
        early, late = by_rank.unbind(2)
        return torch.cat((early, late.flip(1)), dim=1).flatten(1, 2)


FROM_START: tuple[int, ...] = (0,)
"""The first position of the only run."""


def count_in_runs(
    count: int, firsts: tuple[int, ...], device: torch.device, *, dtype: torch.dtype
) -> Tensor:
    """Numbers that rise by one within each of some equally long runs, `[count]`.

    Args:
        count: how many numbers, a multiple of the number of runs.
        firsts: the first number of each run.
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
