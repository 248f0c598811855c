"""Instruction: one explicit access, computation or exchange of one device, and nothing hidden."""

from typing import Literal, NamedTuple

from windlass.document import Document

InstructionKind = Literal[
    "load_batch",  # a micro-batch's tokens enter the near tier
    "prefetch_weights",  # a layer's weights, or its shard, come from home beside what follows; users wait
    "free_weights",  # the near copy of a layer's whole weights is freed; home or shards hold the same
    "free_shard",  # the near copy of a shard of weights is freed; its home holds the same
    "unshard_weights",  # shards of weights come together over replicas
    "all_gather_params",  # parts of a shard that its replicas have updated come together
    "forward",
    "recompute",  # the layer's forward again, from its kept input
    "backward",  # adds to the layer's gradient
    "backward_input",  # what the stage before waits for of a backward pass
    "backward_weight",  # the rest: adds to the layer's gradient
    "send",
    "receive",
    "send_tied_weights",  # weights go to another stage that computes with them too
    "recv_tied_weights",  # and come there
    "send_tied_grads",  # the gradient of borrowed weights goes to their owner
    "accumulate_tied_grads",  # and is added to the owner's
    # Before, the gradient of what every slice of a layer has whole is summed over the slices.
    "reduce_grads",  # gradients are averaged over replicas; only the device's shard is left
    "offload_activation",  # an activation goes to its home
    "reload_activation",  # and comes back
    "offload_grads",  # a layer's summed gradient goes home, beside what follows; the next store waits
    # Of each shard, and of what every slice has whole, one copy counts.
    "grad_norm",  # the global gradient norm
    "update",  # the optimizer's step for one layer; fetches its weights too if they are away
    "sync",  # the end of a step: all devices agree
]

GRADIENT_PASSES: tuple[InstructionKind, ...] = ("backward", "backward_weight")
"""Those that add to a gradient, and end a micro-batch's stay in a layer."""

WEIGHT_PASSES: tuple[InstructionKind, ...] = ("forward", "recompute", "backward", "backward_input")
"""Those that compute with weights."""

MATCHING_RECEIVE: dict[InstructionKind, InstructionKind] = {
    "send": "receive",
    "send_tied_weights": "recv_tied_weights",
    "send_tied_grads": "accumulate_tied_grads",
}
"""What another device does with what one sends."""

COLLECTIVE_KINDS: tuple[InstructionKind, ...] = (
    "unshard_weights",
    "all_gather_params",
    "reduce_grads",
    "grad_norm",
    "sync",
)
"""Those that wait until every device of their group is there; so do passes that exchange."""

GLOBAL_COLLECTIVES: tuple[InstructionKind, ...] = ("grad_norm", "sync")
"""Those of them that all devices of the plan have to be there for."""

TRANSFER_KINDS: tuple[InstructionKind, ...] = (
    "prefetch_weights",
    "update",
    "offload_grads",
    "offload_activation",
    "reload_activation",
)
"""Those that go on beside what follows where they move something between tiers."""

BLOCKING_KINDS: tuple[InstructionKind, ...] = ("receive", "recv_tied_weights", "accumulate_tied_grads", *COLLECTIVE_KINDS)
"""Those that wait for other devices."""


class Instruction(NamedTuple):
    """What to do, for which layer, on which micro-batch."""

    kind: InstructionKind
    layer: int | None = None
    """Index into the chain; None where it does not matter. Loans go by the borrowing layer."""
    micro_batch: int | None = None
    """Index of the micro-batch within the step; None where it does not matter."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        micro = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.kind}{layer}{micro}"


class Program(Document):
    """All instructions of one step on one device, in order."""

    plan: str
    """The plan's label."""
    device: int
    instructions: tuple[Instruction, ...]
    flush_deferred_updates: tuple[Instruction, ...] = ()
    """What applies the updates that a step has put off, where no other step follows at once: at the
    end, before a checkpoint, before an evaluation. Empty if a step puts nothing off."""
