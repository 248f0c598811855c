"""Modules, hooks and the loss that a tensor-parallel rank runs in place of a layer's own.

Capture measures when each tensor is freed, so a local variable that holds a tensor longer than
needed changes the predicted memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.fine_tuning.lora import LoraLinear
from windlass.models.loss import (
    IGNORE_INDEX,
    gradient_of_z_loss,
    in_loss_precision,
    split_weights,
    token_losses,
    weighted_mean,
)
from windlass.models.tensor_parallel.collectives import (
    TensorParallelRank,
    all_gather_autograd,
    all_reduce_autograd,
    all_reduce_identity_grad,
    all_reduce_max,
    local_part,
    local_tokens,
    reduce_scatter_autograd,
)
from windlass.models.tensor_parallel.shard_params import EqualShard


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelLoss:
    """Mean cross-entropy of logits that are sharded over the ranks.

    The loss is the same number on every rank; its gradient is that of the rank's own logits.
    """

    tp_rank: TensorParallelRank
    first_column: int | None
    """First vocabulary entry of the rank's logits; None if it has all entries for its tokens."""
    z_loss: float = 0.0
    """Factor of the mean of `log^2 Z`, whose gradient is added."""

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss in nats per token.

        Args:
            logits: `[b s v/t]`, or `[b s/t v]` of the rank's tokens.
            targets: `Int[b s]`; `IGNORE_INDEX` does not count. Or `Int[b 2 s]`, with weights.
        """
        targets, weights = split_weights(targets)
        if weights is not None:
            return self._weighted(logits, targets, weights)
        counts = targets != IGNORE_INDEX
        if self.first_column is not None:
            losses = self._token_losses(in_loss_precision(logits), targets, self.first_column)
            return losses.masked_fill(~counts, 0).sum() / counts.sum()
        local_sum = token_losses(
            in_loss_precision(logits).flatten(0, 1),
            local_tokens(targets, self.tp_rank).flatten(),
            "sum",
            self.z_loss,
        )
        return all_reduce_identity_grad(local_sum, self.tp_rank.all_group) / counts.sum()

    def _weighted(self, logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """The weighted mean over tokens."""
        wide = in_loss_precision(logits)
        weights = weights.to(wide.dtype)
        if self.first_column is not None:
            losses = self._token_losses(wide, targets, self.first_column)
            return weighted_mean(losses, weights)
        own = local_tokens(targets, self.tp_rank)
        losses = token_losses(wide.flatten(0, 1), own.flatten(), "none", self.z_loss).view_as(own)
        local_sum = (losses * local_tokens(weights, self.tp_rank)).sum()
        return all_reduce_identity_grad(local_sum, self.tp_rank.all_group) / weights.sum()

    def all_tokens(self, logits: Tensor) -> Tensor:
        """Logits of all tokens, `[b s v]` or `[b s v/t]`, from what the last layer gives."""
        sharded = self.first_column is not None
        return logits if sharded else all_gather_autograd(logits, self.tp_rank.token_group)

    def all_columns(self, logits: Tensor) -> Tensor:
        """Logits of all vocabulary entries, `[t v]`, from those of the rank, `[t v/t]`."""
        if self.first_column is None:
            return logits
        group = self.tp_rank.all_group
        count = all_reduce_autograd(logits.new_full((), logits.shape[-1]).double(), group)
        columns = logits.new_zeros((len(logits), int(count)))
        # A sum with zeros is exact, also where ranks have different numbers of entries.
        columns[:, self.first_column :][:, : logits.shape[-1]] = logits
        return all_reduce_autograd(columns, group)

    def _token_losses(self, logits: Tensor, targets: Tensor, first_column: int) -> Tensor:
        """Loss of each token, `[b s]`: `log(sum(exp(z))) - z[target]`."""
        group = self.tp_rank.all_group
        largest = all_reduce_max(logits.detach().amax(-1), group)
        shifted = logits - largest.unsqueeze(-1)
        column = targets - first_column
        on_other_rank = (column < 0) | (column >= logits.shape[-1])
        index = column.masked_fill(on_other_rank, 0).unsqueeze(-1)
        target_logits = shifted.gather(-1, index).squeeze(-1).masked_fill(on_other_rank, 0)
        # One all-reduce for both sums.
        sums = all_reduce_identity_grad(torch.stack((shifted.exp().sum(-1), target_logits)), group)
        losses = sums[0].log() - sums[1]
        if not self.z_loss:
            return losses
        counts = targets != IGNORE_INDEX
        return losses + gradient_of_z_loss(sums[0].log() + largest, counts, self.z_loss)


_FULL = EqualShard()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleShard:
    """The part of a sample `[s ... f]` that a rank has."""

    tokens: tuple[EqualShard, ...] = (_FULL,)
    """Its runs of adjacent tokens, all equally long."""
    features: EqualShard = _FULL


class ShardedDropout(nn.Dropout):
    """Dropout on a rank's part of a sample, where its mask must equal the full sample's mask."""

    shard: SampleShard


class ShardedLayerNorm(nn.LayerNorm):
    """`(x - mean) / sqrt(var + eps) * w + b` over all features, of which a rank has `[... d/c]`."""

    tp_rank: TensorParallelRank

    def forward(self, x: Tensor) -> Tensor:
        """The rank's features of the norm.

        Moments of the ranks' features combine as `mean = avg(m)` and `var = avg(v) + avg(m^2) -
        mean^2`: a difference of squares is taken only of the ranks' means, not of the values.
        Source: Chan, Golub & LeVeque 1983, The American Statistician 37(3), equation 2.1.
        """
        wide = _at_least_float32(x)
        var, mean = torch.var_mean(wide, -1, correction=0)
        moments = torch.stack((var, mean, mean.square()), -1)
        group, columns = self.tp_rank.feature_group, self.tp_rank.columns
        var, mean, square = (all_reduce_autograd(moments, group) / columns).unbind(-1)
        var = var + square - mean.square()
        normed = (wide - mean.unsqueeze(-1)) * (var + self.eps).rsqrt().unsqueeze(-1)
        return _scale_and_shift(normed.to(x.dtype), self.weight, self.bias)


class ShardedRMSNorm(nn.RMSNorm):
    """`x / sqrt(avg(x^2) + eps) * w` over all features, of which a rank has `[... d/c]`."""

    tp_rank: TensorParallelRank

    def forward(self, x: Tensor) -> Tensor:
        """The rank's features of the norm."""
        return _scale_and_shift(self.normalized(x).to(x.dtype), self.weight, None)

    def normalized(self, x: Tensor) -> Tensor:
        """The rank's features before the weight, in float32 at least."""
        wide = _at_least_float32(x)
        local = wide.square().mean(-1, keepdim=True)
        square = all_reduce_autograd(local, self.tp_rank.feature_group) / self.tp_rank.columns
        epsilon = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        return wide * (square + epsilon).rsqrt()


def _at_least_float32(x: Tensor) -> Tensor:
    """Moments are computed in float32 at least, as in torch's own norms."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _scale_and_shift(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


class VocabParallelEmbedding(nn.Embedding):
    """A rank's rows of an embedding: takes all tokens, gives all vectors, summed over the ranks."""

    tp_rank: TensorParallelRank
    first_row: int

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `Int[b s]` to `[b s d]`."""
        rows = tokens - self.first_row
        on_other_rank = (rows < 0) | (rows >= self.weight.shape[0])
        vectors = super().forward(rows.masked_fill(on_other_rank, 0))
        return all_reduce_autograd(
            vectors.masked_fill(on_other_rank.unsqueeze(-1), 0), self.tp_rank.all_group
        )


class VocabParallelLinear(nn.Linear):
    """A rank's columns of the logits: takes the rank's tokens, gives logits of all tokens."""

    tp_rank: TensorParallelRank
    is_sharded: bool

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s/r d]` to logits `[b s v/t]`."""
        return super().forward(all_gather_autograd(x, self.tp_rank.all_group))


class VocabParallelLora(LoraLinear):
    """A rank's columns of the logits with their rows of an adapter's B; A is whole on every rank.

    Each rank gives its part of the gradient of A, whose sum over the ranks is the gradient.
    """

    tp_rank: TensorParallelRank

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s/r d]` to logits `[b s v/t]`."""
        return super().forward(all_gather_autograd(x, self.tp_rank.all_group))


