"""Shape: the numbers that make a transformer of the GPT or BERT family (no torch here)."""

from dataclasses import dataclass
from typing import Literal

Norm = Literal["layer", "rms"]
Positions = Literal["learned", "rotary"]
Activation = Literal["gelu", "gelu_tanh", "swiglu"]
Flow = Literal["sequential", "post", "parallel", "parallel_one_norm"]
"""`sequential`: attention, then the feed-forward part, each behind a norm. `post`: the norm is of
each one's sum with its input, also of the embedding, and the head transforms before it projects.
`parallel`: both read the block's input, each behind a norm of its own. `parallel_one_norm`: both
read the same normed input."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerShape:
    """A transformer of one stack of blocks, which decodes or, as BERT, encodes.

    Letters elsewhere: width d, heads h, hidden f, vocabulary v, sequence s; a head is d / h wide.
    """

    name: str
    layers: int
    """Blocks; embedding and head come on top."""
    width: int
    heads: int
    key_heads: int
    """Heads of keys and values, a divisor of `heads`; equal to `heads` unless queries share."""
    hidden: int
    vocabulary: int
    sequence: int
    """Longest sequence."""
    norm: Norm = "layer"
    norm_epsilon: float = 1e-5
    positions: Positions = "learned"
    rotary_width: int | None = None
    """Features of each head that turn; None turns all."""
    rotary_base: float = 10000.0
    activation: Activation = "gelu_tanh"
    flow: Flow = "sequential"
    causal: bool = True
    """A token attends to those before it, and the model predicts the next one; else it attends to
    all, and predicts tokens that are hidden from it."""
    attention_bias: bool = True
    hidden_bias: bool = True
    head_bias: bool = False
    tied: bool = True
    """The head's projection is the embedding's table."""
    dropout: float = 0.0
    halves: bool = False
    """Attention and feed-forward are layers of their own, so that a stage may end between them."""
    source: str = ""
    """Where the numbers stand."""

    @property
    def head_width(self) -> int:
        """Features of one head, k."""
        return self.width // self.heads

    def faults(self) -> tuple[str, ...]:
        """Everything that cannot be, one sentence each; empty for a shape that can be built."""
        found: list[str] = []
        counts = ("layers", "width", "heads", "kv_heads", "hidden", "vocabulary", "sequence")
        low = [name for name in counts if getattr(self, name) < 1]
        found += [f"`{name}` is {getattr(self, name)}, must be at least 1" for name in low]
        if not 0 <= self.dropout < 1:
            found.append(f"`dropout` is {self.dropout:g}, must be at least 0 and below 1")
        if self.halves and self.flow not in ("sequential", "post"):
            found.append(
                "`halves` parts a block between attention and feed-forward, but here both read the "
                "block's input side by side; leave it out"
            )
        if low:
            return tuple(found)
        if self.width % self.heads:
            below = self.width // self.heads * self.heads
            nearest = [str(width) for width in (below, below + self.heads) if width]
            found.append(
                f"`width` {self.width} is not divisible by `heads` {self.heads}; "
                f"take `width` {' or '.join(nearest)}"
            )
        elif self.positions == "rotary" and self.turned_width % 2:
            found.append(
                f"{self.turned_width} features of a head turn, must be an even number; "
                f"change `width` {self.width} or `heads` {self.heads}"
            )
        elif self.turned_width > self.head_width:
            found.append(
                f"{self.turned_width} features of a head turn, but a head is only "
                f"{self.head_width} wide; raise `width` {self.width} or lower `heads` {self.heads}"
            )
        if self.heads % self.key_heads:
            found.append(f"`heads` {self.heads} is not divisible by `key_heads` {self.key_heads}")
        return tuple(found)

    @property
    def turned_width(self) -> int:
        """Features of each head that rotary positions turn; none with learned positions."""
        if self.positions == "learned":
            return 0
        return self.head_width if self.rotary_width is None else self.rotary_width
