"""Tensors that are alive between instructions, identified by name, layer and micro-batch."""

from typing import Literal, NamedTuple

from windlass.schema import MemoryClass

TensorName = Literal[
    "weights",  # a layer's full weights
    "weight shard",  # this device's shard, where replicas share one copy
    "tied weights",  # a working copy of weights that another stage owns, by owner layer
    "optimizer state",
    "gradients",  # accumulated over micro-batches; for tied weights at their owner
    "gradient rows",  # those that an embedding looked up, until the gradient is complete
    "gradient shard",  # summed over replicas: the part that this device updates
    "tied gradients",  # of weights that another stage owns, until they are sent there
    "tokens",  # inputs and targets of one micro-batch
    "output",  # a layer's output: the next layer's input and the root of its own backward
    "recomputed output",  # the same, recomputed where the first one is still needed
    "saved activations",  # saved for backward, apart from the layer's input
    "output gradient",  # the gradient of a layer's output
    "inner gradients",  # what `backward_input` leaves for `backward_weight`
    "activation transfer buffer",  # an output on its way to the offload tier, and bounce buffers
    "staging buffer",  # what optimizer state passes through to and from the offload tier
    "offloaded gradients",
    "offloaded output",
]

MEMORY_CLASS: dict[TensorName, MemoryClass] = {
    "weights": "weights",
    "weight shard": "weights",
    "tied weights": "weights",
    "optimizer state": "optimizer",
    "gradients": "gradients",
    "gradient rows": "gradients",
    "gradient shard": "gradients",
    "tied gradients": "gradients",
    "tokens": "activations",
    "output": "activations",
    "recomputed output": "activations",
    "saved activations": "activations",
    "output gradient": "activations",
    "inner gradients": "activations",
    "activation transfer buffer": "activations",
    "staging buffer": "working",
    "offloaded gradients": "gradients",
    "offloaded output": "activations",
}

GRADIENT_SUMS: tuple[TensorName, ...] = ("gradients", "gradient rows", "tied gradients")
"""The tensors that backward passes accumulate into."""

OFFLOADED_NAMES: tuple[TensorName, ...] = ("offloaded gradients", "offloaded output")
"""The tensors that take no device memory."""

BOUNCE_BYTES = 4 * 2**20
"""Size of each of two bounce buffers between a file and unaligned tensors: while one is copied, the
other is read or written."""

STAGING_BYTES = 52 * 2**20
"""Device memory that offloaded optimizer state passes through, part by part. It is allocated once
for the whole run, and a layer of any size can pass through it."""


class TensorId(NamedTuple):
    """Identifies a tensor, or a group of tensors, that is alive between instructions."""

    name: TensorName
    layer: int | None = None
    micro_batch: int | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        micro = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"{self.name}{layer}{micro}"


class Effect(NamedTuple):
    """What one instruction does to memory."""

    reads: tuple[TensorId, ...] = ()
    makes: tuple[TensorId, ...] = ()
    frees: tuple[TensorId, ...] = ()
    working_bytes: int = 0
    """Temporary memory while the instruction runs, above the tensors that it makes."""
