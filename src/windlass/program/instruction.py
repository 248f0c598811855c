"""Instructions: the explicit transfers, computations and communication of one device."""

from typing import Literal, NamedTuple

from windlass.document import Document

InstructionKind = Literal[
    "load_batch",  # copies a micro-batch's tokens to device memory
    # Copies a layer's weights, or this device's shard of them, from the offload tier. It runs in
    # the background; instructions that use the weights wait for it.
    "prefetch_weights",
    "free_weights",  # frees a layer's full weights; the offload tier or the shards have the same
    "free_shard",  # frees the device copy of a weight shard; the offload tier has the same
    "unshard_weights",  # all-gathers a layer's weight shards over replicas
    "all_gather_params",  # all-gathers the parts of a weight shard that replicas have updated
    "forward",
    "recompute",  # runs the layer's forward again, from its saved input
    "backward",  # accumulates into the layer's gradient
    "backward_input",  # the input gradient, which the previous stage waits for
    "backward_weight",  # the weight gradient, which is accumulated
    "send",
    "receive",
    "send_tied_weights",  # sends weights to another stage that computes with them too
    "recv_tied_weights",
    "send_tied_grads",  # sends the gradient of tied weights to the stage that owns them
    "accumulate_tied_grads",  # receives it and adds it to the owner's gradient
    # Averages gradients over replicas, each device keeping its shard. Gradients of parameters that
    # tensor-parallel ranks replicate are first summed over those ranks.
    "reduce_grads",
    "offload_activation",  # copies a layer's output to the offload tier
    "reload_activation",  # copies it back
    # Copies a layer's accumulated gradient to the offload tier in the background; the next
    # `offload_grads` waits for it.
    "offload_grads",
    "grad_norm",  # the global gradient norm, which counts each shard and each replica once
    "update",  # the optimizer step of one layer; also fetches its weights if they are offloaded
    "sync",  # ends the step on all devices
]

GRADIENT_PASSES: tuple[InstructionKind, ...] = ("backward", "backward_weight")
"""Passes that accumulate a weight gradient and end a micro-batch's use of a layer."""

WEIGHT_PASSES: tuple[InstructionKind, ...] = (
    "forward",
    "recompute",
    "backward",
    "backward_input",
)
"""Passes that compute with a layer's weights."""

MATCHING_RECEIVE: dict[InstructionKind, InstructionKind] = {
    "send": "receive",
    "send_tied_weights": "recv_tied_weights",
    "send_tied_grads": "accumulate_tied_grads",
}
"""The instruction that receives what each kind of send sends."""

COLLECTIVE_KINDS: tuple[InstructionKind, ...] = (
    "unshard_weights",
    "all_gather_params",
    "reduce_grads",
    "grad_norm",
    "sync",
)
"""Kinds that wait for every device of their group, as passes with collectives also do."""

GLOBAL_COLLECTIVES: tuple[InstructionKind, ...] = ("grad_norm", "sync")
"""Collectives over all devices of the plan."""

TRANSFER_KINDS: tuple[InstructionKind, ...] = (
    "prefetch_weights",
    "update",
    "offload_grads",
    "offload_activation",
    "reload_activation",
)
"""Kinds that run in the background if they move data between memory tiers."""

BLOCKING_KINDS: tuple[InstructionKind, ...] = (
    "receive",
    "recv_tied_weights",
    "accumulate_tied_grads",
    *COLLECTIVE_KINDS,
)
"""Kinds that wait for other devices."""


class Instruction(NamedTuple):
    """One step of a device's program: what to do, for which layer and micro-batch."""

    kind: InstructionKind
    layer: int | None = None
    """Layer index; None where it does not apply. Tied weights use the index of the user layer."""
    micro_batch: int | None = None
    """Index of the micro-batch within the step; None where it does not apply."""

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        micro = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.kind}{layer}{micro}"


class Program(Document):
    """All instructions of one step on one device, in order."""

    plan: str
    """The plan's label."""
    device: int
    """Global rank of the device."""
    instructions: tuple[Instruction, ...]
    flush_deferred_updates: tuple[Instruction, ...] = ()
    """Instructions that apply the updates which the step deferred to the next one. They run where
    no other step follows at once: at the end, before a checkpoint and before an evaluation. Empty
    if the step defers no updates."""
