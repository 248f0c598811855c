"""Hyperparameters of a GPT- or BERT-style transformer (this module does not import torch)."""

from dataclasses import dataclass
from typing import Literal

from windlass.schema import SparsityRequest

NormType = Literal["layer", "rms"]
PositionEncoding = Literal["learned", "rotary"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]
BlockLayout = Literal["pre_norm", "post_norm", "parallel", "parallel_one_norm"]
"""How attention, feed-forward and their norms are arranged in a block.

`pre_norm`: attention, then feed-forward, each after its own norm. `post_norm`: each branch's sum
with its input is normalised, the embedding too, and the head transforms before it projects.
`parallel`: both branches read the block's input, each through its own norm. `parallel_one_norm`:
both branches read the same normalised input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerConfig:
    """Hyperparameters of a decoder-only or, as in BERT, encoder-only transformer.

    Shape letters: width d, heads h, feed-forward width f, vocabulary v, sequence s; the width of
    one head is d / h.
    """

    name: str
    layers: int
    """Number of blocks, without embedding and head."""
    width: int
    """Hidden size d."""
    heads: int
    kv_heads: int
    """Key and value heads, a divisor of `heads`; equal to `heads` without grouped queries."""
    ffn: int
    """Inner width of the feed-forward branch."""
    vocabulary: int
    sequence: int
    """Longest sequence the model accepts."""
    norm: NormType = "layer"
    norm_epsilon: float = 1e-5
    positions: PositionEncoding = "learned"
    rotary_width: int | None = None
    """Features of each head that rotary positions rotate; None rotates all of them."""
    rotary_base: float = 10000.0
    activation: Activation = "gelu_tanh"
    block_layout: BlockLayout = "pre_norm"
    causal: bool = True
    """Whether the model predicts the next token and attends only to earlier ones. Otherwise it
    attends to all tokens and predicts masked ones."""
    attention_bias: bool = True
    ffn_bias: bool = True
    head_bias: bool = False
    tied_embeddings: bool = True
    """Whether the head's projection shares its weight with the token embedding."""
    dropout: float = 0.0
    split_blocks: bool = False
    """Whether attention and feed-forward are separate layers, so that a pipeline stage can end
    between them."""
    sparsity: SparsityRequest | None = None
    """Which weights of the blocks are absent; None keeps all."""
    source: str = ""
    """Publication that the numbers come from."""

    @property
    def head_width(self) -> int:
        """Features of one head, k."""
        return self.width // self.heads

    def errors(self) -> tuple[str, ...]:
        """Every reason why this model cannot be built, one sentence each; empty if it can."""
        errors: list[str] = []
        counts = ("layers", "width", "heads", "kv_heads", "ffn", "vocabulary", "sequence")
        low = [name for name in counts if getattr(self, name) < 1]
        errors += [f"`{name}` is {getattr(self, name)}, must be at least 1" for name in low]
        if not 0 <= self.dropout < 1:
            errors.append(f"`dropout` is {self.dropout:g}, must be at least 0 and below 1")
        if self.split_blocks and self.block_layout not in ("pre_norm", "post_norm"):
            errors.append(
                "`split_blocks` splits a block between attention and feed-forward, but in this "
                "model both read the block's input in parallel; leave it out"
            )
        if low:
            return tuple(errors)
        if self.width % self.heads:
            below = self.width // self.heads * self.heads
            nearest = [str(width) for width in (below, below + self.heads) if width]
            errors.append(
                f"`width` {self.width} is not divisible by `heads` {self.heads}; "
                f"use `width` {' or '.join(nearest)}"
            )
        elif self.positions == "rotary" and self.rotated_width % 2:
            errors.append(
                f"rotary positions rotate {self.rotated_width} features of a head, must be an even "
                f"number; change `width` {self.width} or `heads` {self.heads}"
            )
        elif self.rotated_width > self.head_width:
            errors.append(
                f"rotary positions rotate {self.rotated_width} features of a head, which has only "
                f"{self.head_width}; raise `width` {self.width} or lower `heads` {self.heads}"
            )
        if self.heads % self.kv_heads:
            errors.append(f"`heads` {self.heads} is not divisible by `kv_heads` {self.kv_heads}")
        return tuple(errors)

    @property
    def rotated_width(self) -> int:
        """Features of each head that rotary positions rotate; 0 with learned positions."""
        if self.positions == "learned":
            return 0
        return self.head_width if self.rotary_width is None else self.rotary_width
