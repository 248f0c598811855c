"""Chain: a model as the layers at which it may be cut, found in any module that is one."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A model as consecutive layers.

    The first layer takes tokens `Int[b s]`, the last gives logits `Float[b s v]`, every other maps
    `Float[b s d]` to `Float[b s d]`. The loss (mean cross-entropy) is not part of the chain.
    """

    name: str
    layers: tuple[nn.Module, ...]
    """On the meta device, or holding real weights."""
    names: tuple[str, ...]
    """One for each layer, unique; a parameter's full name is `<layer name>.<its name inside>`."""
    kinds: tuple[str, ...]
    """One for each layer; layers of one kind have equal structure and shapes."""
    ties: Mapping[str, str]
    """Full name of a parameter -> full name of the earlier one whose memory it shares."""
    vocabulary: int
    max_sequence: int | None
    """Longest sequence the model takes; None if it sets no limit."""
