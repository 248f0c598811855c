"""The parts of a transformer: projections, rotary positions, attention, feed-forward.

Letters: b micro-batch, s sequence, d width, h heads, g key heads, k head width, f hidden width.
Every module that owns parameters has `reset_parameters`, as in PyTorch. Weights start as GPT-2's
do: normal with deviation 0.02, biases zero, and the projections that end a residual branch
smaller by `1 / sqrt(branches)` (Radford et al. 2019, section 2.3).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.config import TransformerShape
from windlass.models.tensor_parallel.sharding_rules import Cut, Cuttable

WEIGHT_DEVIATION = 0.02


class Projection(nn.Linear):
    """A linear map whose weights start normal with a given deviation."""

    def __init__(
        self, inputs: int, outputs: int, *, bias: bool, deviation: float = WEIGHT_DEVIATION
    ) -> None:
        # Set first: the parent's constructor already calls `reset_parameters`.
        self.deviation = deviation
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the weights anew."""
        _draw(self.weight, self.deviation)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Table(nn.Embedding):
    """An embedding whose rows start normal with GPT-2's deviation."""

    def reset_parameters(self) -> None:
        """Draws the rows anew."""
        _draw(self.weight, WEIGHT_DEVIATION)


def _draw(weight: Tensor, deviation: float) -> None:
    """Draws normal numbers. On the meta device torch 2.13 would load its compiler, for a second."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=deviation)


def norm(shape: TransformerShape) -> nn.Module:
    """The normalisation over d that this family uses."""
    if shape.norm == "rms":
        return nn.RMSNorm(shape.width, eps=shape.norm_epsilon)
    return nn.LayerNorm(shape.width, eps=shape.norm_epsilon)


def residual_projection(shape: TransformerShape, inputs: int, *, bias: bool) -> Projection:
    """The projection back to d that ends a residual branch; two branches in each layer."""
    deviation = WEIGHT_DEVIATION / (2 * shape.layers) ** 0.5
    return Projection(inputs, shape.width, bias=bias, deviation=deviation)


class Rotary(nn.Module):
    """Turns the first features of queries and keys by an angle that grows with the position.

    Angles are computed in float32 on every call rather than kept in a buffer, so that the layer
    is nothing but its parameters. Source: Su et al. 2021, arXiv:2104.09864.
    """

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.width = width
        self.base = base

    def forward(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Maps `[b h s k]` and `[b g s k]` to the same shapes."""
        steps = torch.arange(0, self.width, 2, device=query.device, dtype=torch.float32)
        places = torch.arange(query.shape[-2], device=query.device, dtype=torch.float32)
        angles = places[:, None] * self.base ** (-steps / self.width)  # [s width/2]
        cos, sin = angles.cos().to(query.dtype), angles.sin().to(query.dtype)
        return self._turn(query, cos, sin), self._turn(key, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half, rest = self.width // 2, x.shape[-1] - self.width
        first, second, *still = x.split([half, half, rest] if rest else half, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, *still), dim=-1)


class Attention(nn.Module, Cuttable):
    """Self-attention, causal or not, several query heads to a key head if the shape says so.

    Attention weights are never dropped: the fused kernels that make attention fast on every
    device draw such a mask inside, where no key can reach it.
    """

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.head_width = shape.head_width
        self.query_width = shape.heads * shape.head_width
        self.key_width = shape.key_heads * shape.head_width
        self.grouped = shape.key_heads != shape.heads
        self.causal = shape.causal
        outputs = self.query_width + 2 * self.key_width
        self.input = Projection(shape.width, outputs, bias=shape.attention_bias)
        self.rotary = Rotary(shape.turned_width, shape.rotary_base) if shape.turned_width else None
        self.output = residual_projection(shape, self.query_width, bias=shape.attention_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        parts = self.input(x).split([self.query_width, self.key_width, self.key_width], dim=-1)
        query, key, value = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in parts
        )  # [b h s k], [b g s k], [b g s k]
        if self.rotary is not None:
            query, key = self.rotary(query, key)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=self.grouped
        )
        return self.output(mixed.transpose(1, 2).flatten(-2))

    def cuts(self) -> Mapping[str, Cut]:
        """Each slice has whole heads: its share of queries, of keys and of values."""
        parts = (self.query_width, self.key_width, self.key_width)
        return {
            "": Cut(way="region"),
            "input": Cut(way="column", parts=parts, unit=self.head_width),
            "output": Cut(way="row", unit=self.head_width),
            "query_width": Cut(way="count"),
            "key_width": Cut(way="count"),
        }


class FeedForward(nn.Module, Cuttable):
    """Two projections with a GELU between them."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.input = Projection(shape.width, shape.hidden, bias=shape.hidden_bias)
        self.activation = nn.GELU(approximate="tanh" if shape.activation == "gelu_tanh" else "none")
        self.output = residual_projection(shape, shape.hidden, bias=shape.hidden_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return self.output(self.activation(self.input(x)))

    def cuts(self) -> Mapping[str, Cut]:
        """Each slice has its share of hidden features."""
        return {"": Cut(way="region"), "input": Cut(way="column"), "output": Cut(way="row")}


class GatedFeedForward(nn.Module, Cuttable):
    """SwiGLU: `(silu(x G) * x U) D`. Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.gate = Projection(shape.width, shape.hidden, bias=shape.hidden_bias)
        self.input = Projection(shape.width, shape.hidden, bias=shape.hidden_bias)
        self.output = residual_projection(shape, shape.hidden, bias=shape.hidden_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return self.output(functional.silu(self.gate(x)) * self.input(x))

    def cuts(self) -> Mapping[str, Cut]:
        """Each slice has its share of hidden features, the same of gate and input."""
        columns = {"gate": Cut(way="column"), "input": Cut(way="column")}
        return {"": Cut(way="region"), **columns, "output": Cut(way="row")}


def feed_forward(shape: TransformerShape) -> nn.Module:
    """The feed-forward part that this family uses."""
    return GatedFeedForward(shape) if shape.activation == "swiglu" else FeedForward(shape)
