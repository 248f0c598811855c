"""Layers of a BERT-style encoder, which normalises after each residual sum (post-norm).

Source: Devlin et al. 2018, arXiv:1810.04805, and its code, google-research/bert. All tokens of a
sequence belong to its first segment, unless the model says something of pairs of sentences: then an
id of the second one is that of the token plus the entries of the vocabulary.
"""

from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from windlass.models.attention import Attention
from windlass.models.config import TransformerConfig
from windlass.models.context_parallel import FROM_START
from windlass.models.experts.mixture import build_feed_forward
from windlass.models.modules import (
    EmbeddingTable,
    Projection,
    build_norm,
    learned_positions,
)
from windlass.models.positions.documents import SeesDocuments
from windlass.models.sentences import HeadOutputs, SentenceHead
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, TensorShardable

SEGMENTS = 2
PAIR_CLASSES = 2
"""What a sentence head says of a pair: the second one follows, or is a random one."""


class BertEmbedding(SeesDocuments, TensorShardable):
    """Sum of token, position and segment embeddings, normalised."""

    first_positions = FROM_START
    """Position of the first token of each run of adjacent ones."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.tokens = EmbeddingTable(config.vocabulary, config.width)
        self.positions = EmbeddingTable(config.sequence, config.width)
        self.segments = EmbeddingTable(SEGMENTS, config.width)
        self.second_offset = config.vocabulary if config.takes_pairs else None
        """What is added to the ids of a second segment; None has none."""
        self.norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `Int[b s]` to `[b s d]`."""
        positions = learned_positions(
            self.positions.weight, tokens.shape[1], self.first_positions, self.documents
        )
        segments = self.segments.weight[0]
        if self.second_offset is not None:
            is_second = (tokens >= self.second_offset).unsqueeze(-1)
            segments = torch.where(is_second, self.segments.weight[1], segments)
            tokens = tokens % self.second_offset
        places = positions + segments
        return self.dropout(self.norm(self.tokens(tokens) + places))

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has its shard of the vocabulary's rows."""
        return {"tokens": ShardingRule(style="vocabulary")}


class BertBlock(nn.Module):
    """Post-norm block: attention, then feed-forward, each with a residual and then a norm."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.attention_norm = build_norm(config)
        self.hidden = build_feed_forward(config)
        self.hidden_norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.hidden_norm(x + self.dropout(self.hidden(x)))


class BertHalfBlock(nn.Module):
    """One branch of a post-norm block as a layer of its own."""

    def __init__(self, config: TransformerConfig, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return self.norm(x + self.dropout(self.branch(x)))


def build_split_bert_block(config: TransformerConfig) -> nn.Sequential:
    """A post-norm block as two layers."""
    attention = BertHalfBlock(config, Attention(config))
    hidden = BertHalfBlock(config, build_feed_forward(config))
    return nn.Sequential(OrderedDict(attention=attention, hidden=hidden))


def _build_sentence_head(config: TransformerConfig) -> SentenceHead:
    """The head that says whether the second sentence of a pair follows the first."""
    pooler = Projection(config.width, config.width, bias=True)
    return SentenceHead(pooler, Projection(config.width, PAIR_CLASSES, bias=True))


class BertClassifier(nn.Module, TensorShardable):
    """A sentence head alone: the class of a text, or of a pair of texts, that is a row."""

    def __init__(self, config: TransformerConfig, classes: int) -> None:
        super().__init__()
        self.texts = SentenceHead(
            Projection(config.width, config.width, bias=True),
            Projection(config.width, classes, bias=True),
            dropout=config.dropout,
            is_alone=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b c]`."""
        logits: Tensor = self.texts(x)
        return logits[:, 0]

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Every rank has all of it."""
        return {"": ShardingRule(style="tokenwise")}


class BertHead(nn.Module, TensorShardable):
    """Masked-token head: linear, GELU and norm, then a projection to the vocabulary.

    Beside it stands a sentence head if the configuration has one.

    ModernBERT (Warner et al. 2024, arXiv:2412.13663), whose blocks are pre-norm, normalises first,
    and its linear has no bias.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.sentences = _build_sentence_head(config) if config.sentence_head else None
        is_post_norm = config.block_layout == "post_norm"
        self.input_norm = nn.Identity() if is_post_norm else build_norm(config)
        self.transform = Projection(config.width, config.width, bias=is_post_norm)
        self.activation = nn.GELU()
        self.norm = build_norm(config)
        self.projection = Projection(config.width, config.vocabulary, bias=config.head_bias)

    def forward(self, x: Tensor) -> Tensor | HeadOutputs:
        """Maps `[b s d]` to logits `[b s v]`, and `[b p 2]` of pairs of sentences."""
        sentences = None if self.sentences is None else self.sentences(x)
        features = self.activation(self.transform(self.input_norm(x)))
        logits = self.projection(self.norm(features))
        return logits if sentences is None else HeadOutputs(logits, sentences)

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has its shard of the logits; in a grid also of the transform's features."""
        return {
            "transform": ShardingRule(style="linear"),
            "projection": ShardingRule(style="vocabulary"),
        }
