"""Instruction: one explicit access, computation or exchange of one device, and nothing hidden."""

from typing import Literal, NamedTuple

from windlass.document import Document

Kind = Literal[
    "load",  # a micro-batch's tokens enter the near tier
    "fetch",  # a layer's weights come from their home, beside what follows; who uses them waits
    "release",  # the near copy of a layer's weights is freed; their home holds the same
    "gather",  # shards of weights come together over replicas
    "forward",
    "recompute",  # the layer's forward again, from its kept input
    "backward",  # adds to the layer's gradient
    "send",
    "receive",
    "reduce",  # gradients are averaged over replicas
    "keep",  # an activation goes to its home
    "restore",  # and comes back
    "store",  # a layer's summed gradient goes home, beside what follows; the next store waits
    "norm",  # the global gradient norm
    "update",  # the optimizer's step for one layer; fetches its weights too if they are away
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
    settle: tuple[Instruction, ...] = ()
    """What applies the updates that a step has put off, where no other step follows at once: at the
    end, before a checkpoint, before an evaluation. Empty if a step puts nothing off."""
