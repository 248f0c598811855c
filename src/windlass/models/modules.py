"""Building blocks of a transformer: projections, rotary positions, feed-forward.

Shape letters: b micro-batch, s sequence, d width, h heads, g key/value heads, k head width, f
feed-forward width. Every module that owns parameters has `reset_parameters`, as in PyTorch. Weights
start as in GPT-2: normal with standard deviation 0.02, biases zero, and projections that end a
residual branch scaled down by `1 / sqrt(branches)` (Radford et al. 2019, section 2.3).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.models.config import Activation, TransformerConfig
from windlass.models.context_parallel import (
    FROM_START,
    at_positions,
    count_in_runs,
)
from windlass.models.positions.documents import positions_in_documents
from windlass.models.positions.rope_scaling import RopeScaling
from windlass.models.sparsity.imported_masks import RoleOutputs
from windlass.models.sparsity.sparse_layers import Sparsifiable
from windlass.models.tensor_parallel.norms import ZeroCenteredRMSNorm
from windlass.models.tensor_parallel.sharding_rules import ShardingRule, TensorShardable
from windlass.sparsity import block_feed_forward

INIT_STD = 0.02


class Projection(nn.Linear):
    """A linear layer whose weights start normal with a given standard deviation."""

    def __init__(self, inputs: int, outputs: int, *, bias: bool, std: float = INIT_STD) -> None:
        # Set first: the parent's constructor already calls `reset_parameters`.
        self.std = std
        super().__init__(inputs, outputs, bias=bias)

    def reset_parameters(self) -> None:
        """Draws the weights and sets the bias to zero."""
        _init_normal(self.weight, self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class EmbeddingTable(nn.Embedding):
    """An embedding whose rows start normal with GPT-2's standard deviation."""

    def reset_parameters(self) -> None:
        """Draws the rows."""
        _init_normal(self.weight, INIT_STD)


def _init_normal(weight: Tensor, std: float) -> None:
    """Draws normal numbers; skips meta tensors, for which torch 2.13 would load its compiler."""
    if not weight.is_meta:
        nn.init.normal_(weight, std=std)


def build_norm(config: TransformerConfig) -> nn.Module:
    """The normalisation over d that the configuration asks for."""
    if config.norm == "layer":
        return nn.LayerNorm(config.width, eps=config.norm_epsilon, bias=config.norm_bias)
    return _rms_norm(config, config.width)


def build_head_norm(config: TransformerConfig) -> nn.RMSNorm:
    """The normalisation of each head's k features. Source: Qwen Team 2025, arXiv:2505.09388."""
    return _rms_norm(config, config.head_width)


def _rms_norm(config: TransformerConfig, width: int) -> nn.RMSNorm:
    norm = ZeroCenteredRMSNorm if config.norm == "zero_centered_rms" else nn.RMSNorm
    return norm(width, eps=config.norm_epsilon)


def residual_projection(config: TransformerConfig, inputs: int, *, bias: bool) -> Projection:
    """The projection back to d that ends a residual branch, of which each block has two."""
    return Projection(inputs, config.width, bias=bias, std=residual_std(config))


def residual_std(config: TransformerConfig) -> float:
    """Standard deviation of the weights that end a residual branch, of which each block has two."""
    return INIT_STD / (2 * config.layers) ** 0.5


