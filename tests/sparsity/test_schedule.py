"""When masks change, and which legs a run has."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from windlass.errors import InputErrors
from windlass.schema.request import Request
from windlass.schema.sparsity import SparsityRequest
from windlass.sparsity.schedule import (
    describe_leg,
    describe_legs,
    drop_share,
    leg_before_others,
    leg_of_step,
    legs,
    level_share,
    sparsity_of_leg,
    updates_masks,
)

SCHEDULES = st.sampled_from(["static", "set", "rigl", "gradual", "then-dense"])
SHARES = st.floats(0.01, 1)
STEPS = st.integers(1, 500)


@given(schedule=SCHEDULES, until=SHARES, steps=STEPS)
def test_each_step_is_in_exactly_one_leg_and_legs_follow_each_other(
    schedule: str, until: float, steps: int
) -> None:
    sparsity = SparsityRequest(schedule=schedule, until=until)

    chain = legs(sparsity, steps)

    assert [leg.number for leg in chain] == list(range(sparsity.legs))
    assert [step for leg in chain for step in range(leg.first, leg.last + 1)] == [
        *range(1, steps + 1)
    ]
    assert chain[0].first == 1 <= chain[0].last
    numbers = [leg_of_step(sparsity, step, steps).number for step in range(1, steps + 1)]
    assert numbers == sorted(numbers)


def test_a_dense_run_has_one_leg() -> None:
    assert legs(None, 7) == ((0, 1, 7),)
    assert describe_leg(None, 3, 7) is None
    assert sparsity_of_leg(None) is None


@given(until=SHARES, every=st.integers(1, 60), steps=STEPS)
def test_masks_change_every_so_many_steps_until_the_last_one(
    until: float, every: int, steps: int
) -> None:
    sparsity = SparsityRequest(schedule="rigl", until=until, every=every)

    due = [step for step in range(1, steps + 1) if updates_masks(sparsity, step, steps)]

    assert all(step % every == 0 and step < until * steps for step in due)
    assert due == [step for step in range(every, steps, every) if step < until * steps]
    shares = [drop_share(sparsity, step, steps) for step in due]
    assert all(0 <= later <= earlier <= sparsity.drop for earlier, later in pairwise(shares))


def test_masks_of_other_schedules_do_not_change_between_steps() -> None:
    for schedule in ("static", "gradual", "then-dense"):
        assert not updates_masks(SparsityRequest(schedule=schedule, every=1), 1, 100)
    assert not updates_masks(None, 1, 100)


def test_the_dropped_share_begins_with_the_one_asked_for_and_ends_at_zero() -> None:
    sparsity = SparsityRequest(schedule="set", drop=0.4, until=0.5)
    assert drop_share(sparsity, 0, 200) == pytest.approx(0.4)
    assert drop_share(sparsity, 50, 200) == pytest.approx(0.2)
    assert drop_share(sparsity, 100, 200) == pytest.approx(0)


def test_gradual_levels_follow_the_cubic_law_to_the_level_asked_for() -> None:
    sparsity = SparsityRequest(schedule="gradual", level=0.8, roles={"up": 0.5, "down": 0})

    levels = [0.8 * level_share(sparsity, leg) for leg in range(5)]

    # s_t = s_f - s_f * (1 - t / n)^3 at t / n = 0, 1/4, 1/2, 3/4, 1
    assert levels == pytest.approx([0, 0.8 * 37 / 64, 0.8 * 7 / 8, 0.8 * 63 / 64, 0.8])
    assert sparsity_of_leg(sparsity) is None
    second = sparsity_of_leg(sparsity.model_copy(update={"leg": 2}))
    assert second is not None
    assert (second.level, second.roles) == (pytest.approx(0.7), {"up": 0.5 * 7 / 8, "down": 0})
    last = sparsity.model_copy(update={"leg": 4})
    assert sparsity_of_leg(last) == last


def test_then_dense_is_sparse_and_then_dense() -> None:
    sparsity = SparsityRequest(schedule="then-dense", level=0.875)
    dense = sparsity.model_copy(update={"leg": 1})
    assert legs(sparsity, 100) == ((0, 1, 70), (1, 71, 100))
    assert sparsity_of_leg(sparsity) == sparsity
    assert sparsity_of_leg(dense) is None
    assert describe_legs(sparsity, 100) == (
        "leg 0 (0.875 absent, steps 1 to 70)", "leg 1 (dense, steps 71 to 100)",
    )  # fmt: skip
    assert leg_before_others(sparsity, 100) == "leg 0 (0.875 absent, steps 1 to 70)"
    assert leg_before_others(dense, 100) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sparsity.schedule=rigl", "sparsity.pattern=unstructured"], "changes which blocks"),
        (["sparsity.schedule=gradual", "sparsity.mask=masks.safetensors"], "begins dense"),
        (["sparsity.schedule=then-dense", "sparsity.leg=2"], "has 2 legs, counted from 0"),
        (["sparsity.leg=1"], "has 1 leg, counted from 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(InputErrors, match=message):
        Request.resolve(None, overrides)
