"""The host is measured from a thread of its own, beside the steps and without touching them."""

import time
from pathlib import Path

import psutil
import pytest

from windlass.tracking.journal import Journal, JournalWriter
from windlass.tracking.journal_reader import read_journal
from windlass.tracking.series import read_series
from windlass.tracking.system_monitor import HostReadings, SystemMonitor


def monitored(path: Path, *, rows: int) -> Journal:
    """A journal whose writer waits until the host has been measured a few times."""
    with JournalWriter(path) as journal:
        journal.append_row(7, {"loss": 1.0})
        with SystemMonitor(journal, first_seconds=0.02):
            end = time.monotonic() + 20
            while time.monotonic() < end and len(read_journal(path).system_rows) < rows:
                time.sleep(0.01)
        journal.append_row(8, {"loss": 0.5})
    return read_journal(path)


def test_rows_of_the_host_lie_beside_those_of_steps(tmp_path: Path):
    journal = monitored(tmp_path / "journal" / "0.1.j", rows=3)
    assert [row.step for row in journal.rows] == [7, 8]
    assert len(journal.system_rows) >= 3
    assert {row.step for row in journal.system_rows} == {7}
    series = read_series(tmp_path)
    assert {"loss", "sys.cpu", "sys.memory_bytes", "sys.seconds"} <= series.keys()
    assert len(series["sys.cpu"]) == len(journal.system_rows)
    assert all(name.startswith("sys.") for row in journal.system_rows for name in row.values)


def test_readings_are_shares_and_differences():
    readings = HostReadings()
    time.sleep(0.05)
    row = readings.take()
    assert 0.05 <= row["seconds"] < 10
    shares = [value for name, value in row.items() if name == "cpu" or name.endswith("_stall")]
    assert shares
    assert all(0 <= share <= 1 for share in shares)
    used = psutil.virtual_memory()
    assert row["memory_bytes"] == pytest.approx(used.total - used.available, rel=0.2)
    assert all(value >= 0 for value in row.values())


def test_a_monitor_whose_folder_is_gone_ends_alone(tmp_path: Path):
    run = tmp_path / "run"
    with JournalWriter(run / "journal" / "0.1.j") as journal:
        run.rename(tmp_path / "moved")
        with SystemMonitor(journal, first_seconds=0.01):
            time.sleep(0.05)
