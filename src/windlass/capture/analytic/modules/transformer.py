"""The layers of a transformer, which mirror `models.transformer` and `models.bert`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

from windlass.capture.analytic.modules.attention import Attention
from windlass.capture.analytic.modules.experts import feed_forward
from windlass.capture.analytic.modules.linears import FeatureLinear
from windlass.capture.analytic.modules.norms import Norm
from windlass.capture.analytic.modules.vocabulary import Logits, Vocabulary
from windlass.capture.analytic.ops.collectives import Rank
from windlass.capture.analytic.ops.elementwise import add, divide, dropout, gelu, scale, tanh
from windlass.capture.analytic.ops.views import clone, narrow, select
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.tensor import Tensor
from windlass.models import TransformerConfig

SEGMENTS = 2
"""Segments of a BERT-style model."""

Layer = Callable[[Tensor], Tensor]


Place = Literal["first", "inner", "last"]


class LayerType(NamedTuple):
    """A kind of layer: what it is called, and what builds it."""

    kind: str
    name: str
    """Name of the model's first layer of this kind."""
    place: Place
    """Whether it takes tokens, or the loss follows."""
    build: Callable[[Scope], Layer]
    config: TransformerConfig
    """The model's, with the window of its block."""


class Embedding:
    """Token embedding, with learned positions added if the configuration has them."""

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        self.config, self.rank = config, scope.rank
        self.tokens = Vocabulary(scope.inner("tokens"))
        self.positions = None
        if config.positions == "learned":
            shape = config.sequence, config.width
            self.positions = scope.inner("positions").parameter("weight", shape)
        self.norm = Norm(scope.inner("norm"), full=True) if config.embedding_norm else _same

    def __call__(self, tokens: Tensor) -> Tensor:
        """`Int[b s]` to `[b s d]`."""
        y = self._forward(tokens)
        return _local_part(y, self.rank)

    def _forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.config.scaled_embedding:
            x = scale(x)
        if self.positions is not None:
            x = add(x, narrow(self.positions, 0, 0, tokens.shape[1]))
        return _dropped(self.norm(x), self.config)


class BertEmbedding:
    """Sum of token, position and segment embeddings, normalised."""

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        self.config, self.rank = config, scope.rank
        self.tokens = Vocabulary(scope.inner("tokens"))
        shape = config.sequence, config.width
        self.positions = scope.inner("positions").parameter("weight", shape)
        self.segments = scope.inner("segments").parameter("weight", (SEGMENTS, config.width))
        self.norm = Norm(scope.inner("norm"), full=True)

    def __call__(self, tokens: Tensor) -> Tensor:
        """`Int[b s]` to `[b s d]`."""
        y = self._forward(tokens)
        return _local_part(y, self.rank)

    def _forward(self, tokens: Tensor) -> Tensor:
        positions = add(narrow(self.positions, 0, 0, tokens.shape[1]), select(self.segments, 0, 0))
        return _dropped(self.norm(add(self.tokens(tokens), positions)), self.config)


class Block:
    """Attention, then feed-forward, each with a norm before it or on both sides."""

    def __init__(self, scope: Scope) -> None:
        self.config = scope.config
        self.attention_norm = _attention_norm(scope.inner("attention_norm"))
        self.attention = Attention(scope.inner("attention"))
        self.attention_result_norm = _result_norm(scope.inner("attention_result_norm"))
        self.hidden_norm = Norm(scope.inner("hidden_norm"))
        self.hidden = feed_forward(scope.inner("hidden"))
        self.hidden_result_norm = _result_norm(scope.inner("hidden_result_norm"))

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d]` to `[b s d]`."""
        y = add(
            x,
            _dropped(
                self.attention_result_norm(self.attention(self.attention_norm(x))), self.config
            ),
        )
        return add(
            y, _dropped(self.hidden_result_norm(self.hidden(self.hidden_norm(y))), self.config)
        )


def _attention_norm(scope: Scope) -> Layer:
    return _same if scope.config.embedding_norm else Norm(scope)


def _result_norm(scope: Scope) -> Layer:
    return Norm(scope) if scope.config.block_layout == "sandwich_norm" else _same


def _same(x: Tensor) -> Tensor:
    return x


class BertBlock:
    """Attention, then feed-forward, each with a residual and then a norm."""

    def __init__(self, scope: Scope) -> None:
        self.config = scope.config
        self.attention = Attention(scope.inner("attention"))
        self.attention_norm = Norm(scope.inner("attention_norm"))
        self.hidden = feed_forward(scope.inner("hidden"))
        self.hidden_norm = Norm(scope.inner("hidden_norm"))

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d]` to `[b s d]`."""
        y = self.attention_norm(add(x, _dropped(self.attention(x), self.config)))
        return self.hidden_norm(add(y, _dropped(self.hidden(y), self.config)))


class ParallelBlock:
    """Attention and feed-forward in parallel on the same input."""

    def __init__(self, scope: Scope) -> None:
        self.config = scope.config
        self.attention_norm = Norm(scope.inner("attention_norm"))
        self.attention = Attention(scope.inner("attention"))
        two_norms = scope.config.block_layout == "parallel"
        self.hidden_norm = Norm(scope.inner("hidden_norm")) if two_norms else None
        self.hidden = feed_forward(scope.inner("hidden"))

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d]` to `[b s d]`."""
        attention_input = self.attention_norm(x)
        ffn_input = attention_input if self.hidden_norm is None else self.hidden_norm(x)
        return add(
            add(x, _dropped(self.attention(attention_input), self.config)),
            _dropped(self.hidden(ffn_input), self.config),
        )


