"""How many experts a feed-forward branch has, and how tokens choose (without torch)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Literal

RouterScores = Literal["softmax", "sigmoid"]
"""What makes scores of a router's logits. A softmax over the chosen experts alone is `softmax` with
`norm_topk`: dividing by the sum of the chosen scores leaves the same numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertConfig:
    """The mixture of experts in place of a block's feed-forward branch.

    Shape letters: experts E, chosen by each token k, inner width of an expert f.
    """

    count: int
    """Experts E of a layer."""
    per_token: int = 2
    """Experts k that each token takes."""
    ffn: int
    """Inner width f of one expert."""
    shared_ffn: int | None = None
    """Inner width of the expert that all tokens take, of several together; None has none."""
    shared_gate: bool = False
    """Whether a token's shared expert counts by a gate of its own, as in Qwen2-MoE."""
    scores: RouterScores = "softmax"
    norm_topk: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    capacity: float | None = None
    """Most tokens that an expert takes of a sequence, as a multiple of an equal share; the later
    ones go without it. None drops no token."""
    balance_loss: float | None = None
    """Factor of the balance loss of each sequence; None has none."""
    balance_bias: float | None = None
    """How much the bias by which experts are chosen moves in a step, towards those with fewer
    tokens; None has no bias. Source: Wang et al. 2024, arXiv:2408.15664."""
    every: int = 1
    """One block of so many has experts, the last of each such run."""
    dense_layers: int = 0
    """First blocks that keep a plain feed-forward branch."""

    def has_experts(self, block: int) -> bool:
        """Whether a block has experts, by its index from 0."""
        return block >= self.dense_layers and (block + 1) % self.every == 0

    def slots(self, sequence: int) -> int | None:
        """Most tokens that an expert takes of a sequence; None sets no limit."""
        if self.capacity is None:
            return None
        return ceil(self.capacity * sequence * self.per_token / self.count)

    def errors(self) -> Iterator[str]:
        """Every reason why a layer cannot have such experts."""
        for name, value in (("experts", self.count), ("expert_ffn", self.ffn)):
            if value < 1:
                yield f"`{name}` is {value}, must be at least 1"
        if not 1 <= self.per_token <= max(self.count, 1):
            yield (
                f"`experts_per_token` is {self.per_token}, must be at least 1 and at most "
                f"`experts` {self.count}"
            )
        for name in ("shared_ffn", "capacity", "balance_loss", "balance_bias"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                yield f"`{name}` is {value:g}, must be above 0"
        if self.shared_gate and self.shared_ffn is None:
            yield "`shared_gate` is set, but there is no `shared_ffn` that it gates"
        if self.every < 1:
            yield f"`every` is {self.every}, must be at least 1"
        if self.dense_layers < 0:
            yield f"`dense_layers` is {self.dense_layers}, must be at least 0"
