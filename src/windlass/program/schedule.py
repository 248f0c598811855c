"""Orders: in which turn one stage runs the forward and backward passes of its micro-batches.

An order is one function of stages, stage and micro-batches, and one entry in `ORDERS`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from windlass.spec.plan import Order


class Pass(NamedTuple):
    """One pass of one micro-batch through a stage."""

    kind: Literal["forward", "backward"]
    micro: int


def gpipe(stages: int, stage: int, micros: int) -> tuple[Pass, ...]:
    """All forward passes, then all backward passes; a single stage has no reason to wait.

    Source: Huang et al. 2019, GPipe.
    """
    if stages == 1:
        return one_forward_one_backward(stages, stage, micros)
    forward = tuple(Pass("forward", micro) for micro in range(micros))
    return (*forward, *(Pass("backward", micro) for micro in range(micros)))


def one_forward_one_backward(stages: int, stage: int, micros: int) -> tuple[Pass, ...]:
    """1F1B: a stage holds at most `min(micros, stages - stage)` micro-batches at once.

    Warm-up: enough forward passes to fill the stages behind this one. Steady: one forward, one
    backward. Drain: the backward passes that are left. The whole takes
    `(micros + stages - 1) * (forward + backward)` if every stage takes equally long.

    Source: Narayanan et al. 2021, section 2.2.1.
    """
    warm = min(micros, stages - stage - 1)
    passes = [Pass("forward", micro) for micro in range(warm)]
    for micro in range(micros - warm):
        passes += (Pass("forward", warm + micro), Pass("backward", micro))
    passes += (Pass("backward", micro) for micro in range(micros - warm, micros))
    return tuple(passes)


ORDERS: Mapping[Order, Callable[[int, int, int], tuple[Pass, ...]]] = MappingProxyType(
    {"gpipe": gpipe, "1f1b": one_forward_one_backward}
)
"""The orders that can be lowered: `f(stages, stage, micros)` gives the passes of one stage."""
