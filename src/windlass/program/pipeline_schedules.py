"""Pipeline schedules: the order in which a stage runs the passes of its micro-batches.

A schedule is one function of (stages, stage, micro_batches) and one entry in `SCHEDULES`. In the
formulas below p is the number of stages, m of micro-batches and v of model chunks; tf, tb and tw
are the seconds of a forward, a backward and a weight-gradient pass of one stage, equal on all
stages, and messages take no time.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Literal, NamedTuple

from windlass.schema import PipelineSchedule, Plan

PassKind = Literal["forward", "backward", "backward_input", "backward_weight"]
"""Zero-bubble schedules split a backward pass in two; all others run `backward` as a whole."""


class PipelinePass(NamedTuple):
    """One pass of one micro-batch through a stage, or through one model chunk of it."""

    kind: PassKind
    micro_batch: int
    chunk: int = 0
    """Index of the model chunk within the stage; 0 without interleaving."""


def stage_passes(plan: Plan, stage: int) -> tuple[PipelinePass, ...]:
    """The passes of one stage of a plan, in order."""
    parallel = plan.parallel
    return schedule_passes(
        parallel.schedule,
        parallel.pipeline,
        stage,
        plan.batch.accumulation,
        chunks=parallel.virtual_stages,
    )


def schedule_passes(
    schedule: PipelineSchedule, stages: int, stage: int, micro_batches: int, *, chunks: int
) -> tuple[PipelinePass, ...]:
    """The passes of one of p stages under a schedule, in order.

    Args:
        micro_batches: number of micro-batches m in a step.
        chunks: model chunks of each stage v; 1 unless the schedule is interleaved.
    """
    if schedule == "interleaved":
        return interleaved(stages, stage, micro_batches, chunks)
    return SCHEDULES[schedule](stages, stage, micro_batches)


def gpipe(stages: int, stage: int, micro_batches: int) -> tuple[PipelinePass, ...]:
    """GPipe: all forward passes, then all backward passes; a single stage runs 1F1B instead.

    Source: Huang et al. 2019, GPipe.
    """
    if stages == 1:
        return one_forward_one_backward(stages, stage, micro_batches)
    forward = tuple(PipelinePass("forward", index) for index in range(micro_batches))
    return (*forward, *(PipelinePass("backward", index) for index in range(micro_batches)))


def one_forward_one_backward(
    stages: int, stage: int, micro_batches: int
) -> tuple[PipelinePass, ...]:
    """1F1B: a stage holds activations of at most `min(m, p - stage)` micro-batches at once.

    Warm-up: enough forward passes to fill the later stages. Steady: one forward, one backward.
    Drain: the remaining backward passes. The step takes `(m + p - 1) (tf + tb)`.

    Source: Narayanan et al. 2021, section 2.2.1.
    """
    warmup = min(micro_batches, stages - stage - 1)
    passes = [PipelinePass("forward", index) for index in range(warmup)]
    for index in range(micro_batches - warmup):
        passes += (PipelinePass("forward", warmup + index), PipelinePass("backward", index))
    drain = range(micro_batches - warmup, micro_batches)
    passes += (PipelinePass("backward", index) for index in drain)
    return tuple(passes)


def interleaved(
    stages: int, stage: int, micro_batches: int, chunks: int = 1
) -> tuple[PipelinePass, ...]:
    """Interleaved 1F1B: each stage has v model chunks that take turns.

    A chunk runs p micro-batches before the next chunk's turn, so m must be a multiple of p. The
    bubble is that of one chunk: the step takes `m (tf + tb) + (p - 1) (tf + tb) / v`. The price is
    memory, activations of `min(m v, 2 (p - stage - 1) + (v - 1) p + 1)` micro-batches of one chunk
    at once, and v times the messages.

    Source: Narayanan et al. 2021, section 2.2.2.
    """
    forward, backward = _interleaved_turns(stages, micro_batches, chunks)
    warmup = min(len(forward), 2 * (stages - stage - 1) + (chunks - 1) * stages)
    steady = chain.from_iterable(zip(forward[warmup:], backward, strict=False))
    return (*forward[:warmup], *steady, *backward[len(forward) - warmup :])


@lru_cache(maxsize=64)
def _interleaved_turns(
    stages: int, micro_batches: int, chunks: int
) -> tuple[tuple[PipelinePass, ...], tuple[PipelinePass, ...]]:
    """Forward and backward passes of each stage, in the order that is the same on all of them."""
    cycle = stages * chunks
    order = [
        (turn % cycle // stages, turn // cycle * stages + turn % stages)
        for turn in range(micro_batches * chunks)
    ]
    return (
        tuple(PipelinePass("forward", index, chunk) for chunk, index in order),
        tuple(PipelinePass("backward", index, chunks - 1 - chunk) for chunk, index in order),
    )


def zero_bubble(stages: int, stage: int, micro_batches: int) -> tuple[PipelinePass, ...]:
    """ZB-H1: 1F1B with the weight-gradient passes moved into the bubble.

    The previous stage waits only for the input gradient, tb of `tb + tw`. Stage k delays the
    weight gradient by k micro-batches, so that every stage holds activations of `min(m, p)`
    micro-batches, as the first one does in 1F1B. If `tw <= min(tf, tb)` the step takes
    `m (tf + tb + tw) + (p - 1) (tf + tb) - (min(m, p) - 1) tw`.

    Source: Qi et al. 2023, arXiv:2401.10241, section 2.3.
    """
    passes: list[PipelinePass] = []
    for item in one_forward_one_backward(stages, stage, micro_batches):
        if item.kind == "forward":
            passes.append(item)
            continue
        passes.append(PipelinePass("backward_input", item.micro_batch))
        if item.micro_batch >= stage:
            passes.append(PipelinePass("backward_weight", item.micro_batch - stage))
    remaining = range(max(0, micro_batches - stage), micro_batches)
    return (*passes, *(PipelinePass("backward_weight", index) for index in remaining))


SCHEDULES: Mapping[PipelineSchedule, Callable[[int, int, int], tuple[PipelinePass, ...]]] = (
    MappingProxyType(
        {
            "gpipe": gpipe,
            "1f1b": one_forward_one_backward,
            "interleaved": interleaved,
            "zero-bubble": zero_bubble,
        }
    )
)
"""The schedules: `f(stages, stage, micro_batches)` returns the passes of one stage."""
