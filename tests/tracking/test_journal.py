"""The journal loses nothing, reads all whole records, and is readable without Windlass."""

import json
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

import windlass.tracking.journal
from windlass.errors import RecordError, StorageError
from windlass.tracking.journal import Journal, JournalWriter
from windlass.tracking.journal_reader import JournalCursor, read_head_and_tail, read_journal

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "journal.md"

WRITE_FOR_EVER = """
import sys
from pathlib import Path
from windlass.tracking.journal import JournalWriter

journal = JournalWriter(Path(sys.argv[1]))
journal.append_event("meta", {"id": "x"})
step = 0
while True:
    step += 1
    journal.append_row(step, {"loss": 1.0 / step, "seconds": 0.1})
    sys.stdout.write(f"{step}\\n")
    sys.stdout.flush()
"""


def write(path: Path, rows: int = 3) -> Path:
    with JournalWriter(path) as journal:
        journal.append_event("meta", {"id": "abc", "model": "gpt"})
        for step in range(1, rows + 1):
            journal.append_row(step, {"loss": 5.0 - step / 100, "seconds": 0.5})
            if step == rows - 1:
                journal.append_event("evaluation", {"step": step, "loss": 4.5})
        journal.append_event("end", {"state": "finished"})
    return path


def test_what_is_written_is_read_back(tmp_path: Path):
    journal = read_journal(write(tmp_path / "0.1.j"))
    assert [row.step for row in journal.rows] == [1, 2, 3]
    assert journal.rows[1].values == {"loss": 4.98, "seconds": 0.5}
    assert [event.name for event in journal.events] == ["meta", "evaluation", "end"]
    assert journal.end is not None
    assert journal.end.fields == {"state": "finished"}
    assert journal.meta == {"id": "abc", "model": "gpt"}
    assert journal.unread_bytes == 0
    assert abs(journal.rows[0].time - time.time()) < 60


def test_rows_with_other_names_get_a_new_schema(tmp_path: Path):
    path = tmp_path / "0.1.j"
    with JournalWriter(path) as journal:
        journal.append_row(1, {"loss": 1.0})
        journal.append_row(2, {"loss": 2.0, "speed": 3.0})
        journal.append_row(3, {"loss": 4.0})
    values = [dict(row.values) for row in read_journal(path).rows]
    assert values == [{"loss": 1.0}, {"loss": 2.0, "speed": 3.0}, {"loss": 4.0}]


@settings(max_examples=80, deadline=None)
@given(
    numbers=st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.floats()), max_size=20),
    text=st.text(max_size=50),
)
def test_any_numbers_and_text_come_back_bit_by_bit(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[tuple[int, float]], text: str
):
    path = tmp_path_factory.mktemp("journal") / "0.1.j"
    with JournalWriter(path) as journal:
        for step, value in numbers:
            journal.append_row(step, {text: value})
        journal.append_event("alert", {"text": text})
    back = read_journal(path)
    bits = [(r.step, struct.pack("<d", r.values[text])) for r in back.rows]
    assert bits == [(step, struct.pack("<d", value)) for step, value in numbers]
    assert back.events[-1].fields == {"text": text}


def test_a_tail_torn_at_any_byte_leaves_all_whole_records(tmp_path: Path):
    content = write(tmp_path / "whole.j", rows=4).read_bytes()
    ends = [0]
    while ends[-1] < len(content):
        (length,) = struct.unpack_from("<I", content, ends[-1] + 3)
        ends.append(ends[-1] + 11 + length)
    torn = tmp_path / "torn.j"
    for cut in range(len(content) + 1):
        torn.write_bytes(content[:cut])
        journal = read_journal(torn)
        whole = max(end for end in ends if end <= cut)
        assert (journal.read_bytes, journal.unread_bytes) == (whole, cut - whole)
        # All records but those of the first kind (schema) surface as a row or an event.
        surfaced = len(journal.rows) + len(journal.events)
        assert surfaced == sum(content[start] != 1 for start, end in pairwise(ends) if end <= cut)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("journal") / "0.1.j")