class GridColumnLinear(nn.Linear):
    """Column-parallel linear in a grid: takes the rank's features, gives its shard of outputs."""

    tp_rank: TensorParallelRank
    is_sharded: bool
    """Whether the ranks of one row shard its outputs; otherwise each has all of them."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d/c]` to `[b s f/t]`, or `[b s f/r]` if each has all of its row."""
        reduce = reduce_scatter_autograd if self.is_sharded else all_reduce_autograd
        y = reduce(functional.linear(x, self.weight), self.tp_rank.feature_group)
        return y if self.bias is None else y + self.bias


class GridLinear(nn.Linear):
    """Linear outside of regions in a grid: takes and gives the rank's features of each token."""

    tp_rank: TensorParallelRank

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s/r d/c]` to `[b s/r d/c]`."""
        group = self.tp_rank.feature_group
        y = reduce_scatter_autograd(functional.linear(x, self.weight), group)
        return y if self.bias is None else y + self.bias


class ScoreLinear(nn.Linear):
    """Linear in a region of a grid whose outputs all ranks have: it takes the rank's features."""

    tp_rank: TensorParallelRank

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d/c]` to `[b s o]`."""
        y = all_reduce_autograd(functional.linear(x, self.weight), self.tp_rank.feature_group)
        return y if self.bias is None else y + self.bias


class RowLinear(nn.Linear):
    """Row-parallel linear: takes a rank's inputs and gives a partial sum."""

    tp_rank: TensorParallelRank
    is_sharded: bool
    """Whether the ranks of one row shard its inputs; otherwise each has all of them."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s f/t]` to a partial sum of `[b s d/c]`."""
        # Each rank adds its share of the bias. If only the first rank added it, ranks would run
        # different graphs, and a compiler might order their collectives differently.
        bias = None if self.bias is None else self.bias * (1 / self.tp_rank.rows)
        x = all_gather_autograd(x, self.tp_rank.feature_group) if self.is_sharded else x
        return functional.linear(x, self.weight, bias)


