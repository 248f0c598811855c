"""The collector rests while plans are sought, and only then."""

import gc

import pytest

from windlass.planner.gc_paused import gc_paused


def test_the_collector_rests_within_and_works_behind():
    within = gc_paused(gc.isenabled)
    assert gc.isenabled()
    assert not within()
    assert gc.isenabled()


def test_it_works_again_behind_a_fault_too():
    @gc_paused
    def fails() -> None:
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        fails()
    assert gc.isenabled()


def test_where_it_rests_already_it_is_not_woken():
    gc.disable()
    try:
        assert not gc_paused(gc.isenabled)()
        assert not gc.isenabled()
    finally:
        gc.enable()
