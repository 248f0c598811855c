"""The parts of an encoder in the style of BERT, whose norms follow what they norm.

Source: Devlin et al. 2018, arXiv:1810.04805, and its code, google-research/bert. All tokens of a
sequence are of its first segment; there is no pooler, and no next sentence to predict.
"""

from collections import OrderedDict
from collections.abc import Mapping

from torch import Tensor, nn

from windlass.models.config import TransformerShape
from windlass.models.modules import Attention, Projection, Table, feed_forward, norm
from windlass.models.tensor_parallel.sharding_rules import Cut, Cuttable

SEGMENTS = 2


class Embedding(nn.Module, Cuttable):
    """Tokens to vectors, with their places and segments added, normed."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.tokens = Table(shape.vocabulary, shape.width)
        self.positions = Table(shape.sequence, shape.width)
        self.segments = Table(SEGMENTS, shape.width)
        self.norm = norm(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps `Int[b s]` to `[b s d]`."""
        places = self.positions.weight[: tokens.shape[1]] + self.segments.weight[0]
        return self.dropout(self.norm(self.tokens(tokens) + places))

    def cuts(self) -> Mapping[str, Cut]:
        """Each slice has its share of the rows."""
        return {"tokens": Cut(way="vocabulary")}


class Block(nn.Module):
    """Attention, then feed-forward, each added to the stream and the sum normed (post-norm)."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.attention_norm = norm(shape)
        self.hidden = feed_forward(shape)
        self.hidden_norm = norm(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        x = self.attention_norm(x + self.dropout(self.attention(x)))
        return self.hidden_norm(x + self.dropout(self.hidden(x)))


class Half(nn.Module):
    """One branch of a block by itself, added to the stream and the sum normed."""

    def __init__(self, shape: TransformerShape, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.norm = norm(shape)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return self.norm(x + self.dropout(self.branch(x)))


def halves(shape: TransformerShape) -> nn.Sequential:
    """A block as two layers."""
    attention, hidden = Half(shape, Attention(shape)), Half(shape, feed_forward(shape))
    return nn.Sequential(OrderedDict(attention=attention, hidden=hidden))


class Head(nn.Module, Cuttable):
    """What predicts hidden tokens: a map, GELU and a norm, then a projection to the vocabulary."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.transform = Projection(shape.width, shape.width, bias=True)
        self.activation = nn.GELU()
        self.norm = norm(shape)
        self.projection = Projection(shape.width, shape.vocabulary, bias=shape.head_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b s v]`."""
        return self.projection(self.norm(self.activation(self.transform(x))))

    def cuts(self) -> Mapping[str, Cut]:
        """Each slice has its share of the logits; in a grid also of what comes before."""
        return {"transform": Cut(way="map"), "projection": Cut(way="vocabulary")}
