"""Instruction: one explicit access, computation or exchange of one device, and nothing hidden."""

from typing import Literal, NamedTuple

from windlass.document import Document

Kind = Literal[
    "load",  # a micro-batch's tokens enter the near tier
    "fetch",  # a layer's weights, or its shard, come from home beside what follows; users wait
    "release",  # the near copy of a layer's whole weights is freed; home or shards hold the same
    "drop",  # the near copy of a shard of weights is freed; its home holds the same
    "gather",  # shards of weights come together over replicas
    "spread",  # parts of a shard that its replicas have updated come together
    "forward",
    "recompute",  # the layer's forward again, from its kept input
    "backward",  # adds to the layer's gradient
    "backward input",  # what the stage before waits for of a backward pass
    "backward weight",  # the rest: adds to the layer's gradient
    "send",
    "receive",
    "lend",  # weights go to another stage that computes with them too
    "borrow",  # and come there
    "hand over",  # the gradient of borrowed weights goes to their owner
    "take over",  # and is added to the owner's
    # Before, the gradient of what every slice of a layer has whole is summed over the slices.
    "reduce",  # gradients are averaged over replicas; only the device's shard is left
    "keep",  # an activation goes to its home
    "restore",  # and comes back
    "store",  # a layer's summed gradient goes home, beside what follows; the next store waits
    # Of each shard, and of what every slice has whole, one copy counts.
    "norm",  # the global gradient norm
    "update",  # the optimizer's step for one layer; fetches its weights too if they are away
    "sync",  # the end of a step: all devices agree
]

BACKWARDS: tuple[Kind, ...] = ("backward", "backward weight")
"""Those that add to a gradient, and end a micro-batch's stay in a layer."""

COMPUTING: tuple[Kind, ...] = ("forward", "recompute", "backward", "backward input")
"""Those that compute with weights."""

ANSWERS: dict[Kind, Kind] = {"send": "receive", "lend": "borrow", "hand over": "take over"}
"""What another device does with what one sends."""

MEETINGS: tuple[Kind, ...] = ("gather", "spread", "reduce", "norm", "sync")
"""Those that wait until every device of their group is there; so do passes that exchange."""

TOGETHER: tuple[Kind, ...] = ("norm", "sync")
"""Those of them that all devices of the plan have to be there for."""

MOVES: tuple[Kind, ...] = ("fetch", "update", "store", "keep", "restore")
"""Those that go on beside what follows where they move something between tiers."""

WAITING: tuple[Kind, ...] = ("receive", "borrow", "take over", *MEETINGS)
"""Those that wait for other devices."""


class Instruction(NamedTuple):
    """What to do, for which layer, on which micro-batch."""

    kind: Kind
    layer: int | None = None
    """Index into the chain; None where it does not matter. Loans go by the borrowing layer."""
    micro: int | None = None
    """Index of the micro-batch within the step; None where it does not matter."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        return f"{self.kind}{layer}{micro}"


class Program(Document):
    """All instructions of one step on one device, in order."""

    plan: str
    """The plan's label."""
    device: int
    instructions: tuple[Instruction, ...]
    settle: tuple[Instruction, ...] = ()
    """What applies the updates that a step has put off, where no other step follows at once: at the
    end, before a checkpoint, before an evaluation. Empty if a step puts nothing off."""
