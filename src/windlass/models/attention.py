"""Attention, softmax(Q Kᵀ / √k) V, by one of torch's fused kernels or by plain matrix products.

On CPUs the plain products are often faster: they run on the same kernels as the layer's other
products, and keep the probabilities, from which a fused kernel's backward pass computes the scores
once more. The guide to attention has what was measured.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from windlass.models.config import TransformerConfig
from windlass.models.context_parallel import ContextParallelRank
from windlass.models.modules import (
    Projection,
    RotaryEmbedding,
    build_head_norm,
    residual_projection,
)
from windlass.models.positions.documents import SeesDocuments, document_lengths, hidden_documents
from windlass.models.positions.visible_tokens import (
    VisibleTokens,
    hidden_tokens,
    limits_that_hide,
    seen_keys,
)
from windlass.models.sparsity.imported_masks import RoleOutputs
from windlass.models.sparsity.sparse_layers import Sparsifiable
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, TensorShardable
from windlass.schema import AttentionBackend, attention_tiles

_FUSED_KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}


class Attention(SeesDocuments, TensorShardable, Sparsifiable):
    """Multi-head self-attention, causal or not, optionally with grouped queries.

    Attention weights are never dropped: the fused kernels that make attention fast on every device
    draw such a mask internally, so that it could not be reproduced from a key.
    """

    cache: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Keeps keys and values, and returns them with those of earlier tokens; None keeps none."""
    context: ContextParallelRank | None = None
    """The rank whose tokens it is given; None if it is given whole sequences."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.query_width = config.heads * config.head_width
        self.kv_width = config.kv_heads * config.head_width
        self.causal = config.causal
        self.window = config.sliding_window
        self.window_tokens = config.visible_tokens
        self.scale = config.scored_width**-0.5
        self.softcap = config.attention_softcap
        self.backend: AttentionBackend = "flash"
        outputs = self.query_width + 2 * self.kv_width
        rotated = config.rotated_width
        self.input = Projection(config.width, outputs, bias=config.attention_bias)
        self.query_norm = build_head_norm(config) if config.qk_norm else None
        self.key_norm = build_head_norm(config) if config.qk_norm else None
        self.rotary = None
        if rotated:
            self.rotary = RotaryEmbedding(rotated, config.rotary_base, config.rope_scaling)
        bias = config.has_projection_bias
        self.output = residual_projection(config, self.query_width, bias=bias)

    @property
    def visible(self) -> VisibleTokens:
        """Which tokens each sees, by the causal mask and the sliding window."""
        return self.window_tokens or (None, 0 if self.causal else None)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        parts = self.input(x).split([self.query_width, self.kv_width, self.kv_width], dim=-1)
        query, key, value = (part.unflatten(-1, (-1, self.head_width)) for part in parts)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (
            part.transpose(1, 2) for part in (query, key, value)
        )  # [b h s k], [b g s k], [b g s k]
        if self.rotary is not None:
            query, key = self.rotary(query, key, self.documents)
        if self.cache is not None:
            key, value = self.cache(key, value)
        if self.context is not None:
            mixed = self._attend_to_all(query, key, value, self.context)
        elif self.documents is None:
            mixed = self._attend(query, key, value)
        else:
            mixed = self._attend_apart(query, key, value, self.documents)
        return self.output(mixed.transpose(1, 2).flatten(-2))

    def _attend_to_all(
        self, query: Tensor, key: Tensor, value: Tensor, rank: ContextParallelRank
    ) -> Tensor:
        """Attention of this rank's tokens to those of all ranks, one run of queries at a time."""
        # One collective brings both: `[b s/c g 2 k]` to `[b s g 2 k]`.
        own = torch.cat((key, value), dim=-1).transpose(1, 2)
        keys, values = rank.all_tokens(own).transpose(1, 2).chunk(2, dim=-1)
        mixed = []
        firsts = rank.first_positions(query.shape[2])
        for first, queries in zip(firsts, query.chunk(len(firsts), dim=2), strict=True):
            asking = range(first, first + queries.shape[2])
            if self.documents is None:
                within = range(keys.shape[2])
                mixed.append(self._attend_from(queries, keys, values, asking, within))
            else:
                rows = zip(queries.split(1), keys.split(1), values.split(1), strict=True)
                pairs = zip(rows, self.documents, strict=True)
                parts = [self._attend_apart_from(*row, asking, ids) for row, ids in pairs]
                mixed.append(torch.cat(parts))
        return torch.cat(mixed, dim=2)

    def _attend_from(
        self, queries: Tensor, keys: Tensor, values: Tensor, asking: range, within: range
    ) -> Tensor:
        """Attention of adjacent tokens, at positions `asking`, to those of the keys at `within`."""
        seen = seen_keys(asking, within, self.visible)
        k, v = (each[:, :, seen.start : seen.stop] for each in (keys, values))
        if seen == asking:
            return self._attend(queries, k, v)
        hidden = self._hidden_from(queries, asking, seen)
        return self._attend_masked(queries, k, v, hidden, is_causal=False)

    def _attend_apart_from(
        self, queries: Tensor, keys: Tensor, values: Tensor, asking: range, documents: Tensor
    ) -> Tensor:
        """The same within each document of one row, of which `documents` has all tokens' ids."""
        if _divides_rows(queries):
            mixed, first = [], 0
            for length in document_lengths(documents):
                begin, end = max(first, asking.start), min(first + length, asking.stop)
                if begin < end:
                    part = queries[:, :, begin - asking.start : end - asking.start]
                    within = range(first, first + length)
                    mixed.append(self._attend_from(part, keys, values, range(begin, end), within))
                first += length
            return torch.cat(mixed, dim=2)
        seen = seen_keys(asking, range(keys.shape[2]), self.visible)
        k, v = (each[:, :, seen.start : seen.stop] for each in (keys, values))
        own = documents[asking.start : asking.stop]
        hidden = hidden_documents(own, documents[seen.start : seen.stop], queries.dtype)
        limits = limits_that_hide(asking, seen, self.visible)
        mask = hidden_tokens(asking, seen, queries, limits)
        mask = hidden if mask is None else mask + hidden
        return self._attend_masked(queries, k, v, mask, is_causal=False)

    def _hidden_from(self, queries: Tensor, asking: range, seen: range) -> Tensor | None:
        """The mask of some adjacent tokens, at positions `asking`, over those at `seen`."""
        is_plain = self.causal and self.window is None and self.softcap is None
        if is_plain and self.backend == "flash" and queries.device.type not in ("cpu", "meta"):
            # An accelerator's kernels know this mask by name, and skip what it hides. The import
            # loads much of torch's compiler.
            from torch.nn.attention.bias import causal_lower_right

            return causal_lower_right(len(asking), len(seen))
        return hidden_tokens(asking, seen, queries, limits_that_hide(asking, seen, self.visible))

    def _attend_apart(self, query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
        """Attention within each document of each row.

        On a CPU each document is computed by itself. Compiled code, whose shapes are fixed, and
        other devices, which would wait for the lengths, compute the whole row under a mask.
        """
        mixed = []
        for row, ids in enumerate(documents):
            q, k, v = (each[row : row + 1] for each in (query, key, value))
            if _divides_rows(query):
                lengths = document_lengths(ids)
                pieces = zip(*(part.split(lengths, dim=2) for part in (q, k, v)), strict=True)
                mixed.append(torch.cat([self._attend(*piece) for piece in pieces], dim=2))
            else:
                mixed.append(self._attend(q, k, v, hidden_documents(ids, ids, query.dtype)))
        return torch.cat(mixed)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """Attention of one document, or of several whose tokens `hidden`, `[s s]`, keeps apart."""
        has_mask = any(each is not None for each in (self.window, self.softcap, hidden))
        # A token that stands alone behind others sees all that the cache gives.
        is_masked = query.shape[2] > 1 and has_mask
        if self.backend == "math" and is_masked and hidden is None and self.softcap is None:
            return _plain_attention(query, key, value, None, visible=self.visible, scale=self.scale)
        mask = None
        if is_masked:
            tokens = range(query.shape[2])
            mask = hidden_tokens(tokens, tokens, query, self.visible)
        if hidden is not None:
            mask = hidden if mask is None else mask + hidden
        return self._attend_masked(query, key, value, mask, is_causal=self.causal)

    def _attend_masked(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, is_causal: bool
    ) -> Tensor:
        """Attention under a mask, or a causal one without it."""
        if self.softcap is not None:
            return _capped_attention(
                query, key, value, mask, scale=self.scale, softcap=self.softcap
            )
        return attend(
            query, key, value, mask, is_causal=is_causal, backend=self.backend, scale=self.scale
        )

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has whole heads: its shard of the queries, the keys and the values."""
        parts = (self.query_width, self.kv_width, self.kv_width)
        return {
            "": ShardingRule(style="region"),
            "input": ShardingRule(style="column", parts=parts, unit=self.head_width),
            "output": ShardingRule(style="row", unit=self.head_width),
            "query_width": ShardingRule(style="count"),
            "kv_width": ShardingRule(style="count"),
        }

    def sparse_roles(self) -> Mapping[str, RoleOutputs]:
        """Queries, keys and values are parts of one weight."""
        query, kv = self.query_width, self.kv_width
        return {
            "input": (("query", query), ("key", kv), ("value", kv)),
            "output": (("projection", self.output.out_features),),
        }


def set_attention_backend(layer: nn.Module, backend: AttentionBackend) -> None:
    """Says how a layer computes attention; modules of a user's own stay as they are.

    Args:
        layer: changed in place.
    """
    for module in layer.modules():
        if isinstance(module, Attention):
            module.backend = backend


def chooses_attention(layer: nn.Module) -> bool:
    """Whether a layer computes attention as `set_attention_backend` says."""
    return any(
        isinstance(module, Attention) and module.softcap is None for module in layer.modules()
    )


def sliding_window(layer: nn.Module) -> tuple[int, int] | None:
    """How many tokens before and behind it a token sees at most, where a plan chooses attention."""
    windows = (
        module.window_tokens
        for module in layer.modules()
        if isinstance(module, Attention) and module.softcap is None
    )
    return next(windows, None)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool,
    backend: AttentionBackend,
    scale: float | None = None,
) -> Tensor:
    """Attention; maps `[b h s k]`, `[b g s k]` and `[b g s k]` to `[b h s k]`.

    Args:
        key: keys, of as many heads or of fewer, g, that divide them.
        value: values, of as many heads as the keys.
        mask: from `hidden_tokens`, where tokens see fewer than `is_causal` says.
        is_causal: whether tokens see none that come later.
        backend: how it is computed; `flash` leaves the choice among fused kernels to torch.
        scale: factor of the scores; None means 1 / sqrt(k).
    """
    # A token that stands alone behind others is the last one, and sees them all.
    is_causal = is_causal and query.shape[2] > 1
    if backend == "math":
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        visible = None, 0 if is_causal else None
        return _plain_attention(query, key, value, mask, visible=visible, scale=scale)
    kernel = _FUSED_KERNELS.get(backend)
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal and mask is None, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip


def _plain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    visible: VisibleTokens,
    scale: float,
) -> Tensor:
    """Attention by two matrix products with a softmax between them.

    Where tokens see none behind them, or only those near them, the queries are divided into tiles,
    so that each is multiplied with the keys that any of its tokens sees: under a causal mask four
    tiles skip 3/8 of the products and of the probabilities.
    """
    batch, heads, tokens, width = query.shape
    repeats = heads // key.shape[1]
    if repeats > 1:
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    # Copied once here, they need not be copied for each tile.
    query, key, value = (
        part.reshape(-1, part.shape[2], width) for part in (query * scale, key, value)
    )  # [b*h s k]
    key = key.transpose(1, 2)
    if mask is not None or key.shape[2] != tokens:
        scores = torch.bmm(query, key)
        scores = scores if mask is None else scores + mask
        return torch.bmm(scores.softmax(dim=-1), value).unflatten(0, (batch, heads))
    tiles = []
    for (first, end), (begin, seen) in attention_tiles(tokens, *visible):
        scores = torch.bmm(query[:, first:end], key[:, :, begin:seen])
        queries, keys = range(first, end), range(begin, seen)
        limits = limits_that_hide(queries, keys, visible)
        hidden = hidden_tokens(queries, keys, scores, limits)
        probabilities = (scores if hidden is None else scores + hidden).softmax(dim=-1)
        tiles.append(torch.bmm(probabilities, value[:, begin:seen]))
    return torch.cat(tiles, dim=1).unflatten(0, (batch, heads))


def _divides_rows(queries: Tensor) -> bool:
    """Whether the documents of a row are computed one by one.

    Compiled code has fixed shapes, and an accelerator would wait for the lengths.
    """
    return queries.device.type == "cpu" and not torch.compiler.is_compiling()


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scale: float, softcap: float
) -> Tensor:
    """Attention whose scores stay below a cap, which no fused kernel of torch computes.

    Source: Gemma Team 2024, arXiv:2408.00118, section 2.
    """
    batch, heads, tokens, width = query.shape
    # Queries that share keys lie one after another, so that keys need not be repeated.
    query, key, value = (
        part.reshape(batch * key.shape[1], -1, width) for part in (query, key, value)
    )
    scores = torch.bmm(query * (scale / softcap), key.transpose(1, 2)).tanh() * softcap
    scores = scores.unflatten(1, (-1, tokens))  # [b*g h/g s s]
    if mask is not None:
        scores = scores + mask
    mixed = torch.bmm(scores.softmax(dim=-1).flatten(1, 2), value)
    return mixed.view(batch, heads, tokens, width)
