"""Packing: as many trials as cores and memory hold, and never more memory than there is."""

from hypothesis import given, strategies as st

from windlass.sweep.driver import Room, RunningTrial, most_jobs, startable
from windlass.sweep.sweep_file import Trial

GIB = 2**30


def trial(number: int, gibibytes: float) -> Trial:
    return Trial(number=number, params={}, run="", predicted_bytes=round(gibibytes * GIB))


def room(jobs: int, gibibytes: float, free: float | None = None) -> Room:
    free = gibibytes if free is None else free
    return Room(jobs=jobs, capacity_bytes=round(gibibytes * GIB), free_bytes=round(free * GIB))


def running(expected: float, used: float) -> RunningTrial:
    return RunningTrial(expected_bytes=round(expected * GIB), used_bytes=round(used * GIB))


sizes = st.floats(0.1, 8)


@given(
    waiting=st.lists(sizes, max_size=8), going=st.lists(st.tuples(sizes, sizes), max_size=4),
    capacity=st.floats(1, 16), free=st.floats(0, 16),
)  # fmt: skip
def test_expected_memory_never_exceeds_what_there_is(
    waiting: list[float], going: list[tuple[float, float]], capacity: float, free: float
) -> None:
    others = [running(*pair) for pair in going]
    available = room(6, capacity, free)

    chosen = startable([trial(n, size) for n, size in enumerate(waiting)], others, available)

    new = sum(one.predicted_bytes or 0 for one in chosen)
    if chosen:
        assert len(others) + len(chosen) <= 6
        assert sum(one.expected_bytes for one in others) + new <= available.capacity_bytes
        to_come = sum(max(0, one.expected_bytes - one.used_bytes) for one in others)
        assert to_come + new <= available.free_bytes


def test_a_trial_that_does_not_fit_now_lets_others_pass() -> None:
    waiting = [trial(0, 6), trial(1, 3), trial(2, 2)]

    chosen = startable(waiting, [running(3, 3)], room(3, 8))

    assert [one.number for one in chosen] == [1, 2]


def test_what_others_use_of_the_machine_is_left_to_them() -> None:
    assert startable([trial(0, 3)], [running(2, 1)], room(2, 16, free=3.5)) == ()
    assert startable([trial(0, 3)], [running(2, 2)], room(2, 16, free=3.5))


def test_jobs_share_the_cores_evenly_and_fit_into_memory() -> None:
    def jobs(cores: int, gibibytes: int, trials: int = 100) -> int:
        return most_jobs(cores, trials, needed_bytes=gibibytes * GIB, capacity_bytes=16 * GIB)

    assert jobs(2, 1) == 2
    assert jobs(64, 3) == 4
    assert jobs(64, 1) == 16
    assert jobs(64, 1, trials=3) == 2
    assert jobs(2, 100) == 1
