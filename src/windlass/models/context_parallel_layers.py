"""The layer that one context-parallel rank runs: all weights, and its part of every sequence."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from windlass.models import bert
from windlass.models.attention import Attention
from windlass.models.context_parallel import ContextParallelRank
from windlass.models.experts.routing import Router
from windlass.models.init_weights import meta_copy
from windlass.models.sentences import has_sentence_head
from windlass.models.tensor_parallel.parallel_modules import SampleShard, ShardedDropout
from windlass.models.transformer import (
    Block,
    Embedding,
    HalfBlock,
    Head,
    ParallelBlock,
    set_first_positions,
)


def can_divide_sequences(layers: Sequence[nn.Module]) -> bool:
    """Whether tokens of a model depend on others by its attention, and by their experts, alone."""
    kinds = (
        Embedding, Block, HalfBlock, ParallelBlock, Head,
        bert.BertEmbedding, bert.BertBlock, bert.BertHalfBlock, bert.BertHead,
    )  # fmt: skip
    return all(isinstance(layer, kinds) and not has_sentence_head(layer) for layer in layers)


def divide_sequence(layer: nn.Module, rank: ContextParallelRank, sequence: int) -> nn.Module:
    """A copy of a layer on the meta device for one rank's tokens; the layer itself if all are.

    Args:
        layer: the layer, or its tensor-parallel shard, on any device; not changed.
    """
    if rank.degree == 1:
        return layer
    local = meta_copy(layer)
    set_first_positions(local, rank.first_positions(sequence // rank.degree))
    for path, module in list(local.named_modules()):
        if isinstance(module, (Attention, Router)):
            module.context = rank
        elif isinstance(module, nn.Dropout):
            parent, _, name = path.rpartition(".")
            dropout = ShardedDropout(module.p)
            dropout.shard = _runs_of(module, rank)
            setattr(local.get_submodule(parent), name, dropout)
    return local


def _runs_of(dropout: nn.Dropout, rank: ContextParallelRank) -> SampleShard:
    """The part of a whole sample that a dropout of one rank sees."""
    if not isinstance(dropout, ShardedDropout):
        return SampleShard(tokens=rank.runs())
    # A tensor-parallel rank has one part of this rank's tokens.
    (part,) = dropout.shard.tokens
    return replace(dropout.shard, tokens=rank.runs(part))
