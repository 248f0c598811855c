"""What prices of layers depend on, and those of their state."""

from typing import NamedTuple

from windlass.cost.arrays import Floats
from windlass.cost.clock.plan_columns import LayerConfig
from windlass.program import InstructionKind


class StatePrice(NamedTuple):
    """Seconds of what happens to a layer's state in a step, by layer column."""

    gather: Floats
    """All-gather of weights before their first pass."""
    gather_overlapped: Floats
    """The part of `gather` that overlaps with computation."""
    reduce: Floats
    """Gradient reduction on the links."""
    overlapped: Floats
    """The part of `reduce` that overlaps with computation."""
    alternates: Floats
    """1 where a reduction starts only once the one before has ended, else 0."""
    update: Floats
    spread: Floats
    """All-gather of updated parameters."""
    moving: Floats
    """Seconds to read and write back offloaded optimizer state."""
    norm_bytes: Floats
    norm_launches: Floats


class PassWay(NamedTuple):
    """A pass of a layer."""

    kind: InstructionKind
    selective: bool = False
    """Whether the layer is recomputed selectively."""


class ExchangeKey(NamedTuple):
    """What communication in passes depends on besides how layers compute."""

    data: int
    """Data-parallel degree: replicas exchange on the same links."""
    parameters: int
    """Sharding degree of parameters that passes gather, else 1."""
    accumulates: bool
    """Whether they scatter gradients that several micro-batches sum."""
    pipeline: int
    """Number of stages if they lie between replicas, else 1."""


class StateKey(NamedTuple):
    """What the state of layers depends on."""

    config: LayerConfig
    accumulates: bool
    data: int
    parameters: int
    optimizer: int
    pipeline: int
    """Number of stages if they lie between replicas, else 1."""
