"""Instruction: one explicit access, computation or exchange of one device, and nothing hidden."""

from typing import Literal, NamedTuple

from windlass.document import Document

Kind = Literal[
    "load",  # a micro-batch's tokens enter the near tier
    "fetch",  # a layer's weights come from their home
    "release",  # a layer's weights (or gradients, optimizer state) go home
    "gather",  # shards of weights come together over replicas
    "forward",
    "recompute",  # the layer's forward again, from its kept input
    "backward",  # adds to the layer's gradient
    "send",
    "receive",
    "reduce",  # gradients are averaged over replicas
    "keep",  # an activation goes to its home
    "restore",  # and comes back
    "norm",  # the global gradient norm
    "update",  # the optimizer's step for one layer
    "sync",  # the end of a step: all devices agree
]


class Instruction(NamedTuple):
    """What to do, for which layer, on which micro-batch."""

    kind: Kind
    layer: int | None = None
    """Index into the chain; None where it does not matter."""
    micro: int | None = None
    """Index of the micro-batch within the step; None where it does not matter."""


class Program(Document):
    """All instructions of one step on one device, in order."""

    plan: str
    """The plan's label."""
    device: int
    instructions: tuple[Instruction, ...]
