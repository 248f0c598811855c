"""Transformers as `nn.Sequential`: embedding, blocks, head (plain PyTorch, usable by itself)."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from windlass.models import bert
from windlass.models.attention import Attention
from windlass.models.config import TransformerConfig
from windlass.models.context_parallel import FROM_START
from windlass.models.experts.mixture import build_feed_forward
from windlass.models.experts.routing import has_capacity
from windlass.models.images.vit import ClassHead, PatchEmbedding
from windlass.models.modules import (
    EmbeddingTable,
    Projection,
    RotaryEmbedding,
    build_norm,
    learned_positions,
)
from windlass.models.positions.documents import SeesDocuments
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, TensorShardable


class Embedding(SeesDocuments, TensorShardable):
    """Token embedding, with learned positions added if the configuration has them."""

    first_positions = FROM_START
    """Position of the first token of each run of adjacent ones."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.tokens = EmbeddingTable(config.vocabulary, config.width)
        learned = config.positions == "learned"
        self.positions = EmbeddingTable(config.sequence, config.width) if learned else None
        self.scale = config.width**0.5 if config.scaled_embedding else None
        self.norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `Int[b s]` to `[b s d]`."""
        x = self.tokens(tokens)
        if self.scale is not None:
            x = x * self.scale
        if self.positions is not None:
            table, count = self.positions.weight, tokens.shape[1]
            x = x + learned_positions(table, count, self.first_positions, self.documents)
        return self.dropout(self.norm(x))

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has its shard of the vocabulary's rows."""
        return {"tokens": ShardingRule(style="vocabulary")}


class Block(nn.Module):
    """Pre-norm block: attention, then feed-forward, each after its norm and with a residual.

    With `sandwich_norm` the result of each is normalised, too, before it is added (Gemma Team 2024,
    arXiv:2408.00118, section 2).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = _build_attention_norm(config)
        self.attention = Attention(config)
        self.attention_result_norm = _build_result_norm(config)
        self.hidden_norm = build_norm(config)
        self.hidden = build_feed_forward(config)
        self.hidden_result_norm = _build_result_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        x = x + self.dropout(self.attention_result_norm(self.attention(self.attention_norm(x))))
        return x + self.dropout(self.hidden_result_norm(self.hidden(self.hidden_norm(x))))


def _build_attention_norm(config: TransformerConfig) -> nn.Module:
    """The norm before attention, unless the embedding has done its work."""
    return nn.Identity() if config.embedding_norm else build_norm(config)


def _build_result_norm(config: TransformerConfig) -> nn.Module:
    return build_norm(config) if config.block_layout == "sandwich_norm" else nn.Identity()


class HalfBlock(nn.Module):
    """One branch of a pre-norm block as a layer of its own."""

    def __init__(self, config: TransformerConfig, norm: nn.Module, branch: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.branch = branch
        self.result_norm = _build_result_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return x + self.dropout(self.result_norm(self.branch(self.norm(x))))


def build_split_block(config: TransformerConfig) -> nn.Sequential:
    """A pre-norm block as two layers."""
    attention = HalfBlock(config, _build_attention_norm(config), Attention(config))
    hidden = HalfBlock(config, build_norm(config), build_feed_forward(config))
    return nn.Sequential(OrderedDict(attention=attention, hidden=hidden))


class ParallelBlock(nn.Module):
    """Attention and feed-forward in parallel on the same input.

    They share one norm in GPT-J (Wang and Komatsuzaki 2021), and have a norm each in GPT-NeoX-20B
    (Black et al. 2022, arXiv:2204.06745, section 2.1).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.hidden_norm = build_norm(config) if config.block_layout == "parallel" else None
        self.hidden = build_feed_forward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        attention_input = self.attention_norm(x)
        ffn_input = attention_input if self.hidden_norm is None else self.hidden_norm(x)
        # One expression, so that the attention's output is freed before the feed-forward runs.
        return (
            x + self.dropout(self.attention(attention_input)) + self.dropout(self.hidden(ffn_input))
        )


class Head(nn.Module, TensorShardable):
    """Final norm and projection to the vocabulary."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = build_norm(config)
        self.projection = Projection(config.width, config.vocabulary, bias=config.head_bias)
        self.softcap = config.logit_softcap

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b s v]`."""
        logits = self.projection(self.norm(x))
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has its shard of the logits."""
        return {"projection": ShardingRule(style="vocabulary")}


def can_cache_tokens(layers: Sequence[nn.Module]) -> bool:
    """Whether tokens of a model need nothing of earlier ones but their keys and values.

    Experts with a capacity also need to know how many earlier tokens they took.
    """
    kinds = (Embedding, Block, HalfBlock, ParallelBlock, Head)
    return all(isinstance(layer, kinds) and not has_capacity(layer) for layer in layers)


def set_first_positions(layer: nn.Module, firsts: tuple[int, ...]) -> None:
    """Says at which positions the runs of adjacent tokens begin that a layer is given.

    Args:
        layer: changed in place.
        firsts: the position of the first token of each run, counted from 0.
    """
    for module in layer.modules():
        if isinstance(module, (Embedding, RotaryEmbedding, bert.BertEmbedding)):
            module.first_positions = firsts


def build_transformer(config: TransformerConfig) -> nn.Sequential:
    """The whole model; maps tokens `Int[b s]` to logits `[b s v]`, or images to classes `[b v]`.

    It is built on torch's current default device (`with torch.device("meta")` allocates nothing).
    """
    embedding, head = _build_ends(config)
    block: Callable[[TransformerConfig], nn.Module] = ParallelBlock
    if config.block_layout in ("pre_norm", "sandwich_norm"):
        block = build_split_block if config.split_blocks else Block
    elif config.block_layout == "post_norm":
        block = bert.build_split_bert_block if config.split_blocks else bert.BertBlock
    layers: list[tuple[str, nn.Module]] = [("embedding", embedding)]
    layers += [(f"block{index}", block(config.of_block(index))) for index in range(config.layers)]
    return nn.Sequential(OrderedDict([*layers, ("head", head)]))


def _build_ends(config: TransformerConfig) -> tuple[nn.Module, nn.Module]:
    """The layers before and after the blocks."""
    if config.image is not None:
        return PatchEmbedding(config), ClassHead(config)
    embedding: Embedding | bert.BertEmbedding = Embedding(config)
    head: Head | bert.BertHead = Head(config)
    if config.block_layout == "post_norm":
        embedding = bert.BertEmbedding(config)
    if config.text_classes is not None:
        return embedding, bert.BertClassifier(config, config.text_classes)
    if config.has_head_transform:
        head = bert.BertHead(config)
    if config.tied_embeddings:
        head.projection.weight = embedding.tokens.weight
    return embedding, head
