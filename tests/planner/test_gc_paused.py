"""Garbage collection is paused while plans are searched, and only then."""

import gc

import pytest

from windlass.planner.choose import gc_paused


def test_the_collector_rests_within_and_works_behind():
    within = gc_paused()(gc.isenabled)
    assert gc.isenabled()
    assert not within()
    assert gc.isenabled()


def test_collection_is_enabled_again_after_an_error():
    @gc_paused()
    def fails() -> None:
        raise ValueError("told")

    with pytest.raises(ValueError, match="told"):
        fails()
    assert gc.isenabled()


def test_where_it_rests_already_it_is_not_woken():
    gc.disable()
    try:
        assert not gc_paused()(gc.isenabled)()
        assert not gc.isenabled()
    finally:
        gc.enable()