@dataclass(frozen=True, slots=True)
class GatherTokens:
    """Forward pre-hook that all-gathers the tokens of a region's first argument."""

    tp_rank: TensorParallelRank
    positions: int | None
    """Tokens of a sample, of which ranks may have more with those that fill them up; None takes
    all."""

    def __call__(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with all tokens in the first tensor."""
        if args:
            return (self._all_tokens(args[0]), *args[1:]), kwargs
        first = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
        return args, kwargs | {first: self._all_tokens(kwargs[first])}

    def _all_tokens(self, x: Tensor) -> Tensor:
        gathered = all_gather_autograd(x, self.tp_rank.token_group)
        return gathered if self.positions is None else gathered[:, : self.positions]


@dataclass(frozen=True, slots=True)
class ScatterTokens:
    """Forward hook that sums a region's output over the ranks and keeps the rank's tokens."""

    tp_rank: TensorParallelRank

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        """The reduce-scattered output; of a tuple only its first tensor."""
        return _with_first(output, self._own_tokens)

    def _own_tokens(self, x: Tensor) -> Tensor:
        filled = fill_tokens(x, self.tp_rank.rows)
        return reduce_scatter_autograd(filled, self.tp_rank.token_group)


@dataclass(frozen=True, slots=True)
class KeepLocalPart:
    """Forward hook that keeps the rank's part of an output that all ranks have."""

    tp_rank: TensorParallelRank

    def __call__(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:  # noqa: ANN401
        """The rank's part of the output, contiguous; of a tuple only of its first tensor."""
        return _with_first(output, self._own_part)

    def _own_part(self, output: Tensor) -> Tensor:
        # A copy, because a view would keep all tokens alive as long as later layers need its own.
        filled = fill_tokens(output, self.tp_rank.rows)
        return local_part(filled, self.tp_rank).clone(memory_format=torch.contiguous_format)


def _with_first(output: Any, change: Callable[[Tensor], Tensor]) -> Any:  # noqa: ANN401
    """An output with its tensor, or the first of a tuple, changed."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def fill_tokens(x: Tensor, rows: int) -> Tensor:
    """`[b s ... d]` with zeros behind its tokens, so that as many rows share them equally."""
    missing = -x.shape[1] % rows
    if not missing:
        return x
    return torch.cat((x, x.new_zeros(len(x), missing, *x.shape[2:])), dim=1)
