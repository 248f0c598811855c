"""Series hold what the rows of the journals hold, bit by bit, as arrays."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from windlass.tracking.journal import JournalRow, JournalWriter
from windlass.tracking.journal_reader import JournalCursor, read_journal
from windlass.tracking.run_folder import journal_path
from windlass.tracking.series import journal_ranks, read_series, series_of

NAMES = st.sets(st.sampled_from(["loss", "seconds", "contention", "ä"]), max_size=4)
ROWS = st.lists(
    st.tuples(st.integers(-(2**63), 2**63 - 1), NAMES, st.floats(width=64)), max_size=30
)


def by_name(rows: tuple[JournalRow, ...]) -> dict[str, list[tuple[int, float, float]]]:
    """Step, time and value of each row that has a name."""
    names = {name for row in rows for name in row.values}
    return {
        name: [(row.step, row.time, row.values[name]) for row in rows if name in row.values]
        for name in names
    }


@settings(max_examples=60, deadline=None)
@given(rows=ROWS)
def test_series_are_the_columns_of_the_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, set[str], float]]
):
    path = tmp_path_factory.mktemp("journal") / "0.1.j"
    with JournalWriter(path) as journal:
        for step, names, value in rows:
            journal.append_row(step, dict.fromkeys(sorted(names), value))
    read = read_journal(path)
    expected = by_name(read.rows)
    series = series_of(JournalCursor(path).read())
    assert series.keys() == expected.keys()
    for name, found in series.items():
        steps, times, values = zip(*expected[name], strict=True)
        assert (found.steps.tolist(), found.times.tolist()) == (list(steps), list(times))
        assert found.values.tobytes() == np.array(values, dtype=np.float64).tobytes()


def test_a_later_attempt_replaces_steps_and_no_measurement_of_the_host(tmp_path: Path):
    for attempt, steps, value in (
        (1, range(1, 8), 1.0),
        (2, range(6, 10), 2.0),
        (3, range(0), 3.0),
    ):
        with JournalWriter(journal_path(tmp_path, 0, attempt)) as journal:
            journal.append_row(0, {"sys.cpu": value})
            for step in steps:
                journal.append_row(step, {"loss": value, f"only.{attempt}": value})
    series = read_series(tmp_path)
    assert series["loss"].steps.tolist() == list(range(1, 10))
    assert series["loss"].values.tolist() == [1.0] * 5 + [2.0] * 4
    assert series["only.1"].steps.tolist() == [1, 2, 3, 4, 5]
    assert series["sys.cpu"].values.tolist() == [1.0, 2.0, 3.0]


def test_each_rank_has_its_own_series(tmp_path: Path):
    for rank in (0, 3, 11):
        with JournalWriter(journal_path(tmp_path, rank, 1)) as journal:
            journal.append_row(1, {"loss": float(rank)})
    assert journal_ranks(tmp_path) == (0, 3, 11)
    assert [read_series(tmp_path, rank)["loss"].values[0] for rank in (0, 3, 11)] == [0, 3, 11]
    assert read_series(tmp_path, 1) == {}


def test_a_damaged_journal_gives_the_series_of_what_is_left(tmp_path: Path):
    path = journal_path(tmp_path, 0, 1)
    with JournalWriter(path) as journal:
        for step in range(1, 101):
            journal.append_row(step, {"loss": float(step)})
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    series = read_series(tmp_path)["loss"]
    assert len(series) == 99
    assert series.steps.tolist() == series.values.tolist()
