"""What an evaluation takes on the device, beside all that training holds."""

from windlass.program.memory.layer_sizes import plan_layer_sizes
from windlass.schema import Graph, Plan

_TOKEN_BYTES = 16
"""Input and target of a token, as 64-bit integers."""


def evaluation_bytes(plan: Plan, graph: Graph) -> int:
    """Bytes that a plan in device memory on one device allocates for a held-out micro-batch.

    Layers run one after the other, each with its input, as in a forward pass of training.

    Args:
        plan: states micro-batch and sequence.
    """
    sizes = plan_layer_sizes(plan, graph)
    inputs = (0, *(each.output for each in sizes[:-1]))
    passes = (each.forward_peak + entering for each, entering in zip(sizes, inputs, strict=True))
    return max(passes) + _TOKEN_BYTES * plan.batch.micro * plan.batch.sequence