@settings(max_examples=200, deadline=None)
@given(place=st.integers(0, 2**16), bit=st.integers(0, 7))
def test_a_flipped_bit_never_yields_a_wrong_number(whole: Path, place: int, bit: int):
    path = whole.with_name("0.2.j")
    content = bytearray(whole.read_bytes())
    good = read_journal(whole)
    at = place % len(content)
    content[at] ^= 1 << bit
    path.write_bytes(content)
    bad = read_journal(path)
    assert bad.unread_bytes > 0
    assert [row for row in good.rows if row in bad.rows] == list(bad.rows)
    assert [event for event in good.events if event in bad.events] == list(bad.events)


def test_records_behind_a_damaged_one_are_read(whole: Path):
    path = whole.with_name("0.3.j")
    content = bytearray(whole.read_bytes())
    at = content.index(struct.pack("<q", 2))
    content[at + 20] ^= 1
    path.write_bytes(content)

    journal, good = read_journal(path), read_journal(whole)

    assert [row.step for row in journal.rows] == [1, 3]
    assert (journal.events, journal.read_bytes) == (good.events, good.read_bytes)
    damaged = at - 11
    assert journal.skipped == (range(damaged, damaged + 11 + 4 * 8),)


def test_a_bit_flipped_anywhere_costs_one_row_and_is_named(tmp_path: Path):
    path, steps = tmp_path / "0.1.j", 10_000
    with JournalWriter(path) as journal:
        for step in range(1, steps + 1):
            journal.append_row(step, dict.fromkeys(map(str, range(10)), 1.0 / step))
    content = path.read_bytes()
    bits = random.Random(17)
    # The names come first; then the kind, the length and the crc of a row; then wherever.
    row = content.index(struct.pack("<q", 5000)) - 11
    places = [*range(0, 60, 5), row, row + 3, row + 6, row + 7]
    places += [bits.randrange(len(content)) for _ in range(24)]
    for at in places:
        damaged = bytearray(content)
        damaged[at] ^= 1 << bits.randrange(8)
        path.write_bytes(damaged)
        records = JournalCursor(path).read()
        assert sum(len(rows.offsets) for rows in records.rows) >= steps - 1
        assert any(at in skipped for skipped in records.skipped)
        assert sum(map(len, records.skipped)) < 300


@pytest.mark.parametrize("block", [0, 3, -1])
def test_blocks_that_a_power_cut_left_empty_hide_only_their_own_rows(tmp_path: Path, block: int):
    content = bytearray(write(tmp_path / "0.1.j", rows=2000).read_bytes())
    blocks = range(0, len(content), 4096)
    start = blocks[block]
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    (tmp_path / "0.1.j").write_bytes(content)
    back = read_journal(tmp_path / "0.1.j")
    row_bytes = 11 + 16 + 2 * 8
    assert len(back.rows) >= 2000 - 4096 // row_bytes - 2
    assert len(back.skipped) == 1
    assert back.unread_bytes < 4096 + 2 * row_bytes


def test_names_that_are_lost_with_their_only_record_are_a_fault_and_no_error(tmp_path: Path):
    path = tmp_path / "0.1.j"
    with JournalWriter(path) as journal:
        journal.append_row(1, {"loss": 1.0})
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    back = read_journal(path)
    assert (back.rows, back.skipped) == ((), (range(len(content)),))


def test_a_clock_that_jumps_back_changes_no_order(tmp_path: Path):
    path = tmp_path / "0.1.j"
    with JournalWriter(path) as journal:
        for step, seconds in ((1, 5e9), (2, -1.0), (3, 4e9)):
            journal.append_row(step, {"loss": 1.0}, timestamp=seconds)
    assert [(row.step, row.time) for row in read_journal(path).rows] == [
        (1, 5e9), (2, -1.0), (3, 4e9),
    ]  # fmt: skip


def test_a_cursor_goes_on_where_it_ended_also_within_a_record(tmp_path: Path):
    content = write(tmp_path / "whole.j", rows=40).read_bytes()
    whole = read_journal(tmp_path / "whole.j")
    growing = tmp_path / "0.1.j"
    growing.touch()
    cursor, parts = JournalCursor(growing), []
    for size in range(0, len(content) + 31, 31):
        growing.write_bytes(content[:size])
        parts.append(cursor.read().journal())
    assert [row for part in parts for row in part.rows] == list(whole.rows)
    assert [event for part in parts for event in part.events] == list(whole.events)
    assert (cursor.offset, parts[-1].skipped) == (len(content), ())


