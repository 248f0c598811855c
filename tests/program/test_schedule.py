from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.program.schedule import ORDERS, Pass, gpipe, one_forward_one_backward

FORWARD, BACKWARD = 1, 2


def makespan(order: Callable[[int, int, int], tuple[Pass, ...]], stages: int, micros: int):
    """Plays an order with a clock: a second way of knowing what the formulas say."""
    lists = [order(stages, stage, micros) for stage in range(stages)]
    done: dict[tuple[int, Pass], int] = {}
    at, clock = [0] * stages, [0] * stages
    while any(at[s] < len(lists[s]) for s in range(stages)):
        before = list(at)
        for stage in range(stages):
            while at[stage] < len(lists[stage]):
                step = lists[stage][at[stage]]
                feeder = stage - 1 if step.kind == "forward" else stage + 1
                fed = 0
                if 0 <= feeder < stages:
                    if (feeder, step) not in done:
                        break
                    fed = done[feeder, step]
                cost = FORWARD if step.kind == "forward" else BACKWARD
                clock[stage] = max(clock[stage], fed) + cost
                done[stage, step] = clock[stage]
                at[stage] += 1
        assert at != before, "the order waits for itself"
    return max(clock)


def in_flight(passes: tuple[Pass, ...]):
    held = peak = 0
    for step in passes:
        held += 1 if step.kind == "forward" else -1
        peak = max(peak, held)
    return peak


@given(stages=st.integers(1, 6), micros=st.integers(1, 12))
def test_1f1b_takes_micro_batches_plus_stages_minus_one_turns(stages: int, micros: int):
    turns = micros + stages - 1
    assert makespan(one_forward_one_backward, stages, micros) == turns * (FORWARD + BACKWARD)


@given(stages=st.integers(1, 6), micros=st.integers(1, 12))
def test_1f1b_holds_at_most_as_many_micro_batches_as_stages_follow(stages: int, micros: int):
    for stage in range(stages):
        assert in_flight(one_forward_one_backward(stages, stage, micros)) == min(
            micros, stages - stage
        )


@given(stages=st.integers(2, 6), micros=st.integers(1, 12))
def test_gpipe_takes_as_long_as_1f1b_but_holds_every_micro_batch(stages: int, micros: int):
    assert makespan(gpipe, stages, micros) == (micros + stages - 1) * (FORWARD + BACKWARD)
    assert in_flight(gpipe(stages, 0, micros)) == micros


@pytest.mark.parametrize("order", ORDERS.values())
def test_on_one_device_forward_and_backward_take_turns(
    order: Callable[[int, int, int], tuple[Pass, ...]],
):
    assert order(1, 0, 2) == (
        Pass("forward", 0),
        Pass("backward", 0),
        Pass("forward", 1),
        Pass("backward", 1),
    )


@given(
    order=st.sampled_from(list(ORDERS.values())), stages=st.integers(1, 6), micros=st.integers(1, 9)
)
def test_every_pass_runs_once(
    order: Callable[[int, int, int], tuple[Pass, ...]], stages: int, micros: int
):
    for stage in range(stages):
        passes = order(stages, stage, micros)
        assert len(passes) == len(set(passes)) == 2 * micros
