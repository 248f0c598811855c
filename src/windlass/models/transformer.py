"""Transformers as a chain: embedding, blocks, head (plain PyTorch, usable without Windlass)."""

from collections import OrderedDict
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from windlass.models import bert as encoder
from windlass.models.config import TransformerShape
from windlass.models.modules import Attention, Projection, Table, feed_forward, norm
from windlass.models.tensor_parallel.sharding_rules import Cut, Cuttable


class Embedding(nn.Module, Cuttable):
    """Tokens to vectors, with learned positions added where the family has them."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = Table(shape.vocabulary, shape.width)
        learned = shape.positions == "learned"
        self.positions = Table(shape.sequence, shape.width) if learned else None
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `Int[b s]` to `[b s d]`."""
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        return self.dropout(x)

    def cuts(self) -> Mapping[str, Cut]:
        """Each slice has its share of the rows."""
        return {"tokens": Cut(way="vocabulary")}


class Block(nn.Module):
    """Attention, then feed-forward, each behind a norm and added to the stream (pre-norm)."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = norm(shape)
        self.attention = Attention(shape)
        self.hidden_norm = norm(shape)
        self.hidden = feed_forward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.hidden(self.hidden_norm(x)))


class Half(nn.Module):
    """One branch of a block by itself, behind its norm and added to the stream."""

    def __init__(self, shape: TransformerShape, branch: nn.Module) -> None:
        super().__init__()
        self.norm = norm(shape)
        self.branch = branch
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return x + self.dropout(self.branch(self.norm(x)))


def halves(shape: TransformerShape) -> nn.Sequential:
    """A block as two layers."""
    attention, hidden = Half(shape, Attention(shape)), Half(shape, feed_forward(shape))
    return nn.Sequential(OrderedDict(attention=attention, hidden=hidden))


class ParallelBlock(nn.Module):
    """Attention and feed-forward side by side on the same input.

    With one norm as in GPT-J (Wang and Komatsuzaki 2021), with two as in GPT-NeoX-20B (Black et
    al. 2022, arXiv:2204.06745, section 2.1).
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention_norm = norm(shape)
        self.attention = Attention(shape)
        self.hidden_norm = norm(shape) if shape.flow == "parallel" else None
        self.hidden = feed_forward(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        attended = self.attention_norm(x)
        fed = attended if self.hidden_norm is None else self.hidden_norm(x)
        return x + self.dropout(self.attention(attended)) + self.dropout(self.hidden(fed))


class Head(nn.Module, Cuttable):
    """Final norm and projection to the vocabulary."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.norm = norm(shape)
        self.projection = Projection(shape.width, shape.vocabulary, bias=shape.head_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b s v]`."""
        return self.projection(self.norm(x))

    def cuts(self) -> Mapping[str, Cut]:
        """Each slice has its share of the logits."""
        return {"projection": Cut(way="vocabulary")}


def transformer(shape: TransformerShape) -> nn.Sequential:
    """The whole model; maps tokens `Int[b s]` to logits `[b s v]`.

    It is built on the device of the moment (`with torch.device("meta")` allocates nothing).
    """
    embedding: Embedding | encoder.Embedding = Embedding(shape)
    head: Head | encoder.Head = Head(shape)
    block: Callable[[TransformerShape], nn.Module] = ParallelBlock
    if shape.flow == "sequential":
        block = halves if shape.halves else Block
    elif shape.flow == "post":
        embedding, head = encoder.Embedding(shape), encoder.Head(shape)
        block = encoder.halves if shape.halves else encoder.Block
    if shape.tied:
        head.projection.weight = embedding.tokens.weight
    layers: list[tuple[str, nn.Module]] = [("embedding", embedding)]
    layers += [(f"block{index}", block(shape)) for index in range(shape.layers)]
    return nn.Sequential(OrderedDict([*layers, ("head", head)]))
