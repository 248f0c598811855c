"""What one context-parallel rank has of each sequence, and how its attention sees the rest.

A sequence is cut into `2 c` runs of equal length. Rank k has the runs k and `2 c - 1 - k`, so that
under a causal mask all ranks compute equally much. Before attention the ranks gather the keys and
values of all tokens, whose gradients are scattered back; queries and all other work stay apart.
Source: Llama Team 2024, arXiv:2407.21783, section 3.3.2.

Shape letters: b batch, s sequence, c ranks, g heads of keys, k head width.
"""

from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from windlass.models.tensor_parallel.collectives import TensorParallelGroup, all_gather_autograd
from windlass.schema import CONTEXT_RUNS

_Array = TypeVar("_Array", bound=npt.NDArray[Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelRank:
    """One of the ranks that divide the tokens of each sequence."""

    degree: int = 1
    """Context-parallel degree c, the number of ranks."""
    index: int = 0
    """Index of this rank, from 0."""
    group_name: str = ""
    """Name of the process group of all c ranks, in order."""

    @property
    def runs(self) -> tuple[int, ...]:
        """Which of the `2 c` runs of a sequence are this rank's, ascending."""
        last = CONTEXT_RUNS * self.degree - 1
        return (self.index, last - self.index) if self.degree > 1 else (0,)

    def first_positions(self, count: int) -> tuple[int, ...]:
        """Position of the first token of each of its runs.

        Args:
            count: number of its tokens of a sequence.
        """
        length = count // len(self.runs)
        return tuple(run * length for run in self.runs)

    def own_tokens(self, values: _Array) -> _Array:
        """This rank's tokens `[b s/c]` of `[b s]`; all values where nothing is divided."""
        if self.degree == 1:
            return values
        length = values.shape[1] // (CONTEXT_RUNS * self.degree)
        parts = [values[:, run * length : (run + 1) * length] for run in self.runs]
        return cast("_Array", np.concatenate(parts, axis=1))

    def all_tokens(self, own: Tensor) -> Tensor:
        """All tokens `[b s ...]` in their order, gathered from each rank's `[b s/c ...]`.

        Its gradient is this rank's part of the sum of all ranks' gradients.
        """
        group = TensorParallelGroup(rows=self.degree, name=self.group_name)
        by_rank = all_gather_autograd(own, group).unflatten(1, (self.degree, CONTEXT_RUNS, -1))
        early, late = by_rank.unbind(2)
        return torch.cat((early, late.flip(1)), dim=1).flatten(1, 2)


def hidden_tokens(
    queries: range, keys: range, like: Tensor, *, is_causal: bool, window: int | None
) -> Tensor | None:
    """What is added to scores, `[queries keys]`: minus infinity where a token does not see another.

    Args:
        queries: positions of the tokens that see.
        keys: positions of the tokens that are seen.
        like: a tensor of the type of scores, on their device.
        is_causal: whether tokens see none that come later.
        window: how many positions away a token is no longer seen; None sees all.

    Returns:
        None if every token sees all.
    """
    if window is None and (not is_causal or keys[-1] <= queries[0]):
        return None
    shape = len(queries), len(keys)
    hidden = torch.full(shape, float("-inf"), dtype=like.dtype, device=like.device)
    ahead = queries.start - keys.start
    later = hidden.triu(ahead + (1 if is_causal or window is None else window))
    return later if window is None else later + hidden.tril(ahead - window)


def seen_keys(queries: range, sequence: int, *, is_causal: bool, window: int | None) -> range:
    """Positions of the keys that any of some adjacent queries sees.

    Args:
        queries: positions of the queries.
        sequence: tokens of the sequence.
        is_causal: whether tokens see none that come later.
        window: how many positions away a token is no longer seen; None sees all.
    """
    first = 0 if window is None else max(0, queries.start - window + 1)
    end = sequence if window is None else min(sequence, queries.stop + window - 1)
    return range(first, queries.stop if is_causal else end)
