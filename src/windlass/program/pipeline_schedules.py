"""Orders: in which turn one stage runs the forward and backward passes of its micro-batches.

An order is one function of stages, stage and micro-batches, and one entry in `ORDERS`. Below, p is
the number of stages, m of micro-batches, v of chunks; tf, tb and tw are the seconds of a forward, a
backward and a weights' part of a backward pass of one stage, equal on all, and messages take none.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from windlass.schema.plan import PipelineSchedule, Plan

Part = Literal["forward", "backward", "backward_input", "backward_weight"]
"""A zero-bubble order runs a backward pass in two parts; every other one runs it as a whole."""


class Pass(NamedTuple):
    """One pass of one micro-batch through a stage, or through one chunk of it."""

    kind: Part
    micro: int
    chunk: int = 0
    """Which of the stage's chunks of layers, first to last; 0 where a stage is in one piece."""


def passes(plan: Plan, stage: int) -> tuple[Pass, ...]:
    """The passes of one stage of a plan, in turn."""
    micros = plan.batch.accumulation
    return taken(
        plan.parallel.schedule,
        plan.parallel.pipeline,
        stage,
        micros,
        chunks=plan.parallel.virtual_stages,
    )


def taken(
    order: PipelineSchedule, stages: int, stage: int, micros: int, *, chunks: int
) -> tuple[Pass, ...]:
    """The passes that one of p stages takes in an order, in turn.

    Args:
        order: any.
        stages: p.
        stage: which of them.
        micros: micro-batches of a step.
        chunks: of a stage; 1 unless the order interleaves.
    """
    if order == "interleaved":
        return interleaved(stages, stage, micros, chunks)
    return ORDERS[order](stages, stage, micros)


def gpipe(stages: int, stage: int, micros: int) -> tuple[Pass, ...]:
    """All forward passes, then all backward passes; a single stage has no reason to wait.

    Source: Huang et al. 2019, GPipe.
    """
    if stages == 1:
        return one_forward_one_backward(stages, stage, micros)
    forward = tuple(Pass("forward", micro) for micro in range(micros))
    return (*forward, *(Pass("backward", micro) for micro in range(micros)))


def one_forward_one_backward(stages: int, stage: int, micros: int) -> tuple[Pass, ...]:
    """1F1B: a stage holds at most `min(m, p - stage)` micro-batches at once.

    Warm-up: enough forward passes to fill the stages behind this one. Steady: one forward, one
    backward. Drain: the backward passes that are left. The whole takes `(m + p - 1) (tf + tb)`.

    Source: Narayanan et al. 2021, section 2.2.1.
    """
    warm = min(micros, stages - stage - 1)
    turns = [Pass("forward", micro) for micro in range(warm)]
    for micro in range(micros - warm):
        turns += (Pass("forward", warm + micro), Pass("backward", micro))
    turns += (Pass("backward", micro) for micro in range(micros - warm, micros))
    return tuple(turns)


def interleaved(stages: int, stage: int, micros: int, chunks: int = 1) -> tuple[Pass, ...]:
    """Interleaved 1F1B: a stage has v chunks of layers, which take turns.

    The chunks run p micro-batches each before the next one's turn, so m is a multiple of p. All
    waiting is that of one chunk: the whole takes `m (tf + tb) + (p - 1) (tf + tb) / v`. The price
    is memory, `min(m v, 2 (p - stage - 1) + (v - 1) p + 1)` micro-batches of one chunk at once, and
    v times the messages.

    Source: Narayanan et al. 2021, section 2.2.2.
    """
    cycle = stages * chunks
    at = [
        (turn % cycle // stages, turn // cycle * stages + turn % stages)
        for turn in range(micros * chunks)
    ]
    forward = [Pass("forward", micro, chunk) for chunk, micro in at]
    backward = [Pass("backward", micro, chunks - 1 - chunk) for chunk, micro in at]
    warm = min(len(at), 2 * (stages - stage - 1) + (chunks - 1) * stages)
    order = forward[:warm]
    for turn in range(len(at) - warm):
        order += (forward[warm + turn], backward[turn])
    return (*order, *backward[len(at) - warm :])


def zero_bubble(stages: int, stage: int, micros: int) -> tuple[Pass, ...]:
    """ZB-H1: 1F1B with the weights' part of each backward pass put where a stage would wait.

    Only the input's part, tb of `tb + tw`, is waited for by the stage before. The weights' part
    comes as many micro-batches later as stages come before this one, so that every stage holds
    `min(m, p)` micro-batches, as the first one does in 1F1B. If `tw <= min(tf, tb)` the whole takes
    `m (tf + tb + tw) + (p - 1) (tf + tb) - (min(m, p) - 1) tw`.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2.3.
    """
    turns: list[Pass] = []
    for turn in one_forward_one_backward(stages, stage, micros):
        if turn.kind == "forward":
            turns.append(turn)
            continue
        turns.append(Pass("backward_input", turn.micro))
        if turn.micro >= stage:
            turns.append(Pass("backward_weight", turn.micro - stage))
    left = range(max(0, micros - stage), micros)
    return (*turns, *(Pass("backward_weight", micro) for micro in left))


ORDERS: Mapping[PipelineSchedule, Callable[[int, int, int], tuple[Pass, ...]]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved": interleaved,
        "zero-bubble": zero_bubble,
    }
)
"""The orders: `f(stages, stage, micros)` gives the passes of one stage."""
