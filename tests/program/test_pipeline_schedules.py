from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from windlass.program.pipeline_schedules import (
    SCHEDULES,
    PipelinePass,
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)

FORWARD, BACKWARD = 1, 2
STAGES, MICRO_BATCHES = st.integers(1, 6), st.integers(1, 12)


def max_in_flight(passes: tuple[PipelinePass, ...], chunk: int | None = None) -> int:
    """Most micro-batches that a stage holds activations of at once; None counts all chunks.

    A micro-batch is in flight from its forward pass to the end of its backward pass.
    """
    count = most = 0
    for item in passes:
        if chunk is None or item.chunk == chunk:
            count += item.kind == "forward"
            most = max(most, count)
            count -= item.kind in ("backward", "backward_weight")
    return most


def makespan(lists: Sequence[tuple[PipelinePass, ...]], **seconds: int):
    """Simulates a schedule with a clock: an independent check of the formulas.

    Stage s runs chunk c as the `c p + s`th of all; each waits for the one before, or after it.
    """
    cost = {"forward": FORWARD, "backward": BACKWARD} | seconds
    stages, chunks = len(lists), 1 + max(step.chunk for step in lists[0])
    done: dict[tuple[str, int, int], int] = {}
    at, clock = [0] * stages, [0] * stages
    while any(at[s] < len(lists[s]) for s in range(stages)):
        before = list(at)
        for stage in range(stages):
            while at[stage] < len(lists[stage]):
                kind, micro, chunk = lists[stage][at[stage]]
                here = chunk * stages + stage
                feeder = {"forward": here - 1, "backward_weight": here}.get(kind, here + 1)
                awaited = "backward_input" if kind == "backward_weight" else kind
                fed = 0
                if 0 <= feeder < stages * chunks:
                    if (awaited, feeder, micro) not in done:
                        break
                    fed = done[awaited, feeder, micro]
                clock[stage] = max(clock[stage], fed) + cost[kind]
                done[kind, here, micro] = clock[stage]
                at[stage] += 1
        assert at != before, "the order waits for itself"
    return max(clock)


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_1f1b_takes_micro_batches_plus_stages_minus_one_passes(stages: int, micro_batches: int):
    lists = [one_forward_one_backward(stages, stage, micro_batches) for stage in range(stages)]
    assert makespan(lists) == (micro_batches + stages - 1) * (FORWARD + BACKWARD)


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_1f1b_holds_at_most_as_many_micro_batches_as_stages_follow(stages: int, micro_batches: int):
    for stage in range(stages):
        passes = one_forward_one_backward(stages, stage, micro_batches)
        assert max_in_flight(passes) == min(micro_batches, stages - stage)


@given(stages=st.integers(2, 6), micro_batches=MICRO_BATCHES)
def test_gpipe_takes_as_long_as_1f1b_but_holds_every_micro_batch(stages: int, micro_batches: int):
    lists = [gpipe(stages, stage, micro_batches) for stage in range(stages)]
    assert makespan(lists) == (micro_batches + stages - 1) * (FORWARD + BACKWARD)
    assert {max_in_flight(passes) for passes in lists} == {micro_batches}


@given(stages=STAGES, groups=st.integers(1, 4), chunks=st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, groups: int, chunks: int):
    micro_batches = groups * stages
    lists = [interleaved(stages, stage, micro_batches, chunks) for stage in range(stages)]
    whole_stage = chunks * (FORWARD + BACKWARD)
    waiting = Fraction((stages - 1) * whole_stage, chunks)
    assert makespan(lists) == micro_batches * whole_stage + waiting


@given(stages=STAGES, groups=st.integers(1, 4), chunks=st.integers(1, 4))
def test_interleaving_holds_more_micro_batches(stages: int, groups: int, chunks: int):
    micro_batches = groups * stages
    for stage in range(stages):
        warmup = 2 * (stages - stage - 1) + (chunks - 1) * stages
        passes = interleaved(stages, stage, micro_batches, chunks)
        assert max_in_flight(passes) == min(micro_batches * chunks, warmup + 1)
        assert sum(max_in_flight(passes, chunk) for chunk in range(chunks)) >= max_in_flight(passes)


SECONDS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@given(stages=STAGES, micro_batches=MICRO_BATCHES, seconds=SECONDS)
def test_zero_bubble_is_shorter_by_one_weight_gradient_pass_for_each_filled_stage(
    stages: int, micro_batches: int, seconds: tuple[int, int, int]
):
    tw, tf, tb = sorted(seconds)
    lists = [zero_bubble(stages, stage, micro_batches) for stage in range(stages)]
    waiting = (stages - 1) * (tf + tb) - (min(micro_batches, stages) - 1) * tw
    seconds_taken = makespan(lists, forward=tf, backward_input=tb, backward_weight=tw)
    assert seconds_taken == micro_batches * (tf + tb + tw) + waiting


@given(stages=STAGES, micro_batches=st.integers(6, 12))
def test_zero_bubble_has_the_published_bubble_once_the_pipeline_is_full(
    stages: int, micro_batches: int
):
    lists = [zero_bubble(stages, stage, micro_batches) for stage in range(stages)]
    seconds_taken = makespan(lists, forward=3, backward_input=3, backward_weight=2)
    assert seconds_taken - micro_batches * 8 == (stages - 1) * (3 + 3 - 2)


@given(stages=STAGES, micro_batches=MICRO_BATCHES)
def test_zero_bubble_holds_on_every_stage_what_1f1b_holds_on_the_first(
    stages: int, micro_batches: int
):
    for stage in range(stages):
        passes = zero_bubble(stages, stage, micro_batches)
        assert max_in_flight(passes) == min(micro_batches, stages)


@pytest.mark.parametrize("name", SCHEDULES)
def test_on_one_device_forward_and_backward_alternate(name: str):
    back = ("backward_input", "backward_weight") if name == "zero-bubble" else ("backward",)
    assert [(step.kind, step.micro_batch) for step in SCHEDULES[name](1, 0, 2)] == [  # type: ignore[index]
        (kind, micro) for micro in range(2) for kind in ("forward", *back)
    ]


@given(order=st.sampled_from(list(SCHEDULES.values())), stages=STAGES, groups=st.integers(1, 3))
def test_every_pass_runs_once(order: object, stages: int, groups: int):
    assert callable(order)
    for stage in range(stages):
        passes = order(stages, stage, groups * stages)
        parts = 3 if passes[-1].kind == "backward_weight" else 2
        assert len(passes) == len(set(passes)) == parts * groups * stages


@given(stages=STAGES, groups=st.integers(1, 3), chunks=st.integers(1, 4))
def test_every_chunk_runs_every_micro_batch_once(stages: int, groups: int, chunks: int):
    for stage in range(stages):
        passes = interleaved(stages, stage, groups * stages, chunks)
        assert len(passes) == len(set(passes)) == 2 * groups * stages * chunks