def test_records_that_hold_something_unknown_are_passed_over(tmp_path: Path):
    path = write(tmp_path / "0.1.j")
    whole = read_journal(path)
    for kind, payload in ((1, b"{}"), (1, b"[1]"), (3, b"[]"), (3, b"{}"), (3, b"{"), (9, b"x")):
        head = struct.pack("<BHI", kind, 7, len(payload))
        record = head + struct.pack("<I", zlib.crc32(head + payload)) + payload
        path.write_bytes(path.read_bytes() + record)
    back = read_journal(path)
    assert (back.rows, back.events, back.skipped) == (whole.rows, whole.events, ())


def test_a_journal_whose_folder_was_deleted_or_moved_takes_no_more_rows(tmp_path: Path):
    run = tmp_path / "run"
    with JournalWriter(run / "journal" / "0.1.j") as journal:
        journal.append_row(1, {"loss": 1.0})
        run.rename(tmp_path / "moved")
        with pytest.raises(RecordError, match=r"folder `.*run` was deleted or moved"):
            journal.append_row(2, {"loss": 1.0})


def test_threads_do_not_tear_each_others_records(tmp_path: Path):
    path = tmp_path / "0.1.j"

    def append(journal: JournalWriter, thread: int) -> None:
        for number in range(200):
            journal.append_row(number, {f"sys.{thread}.{number % 50}": float(number)})
        journal.append_event("checkpoint", {"n": thread})

    with JournalWriter(path) as journal:
        threads = [threading.Thread(target=append, args=(journal, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for step in range(2000):
            journal.append_row(step, {"loss": 1.0})
        for thread in threads:
            thread.join()
    back = read_journal(path)
    assert (len(back.rows), len(back.events), back.skipped) == (2000, 4, ())
    written = [(row.step, dict(row.values)) for row in back.system_rows]
    assert sorted(written, key=str) == sorted(
        ((n, {f"sys.{t}.{n % 50}": float(n)}) for t in range(4) for n in range(200)), key=str
    )


def test_kill_9_loses_no_row(tmp_path: Path):
    for trial in range(3):
        path = tmp_path / f"{trial}.1.j"
        with subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            printed = [process.stdout.readline() for _ in range(100 + 37 * trial)]
            process.send_signal(signal.SIGKILL)
            printed += process.stdout.readlines()
        last = int([line for line in printed if line.endswith("\n")][-1])
        journal = read_journal(path)
        # A row is written before it is printed, so the file may be one ahead, never behind.
        assert journal.rows[-1].step in (last, last + 1)
        assert [row.step for row in journal.rows] == list(range(1, journal.rows[-1].step + 1))
        assert journal.unread_bytes == 0


def test_a_journal_has_one_writer_for_ever(tmp_path: Path):
    write(tmp_path / "0.1.j")
    with pytest.raises(RecordError, match="already has a writer; open the next attempt"):
        JournalWriter(tmp_path / "0.1.j")


@contextmanager
def full_disk(path: Path, spare_bytes: int) -> Iterator[None]:
    """A limit on file sizes: a write beyond it fails as one on a full disk does."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + spare_bytes, hard))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


def test_what_a_full_disk_refuses_is_written_once_there_is_space(tmp_path: Path):
    path = tmp_path / "0.1.j"
    journal = JournalWriter(path)
    journal.append_row(1, {"loss": 1.0})
    with full_disk(path, spare_bytes=5):
        for step in (2, 3):
            journal.append_row(step, {"loss": float(step)})
        journal.append_event("checkpoint", {"step": 3})
        assert (
            journal.fault == f"no space left to write `{path}`; free some, or name another folder"
        )
        with pytest.raises(StorageError, match="no space left to write"):
            journal.flush()
        assert read_journal(path).unread_bytes == 5
    journal.append_row(4, {"loss": 4.0})
    assert journal.fault is None
    journal.close()
    back = read_journal(path)
    assert [row.step for row in back.rows] == [1, 2, 3, 4]
    assert [event.fields["step"] for event in back.events] == [3]
    assert back.skipped == ()


def test_records_beyond_what_memory_may_hold_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "0.1.j"
    monkeypatch.setattr(windlass.tracking.journal, "_BACKLOG_BYTES", 200)
    with JournalWriter(path) as journal:
        journal.append_row(1, {"loss": 1.0})
        with full_disk(path, spare_bytes=0):
            for step in range(2, 12):
                journal.append_row(step, {"loss": 1.0})
    back = read_journal(path)
    assert [event.fields for event in back.events] == [{"lost_records": 11 - len(back.rows)}]


def test_head_and_tail_of_a_long_journal_match_the_full_journal(tmp_path: Path):
    path = write(tmp_path / "0.1.j", rows=5000)
    whole, ends = read_journal(path), read_head_and_tail(path)
    assert ends.meta == whole.meta
    assert ends.end == whole.end
    assert ends.rows[0] == whole.rows[0]
    assert ends.rows[-100:] == whole.rows[-100:]
    assert len(ends.rows) < 2000


def test_head_and_tail_of_a_short_journal_are_the_full_journal(tmp_path: Path):
    path = write(tmp_path / "0.1.j", rows=20)
    assert read_head_and_tail(path) == read_journal(path)


def test_the_tail_of_a_long_torn_journal_has_its_last_whole_rows(tmp_path: Path):
    path = write(tmp_path / "0.1.j", rows=5000)
    path.write_bytes(path.read_bytes()[:-7])
    ends = read_head_and_tail(path)
    assert ends.end is None
    assert ends.rows[-1].step == 5000
    assert ends.unread_bytes > 0


def test_a_missing_journal_is_reported_by_name(tmp_path: Path):
    with pytest.raises(RecordError, match=r"journal `.*0\.9\.j` cannot be read"):
        read_journal(tmp_path / "0.9.j")


@pytest.mark.parametrize("read", [read_journal, read_head_and_tail])
def test_a_pipe_in_the_place_of_a_journal_is_refused_and_not_waited_for(
    tmp_path: Path, read: Callable[[Path], Journal]
):
    os.mkfifo(tmp_path / "0.1.j")
    with pytest.raises(RecordError, match=r"0\.1\.j` cannot be read: is not a regular file"):
        read(tmp_path / "0.1.j")


def test_the_reader_in_the_documentation_reads_the_same(tmp_path: Path):
    path = write(tmp_path / "0.1.j", rows=50)
    path.write_bytes(path.read_bytes() + b"\x02\x00\x00")
    code = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code is not None
    assert len(code.group(1).splitlines()) <= 20
    script = tmp_path / "reader.py"
    script.write_text(
        code.group(1) + "\nimport sys\nfor item in read(sys.argv[1]):\n    print(json.dumps(item))"
    )
    # Isolated mode: the script can import neither Windlass nor any other package.
    printed = subprocess.run(
        [sys.executable, "-I", "-S", "-W", "ignore", str(script), str(path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    items = [json.loads(line) for line in printed.splitlines()]
    journal: Journal = read_journal(path)
    assert journal.unread_bytes == 3
    rows = [{"step": r.step, "time": r.time, **r.values} for r in journal.rows]
    events = [{"event": e.name, "time": e.time, **e.fields} for e in journal.events]
    assert [item for item in items if "step" in item and "event" not in item] == rows
    assert [item for item in items if "event" in item] == events


def test_a_journal_that_claims_long_records_everywhere_is_read_at_once(tmp_path: Path):
    path = write(tmp_path / "0.1.j")
    whole = read_journal(path)
    claim = struct.pack("<BHI", 1, 0, 2**19)
    path.write_bytes(path.read_bytes() + claim * (2**20 // len(claim)))

    began = time.perf_counter()
    found = read_journal(path)

    assert time.perf_counter() - began < 5  # a check of each claim takes half a minute
    assert found.rows == whole.rows
    assert found.skipped == (range(whole.read_bytes, path.stat().st_size),)