class HalfBlock:
    """One branch of a block with its norm before it."""

    def __init__(self, scope: Scope, branch: Callable[[Scope], Layer]) -> None:
        self.config = scope.config
        self.norm = _attention_norm(scope.inner("norm"))
        self.branch = branch(scope.inner("branch"))
        self.result_norm = _result_norm(scope.inner("result_norm"))

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d]` to `[b s d]`."""
        return add(x, _dropped(self.result_norm(self.branch(self.norm(x))), self.config))


class BertHalfBlock:
    """One branch of a block with its norm after it."""

    def __init__(self, scope: Scope, branch: Callable[[Scope], Layer]) -> None:
        self.config = scope.config
        self.branch = branch(scope.inner("branch"))
        self.norm = Norm(scope.inner("norm"))

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d]` to `[b s d]`."""
        return self.norm(add(x, _dropped(self.branch(x), self.config)))


class Head:
    """Final norm and projection to the vocabulary."""

    def __init__(self, scope: Scope) -> None:
        self.norm = Norm(scope.inner("norm"))
        self.projection = Logits(scope.inner("projection"))
        self.is_capped = scope.config.logit_softcap is not None

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d]` to logits."""
        logits = self.projection(self.norm(x))
        return scale(tanh(divide(logits))) if self.is_capped else logits

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[b s d]`, fused with the projection."""
        return self.projection.loss(self.norm(x), targets)


class BertHead:
    """Linear, GELU and norm, after a norm if blocks are pre-norm, then a projection."""

    def __init__(self, scope: Scope) -> None:
        is_post_norm = scope.config.block_layout == "post_norm"
        self.input_norm: Layer = _same if is_post_norm else Norm(scope.inner("input_norm"))
        self.transform = FeatureLinear(scope.inner("transform"), bias=is_post_norm)
        self.norm = Norm(scope.inner("norm"))
        self.projection = Logits(scope.inner("projection"))

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d]` to logits."""
        features = gelu(self.transform(self.input_norm(x)))
        return self.projection(self.norm(features))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of `[b s d]`, fused with the projection."""
        features = gelu(self.transform(self.input_norm(x)))
        return self.projection.loss(self.norm(features), targets)


def layer_types(config: TransformerConfig) -> tuple[LayerType, ...]:
    """The kinds of layers of a model in order: the embedding, those of blocks, and the head."""
    return tuple(dict.fromkeys(layer_sequence(config)))


def layer_sequence(config: TransformerConfig) -> tuple[LayerType, ...]:
    """The kind of every layer of a model."""
    is_bert = config.block_layout == "post_norm"
    prefix = "bert_" if is_bert else ""
    embedding = BertEmbedding if is_bert else Embedding
    first = LayerType(f"{prefix}embedding", "embedding", "first", embedding, config)
    has_transform = config.has_head_transform
    kind, head = ("bert_head", BertHead) if has_transform else ("head", Head)
    last = LayerType(kind, "head", "last", head, config)
    return first, *_block_layers(config), last


def _block_layers(config: TransformerConfig) -> Iterator[LayerType]:
    """The kind of every layer of the blocks, which is another with a window than without."""
    name, parts = _block_parts(config)
    known: dict[tuple[str, TransformerConfig], LayerType] = {}
    for index in range(config.layers):
        block = config.of_block(index)
        for part, build in parts.items():
            own = block
            if part == ".attention":
                own = replace(block, experts=None)
            elif part == ".hidden":
                own = replace(config, experts=block.experts, embedding_norm=False)
            if (part, own) not in known:
                kind = f"{name}{len(known) + 1}" if known else name
                path = f"block{index}{part}"
                known[part, own] = LayerType(kind, path, "inner", build, own)
            yield known[part, own]


def _block_parts(
    config: TransformerConfig,
) -> tuple[str, Mapping[str, Callable[[Scope], Layer]]]:
    """What the layers of a block are called, and what builds each, by the end of its name."""
    is_bert = config.block_layout == "post_norm"
    prefix = "bert_" if is_bert else ""
    if config.block_layout.startswith("parallel"):
        return "parallel_block", {"": ParallelBlock}
    if not config.split_blocks:
        return f"{prefix}block", {"": BertBlock if is_bert else Block}
    half = BertHalfBlock if is_bert else HalfBlock
    branches: dict[str, Callable[[Scope], Layer]] = {
        ".attention": Attention,
        ".hidden": feed_forward,
    }
    return f"{prefix}half_block", {
        part: partial(half, branch=branch) for part, branch in branches.items()
    }


def _local_part(x: Tensor, rank: Rank) -> Tensor:
    """The rank's tokens and features of what all ranks have, contiguous."""
    return x if rank.degree == 1 else clone(_narrowed(x, rank))


def _narrowed(x: Tensor, rank: Rank) -> Tensor:
    tokens = narrow(x, 1, 0, x.shape[1] // rank.rows)
    return tokens if rank.columns == 1 else narrow(tokens, 2, 0, x.shape[2] // rank.columns)


def _dropped(x: Tensor, config: TransformerConfig) -> Tensor:
    """`x` after the configuration's dropout."""
    return dropout(x, config.dropout)
