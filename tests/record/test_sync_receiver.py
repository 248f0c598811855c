"""A server keeps what it has, whatever the holder of its token sends."""

import hashlib
from io import BytesIO
from pathlib import Path

import pytest
from made_stores import make_run

from windlass.errors import RecordError
from windlass.record import annotate, read_annotations
from windlass.record.stores import FolderStore
from windlass.record.sync import SyncReceiver
from windlass.tracking import parse_journal


def new_run(root: Path, rows: int = 3) -> Path:
    with make_run(root, losses=tuple(1 / step for step in range(1, rows + 1))) as run:
        return run.path


def steps_of(journal: Path) -> list[int]:
    return [row.step for row in parse_journal(journal.read_bytes()).rows]


def test_a_receiver_keeps_what_it_has(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    run_id = (run / "id").read_text().split()[0]
    receiver = SyncReceiver(tmp_path / "a")
    whole = (run / "journal" / "0.1.j").read_bytes()
    receiver.put(run_id, "journal/0.1.j", run.name, BytesIO(whole))
    for other in (whole[:-10], b"another", b""):
        with pytest.raises(RecordError, match="another content"):
            receiver.put(run_id, "journal/0.1.j", run.name, BytesIO(other))
    assert (run / "journal" / "0.1.j").read_bytes() == whole


def test_a_receiver_keeps_the_document_that_another_one_replaces(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    (run / "request.toml").write_text("first")
    run_id = (run / "id").read_text().split()[0]
    receiver = SyncReceiver(tmp_path / "a")
    digest = hashlib.sha256(b"first").hexdigest()
    with pytest.raises(RecordError, match="no name for this content"):
        receiver.put(run_id, f"request.toml+{digest[:8]}", run.name, BytesIO(b"junk"))
    (run / f"request.toml+{digest[:8]}").write_text("another with the same eight digits")
    receiver.put(run_id, "request.toml", run.name, BytesIO(b"second"))
    receiver.put(run_id, "request.toml", run.name, BytesIO(b"third"))
    kept = {path.name: path.read_text() for path in run.glob("request.toml+*")}
    assert kept[f"request.toml+{digest[:16]}"] == "first"
    assert sorted(kept.values())[1:] == ["first", "second"]


def test_a_receiver_keeps_the_note_that_another_one_replaces(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    annotate(run, note="first")
    (change,) = (run / "annotations").iterdir()
    run_id = (run / "id").read_text().split()[0]
    receiver = SyncReceiver(tmp_path / "a")
    with pytest.raises(RecordError, match="which is kept"):
        receiver.put(run_id, f"annotations/{change.name}", run.name, BytesIO(b"junk"))
    second = BytesIO(b'{"note": "second"}')
    receiver.put(run_id, f"annotations/{change.name}", run.name, second)
    assert sorted(read_annotations(run).notes) == ["first", "second"]


def test_a_receiver_takes_a_journal_for_the_records_that_it_has(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a", rows=9)
    run_id = (run / "id").read_text().split()[0]
    receiver = SyncReceiver(tmp_path / "a")
    journal = run / "journal" / "0.1.j"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-5])  # torn
    for other in (b"", whole[:200]):
        with pytest.raises(RecordError, match="which is kept"):
            receiver.put(run_id, "journal/0.1.j", run.name, BytesIO(other))
    assert steps_of(journal) == list(range(1, 9))
    first, second = bytearray(whole), bytearray(whole)
    first[-200] ^= 1
    second[-400] ^= 1
    journal.write_bytes(first)
    receiver.put(run_id, "journal/0.1.j", run.name, BytesIO(second))
    assert journal.read_bytes() == whole
    stranger = new_run(tmp_path / "b", rows=2) / "journal" / "0.1.j"
    receiver.put(run_id, "journal/0.1.j", run.name, BytesIO(stranger.read_bytes()))
    assert journal.read_bytes() == whole
    assert len(list(journal.parent.iterdir())) == 2


@pytest.mark.parametrize("end", ["\nformat 99\n", "\n" * 300, " "])
def test_a_receiver_takes_no_id_file_that_would_close_the_store(tmp_path: Path, end: str) -> None:
    run_id = "0" * 8 + "-0000" * 3 + "-" + "0" * 12
    with pytest.raises(RecordError, match="id file"):
        SyncReceiver(tmp_path).put(run_id, "id", "run", BytesIO(f"{run_id}{end}".encode()))
    assert FolderStore(tmp_path).runs() == {}