class RotaryEmbedding(nn.Module):
    """Rotates the first features of queries and keys by an angle proportional to the position.

    Angles are computed in float32 on every call rather than kept in a buffer, so that a layer has
    no state besides its parameters. Source: Su et al. 2021, arXiv:2104.09864.

    Args:
        width: features that are rotated, k' of k.
        base: angles of neighbouring positions fall from 1 to nearly 1 / base over the features.
        scaling: how angles slow down for longer sequences; None keeps them.
    """

    first_positions = FROM_START
    """Position of the first token of each run of adjacent ones."""

    def __init__(self, width: int, base: float, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.width = width
        self.base = base
        self.scaling = scaling

    def forward(
        self, query: Tensor, key: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Maps `[b h s k]` and `[b g s k]` to the same shapes.

        Args:
            documents: the document of each token, `Int[b s]`, in which positions begin at 0; None
                means that a row is one document.
        """
        steps = torch.arange(0, self.width, 2, device=query.device, dtype=torch.float32)
        if documents is None:
            count = query.shape[-2]
            positions = count_in_runs(
                count, self.first_positions, query.device, dtype=torch.float32
            )
        else:
            places = positions_in_documents(documents).float()[:, None]  # [b 1 s]
            positions = at_positions(places, query.shape[-2], self.first_positions, dim=2)
        angles = positions[..., None] * self._frequencies(steps)  # [s k'/2] or [b 1 s k'/2]
        cos = self._magnified(angles.cos()).to(query.dtype)
        sin = self._magnified(angles.sin()).to(query.dtype)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _frequencies(self, steps: Tensor) -> Tensor:
        """Angles between neighbouring positions, `[k'/2]`."""
        plain = self.base ** (-steps / self.width)
        scaling = self.scaling
        if scaling is None:
            return plain
        if scaling.type == "linear":
            return plain / scaling.factor
        slope, offset = scaling.kept_share(self.width, self.base)
        kept = ((plain if scaling.type == "llama3" else steps) * slope + offset).clamp(0, 1)
        return plain * (kept * (1 - 1 / scaling.factor) + 1 / scaling.factor)

    def _magnified(self, x: Tensor) -> Tensor:
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude
        return x if magnitude == 1 else x * magnitude

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half, rest = self.width // 2, x.shape[-1] - self.width
        first, second, *unrotated = x.split([half, half, rest] if rest else half, dim=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat((*rotated, *unrotated), dim=-1)


class FeedForward(nn.Module, TensorShardable, Sparsifiable):
    """Two projections with a GELU between them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        approximate = "tanh" if config.activation == "gelu_tanh" else "none"
        self.input = Projection(config.width, config.ffn, bias=config.ffn_bias)
        self.activation = nn.GELU(approximate=approximate)
        self.output = residual_projection(config, config.ffn, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        approximate = self.activation.approximate
        y = block_feed_forward(x, self.input, self.output, approximate=approximate)
        return self.output(self.activation(self.input(x))) if y is None else y

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has its shard of the f inner features."""
        return {
            "": ShardingRule(style="region"),
            "input": ShardingRule(style="column"),
            "output": ShardingRule(style="row"),
        }

    def sparse_roles(self) -> Mapping[str, RoleOutputs]:
        """Up to the inner features, and down from them."""
        return {
            "input": (("up", self.input.out_features),),
            "output": (("down", self.output.out_features),),
        }


class GatedFeedForward(nn.Module, TensorShardable, Sparsifiable):
    """SwiGLU or GEGLU: `(act(x G) * x U) D`. Source: Shazeer 2020, arXiv:2002.05202."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.gate = Projection(config.width, config.ffn, bias=config.ffn_bias)
        self.input = Projection(config.width, config.ffn, bias=config.ffn_bias)
        self.output = residual_projection(config, config.ffn, bias=config.ffn_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to `[b s d]`."""
        return self.output(activated_gate(self.gate(x), self.activation) * self.input(x))

    def sharding_rules(self) -> Mapping[str, ShardingRule]:
        """Each rank has its shard of the f inner features, the same of gate and input."""
        return {
            "": ShardingRule(style="region"),
            "gate": ShardingRule(style="column"),
            "input": ShardingRule(style="column"),
            "output": ShardingRule(style="row"),
        }

    def sparse_roles(self) -> Mapping[str, RoleOutputs]:
        """The gate goes up as the input does."""
        return {
            "gate": (("up", self.gate.out_features),),
            "input": (("up", self.input.out_features),),
            "output": (("down", self.output.out_features),),
        }


def activated_gate(gate: Tensor, activation: Activation) -> Tensor:
    """The gate of SwiGLU or GEGLU, activated."""
    if activation == "swiglu":
        return functional.silu(gate)
    approximate = "tanh" if activation == "geglu_tanh" else "none"
    return functional.gelu(gate, approximate=approximate)


def build_dense_feed_forward(config: TransformerConfig) -> nn.Module:
    """The feed-forward branch that the configuration asks for, without experts."""
    return GatedFeedForward(config) if config.is_gated else FeedForward(config)


def learned_positions(
    table: Tensor, count: int, firsts: tuple[int, ...], documents: Tensor | None
) -> Tensor:
    """The vector of each token's position, `[s d]`; with documents `[b s d]`.

    Args:
        table: a row for each position.
        firsts: position of the first token of each run.
        documents: the document of each token of a whole row, in which positions begin at 0; None
            means that a row is one document.
    """
    if documents is None:
        return at_positions(table, count, firsts)
    return table[at_positions(positions_in_documents(documents), count, firsts, dim=1)]
