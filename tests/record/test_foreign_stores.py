"""Promises about stores of others: what is wrong with a run is a sentence, and the rest comes."""

import os
import struct
import subprocess
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from made_stores import make_run

from windlass.record import Catalog, merge_folders, read_run_entry, sync_runs
from windlass.tracking import JournalWriter, find_run, load_run

TIB = 2**40


def runs(root: Path, count: int = 3) -> list[Path]:
    made = [make_run(root) for _ in range(count)]
    for run in made:
        run.end("finished")
    return [run.path for run in made]


def nest(folder: Path) -> None:
    """As many folders in each other as a path can have, and more than Python calls functions."""
    folder.mkdir()
    home = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        for _ in range(1300):
            os.mkdir("a")  # noqa: PTH102  its whole path would be too long
            os.chdir("a")
    finally:
        os.chdir(home)
        os.close(home)


def lengthen(file: Path, nbytes: int) -> None:
    file.touch()
    os.truncate(file, nbytes)


@pytest.mark.parametrize(
    ("change", "said", "arrives"),
    [
        (lambda run: lengthen(run / "plan.toml", 8 * 2**30), "8589934592 bytes, more than", True),
        (lambda run: lengthen(run / "journal" / "0.2.j", 8 * 2**30), "more than 2147483648", True),
        (lambda run: lengthen(run / "id", 2 * TIB), "`id` has 2199023255552 bytes", False),
        (lambda run: nest(run / "checkpoints"), None, True),
        (lambda run: nest(run / "journal" / "deep"), None, True),
    ],
    ids=["a document of 8 GiB", "a journal of 8 GiB", "an id of 2 TiB", "nested", "nested deeper"],
)
def test_one_bad_run_is_a_sentence_and_the_others_come_over(
    tmp_path: Path, change: Callable[[Path], None], said: str | None, arrives: bool
) -> None:
    bad, *_ = runs(tmp_path / "a")
    try:
        change(bad)
        merged = merge_folders([tmp_path / "a"], tmp_path / "b", checkpoints=True)
        url = f"local://{tmp_path / 'objects'}"
        synced = sync_runs(tmp_path / "a", url, checkpoints=True)
        assert find_run(tmp_path / "a", "last") != bad
    finally:  # no Python removes folders that are nested so deeply
        subprocess.run(("rm", "-rf", str(bad)), check=True)
    for report in (merged, synced):
        assert report.new_runs == (3 if arrives else 2)
        assert any(said in warning for warning in report.warnings) if said else not report.warnings
    assert len([*(tmp_path / "b").glob("*/id")]) == (3 if arrives else 2)


def test_a_sealed_document_of_any_size_is_called_changed_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.seal("plan.toml")
    run.end("finished")
    lengthen(run.path / "plan.toml", 2 * TIB)
    began = time.perf_counter()
    faults = read_run_entry(run.path).columns["faults"]
    assert time.perf_counter() - began < 5
    assert isinstance(faults, tuple)
    assert any("plan.toml: has changed; its fingerprint is `too large`" in one for one in faults)


@pytest.mark.parametrize("text", ["NaN", "1e300", "-1e300", "1" * 400])
def test_a_run_that_began_at_no_time_is_listed_and_shown(tmp_path: Path, text: str) -> None:
    run, *_ = runs(tmp_path / "a", 1)
    with JournalWriter(tmp_path / "0.1.j") as journal:
        journal.append_row(1, {"loss": 1.0}, timestamp=float("nan"))
        journal.append_row(2, {"loss": 1.0}, timestamp=1e300)
    opening = f'{{"event":"meta","time":{text},"id":"x"}}'.encode()
    head = struct.pack("<BHI", 3, 0, len(opening))
    event = head + struct.pack("<I", zlib.crc32(head + opening)) + opening
    (run / "journal" / "0.1.j").write_bytes(event + (tmp_path / "0.1.j").read_bytes())
    merge_folders([tmp_path / "a"], tmp_path / "b")
    copy = find_run(tmp_path / "b", "last")
    record = load_run(copy)
    assert 0 <= record.events[0].time <= 4e9
    assert len(record.steps) == 2
    started, ended = (read_run_entry(copy).columns[name] for name in ("started", "ended"))
    with Catalog.open(tmp_path / "b") as catalog:
        catalog.refresh()
        (row,) = catalog.rows()
    assert (row.started, row.ended) == (started, ended)
