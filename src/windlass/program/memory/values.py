"""Values: what lies in memory between instructions, by name, class and layer."""

from typing import Literal, NamedTuple

from windlass.schema.prediction import MemoryClass

TensorName = Literal[
    "weights",  # of a layer, whole
    "weights shard",  # the device's share, where replicas share one copy
    "borrowed weights",  # a working copy of what another stage owns; goes by the owner
    "optimizer",
    "gradients",  # summed over micro-batches; tied weights' where they live
    "gradient shard",  # summed over replicas: the part that the device updates
    "borrowed gradients",  # of borrowed weights, until their owner takes them over
    "tokens",  # inputs and targets of one micro-batch
    "output",  # of a layer: the next layer's input, and what its own backward starts from
    "output again",  # the same, recomputed, where the first one is still needed
    "kept",  # for backward, apart from the input
    "output gradient",  # of a layer: what the next layer's backward passes down
    "inner gradients",  # what the input's part of a backward leaves for the weights' part
    "passing",  # an output that goes home beside what follows, and the memory it may pass through
    "staging",  # what optimizer state passes through on its way from and to its home
    "gradients at home",
    "output at home",
]

MEMORY_CLASS: dict[TensorName, MemoryClass] = {
    "weights": "weights",
    "weights shard": "weights",
    "borrowed weights": "weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "gradient shard": "gradients",
    "borrowed gradients": "gradients",
    "tokens": "activations",
    "output": "activations",
    "output again": "activations",
    "kept": "activations",
    "output gradient": "activations",
    "inner gradients": "activations",
    "passing": "activations",
    "staging": "working",
    "gradients at home": "gradients",
    "output at home": "activations",
}

GRADIENT_SUMS: tuple[TensorName, ...] = ("gradients", "borrowed gradients")
"""What backward passes add to."""

OFFLOADED_NAMES: tuple[TensorName, ...] = ("gradients at home", "output at home")
"""What takes no near memory."""

BOUNCE_BYTES = 4 * 2**20
"""Each of two halves of memory that bytes pass through between a file and tensors that begin
anywhere: while one is copied the other is read or written."""

STAGING_BYTES = 52 * 2**20
"""The near memory that optimizer state passes through, part by part, where its home is far. It is
there as long as the run, and no layer is too large for it."""


class TensorId(NamedTuple):
    """Something that lies in memory between instructions."""

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
    """Held only while it runs, above what it makes."""
