"""Stores of runs merge to the same store in every order, after any interruption."""

import hashlib
import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from windlass.errors import RecordError
from windlass.record import annotate, merge_folders, read_annotations, sync_runs
from windlass.record.stores import FolderStore
from windlass.record.sync import SyncReceiver
from windlass.tracking import (
    JournalWriter,
    create_run_folder,
    load_run,
    parse_journal,
    reopen_run_folder,
)

META = {"model": "tiny", "machine": "here", "steps": 9}


def new_run(root: Path, name: str = "tiny", rows: int = 3) -> Path:
    with create_run_folder(root, name, documents={}, meta=META) as run:
        add_rows(run.journal, 1, rows)
    return run.path


def add_rows(journal: JournalWriter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        journal.append_row(step, {"loss": 1 / step, "seconds": 0.1})


def content(root: Path) -> dict[str, str]:
    """Digest of each file of the record by its path; where a run lies twice, both."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def journals(root: Path) -> set[tuple[str, str]]:
    """What the journals of all runs contain, whatever their names are."""
    return {(name.partition("/")[0], digest) for name, digest in content(root).items()}


def test_a_merge_in_any_order_is_the_same_store(tmp_path: Path) -> None:
    shared = [new_run(tmp_path / "a", rows=2) for _ in range(2)]
    new_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    with reopen_run_folder(tmp_path / "b" / shared[0].name, meta=META) as run:
        add_rows(run.journal, 3, 5)
    annotate(tmp_path / "c" / shared[1].name, tags=["good"])
    annotate(tmp_path / "a" / shared[1].name, note="older")
    new_run(tmp_path / "c")
    results = []
    for order in itertools.permutations("abc"):
        target = tmp_path / "".join(order)
        merge_folders([tmp_path / name for name in order], target)
        results.append(content(target))
    assert all(result == results[0] for result in results)
    assert len(results[0]) == 4 * 2 + 1 + 2


def test_a_second_merge_copies_nothing(tmp_path: Path) -> None:
    for name in "ab":
        new_run(tmp_path / name)
    stores = [tmp_path / name for name in "ab"]
    first = merge_folders(stores, tmp_path / "all")
    second = merge_folders(stores, tmp_path / "all")
    assert (first.runs, first.new_runs, first.copied_files) == (2, 2, 4)
    assert (second.runs, second.new_runs, second.copied_files) == (2, 0, 0)


def test_a_run_that_goes_on_is_completed_by_the_next_merge(tmp_path: Path) -> None:
    with create_run_folder(tmp_path / "a", "tiny", documents={}, meta=META) as run:
        add_rows(run.journal, 1, 2)
        merge_folders([tmp_path / "a"], tmp_path / "b")
        add_rows(run.journal, 3, 4)
        report = merge_folders([tmp_path / "a"], tmp_path / "b")
    assert report.copied_files == 1
    copied = next((tmp_path / "b").rglob("*.j"))
    assert [row.step for row in parse_journal(copied.read_bytes()).rows] == [1, 2, 3, 4]


def test_a_run_resumed_at_two_sites_keeps_both_attempts_and_says_so(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for site, last in (("a", 5), ("b", 7)):
        with reopen_run_folder(tmp_path / site / run.name, meta=META) as again:
            add_rows(again.journal, 4, last)
    stores = [tmp_path / "a", tmp_path / "b"]
    report = merge_folders(stores, tmp_path / "all")
    assert [warning for warning in report.warnings if "attempt 2 exists twice" in warning]
    merge_folders(stores[::-1], tmp_path / "other")
    assert journals(tmp_path / "all") == journals(tmp_path / "other")
    names = sorted(path.name for path in (tmp_path / "all").rglob("*.j"))
    assert len(names) == 3
    assert names[:1] == ["0.1.j"]
    assert "0.2.j" in names
    assert merge_folders(stores, tmp_path / "all").copied_files == 0


def test_a_damaged_copy_is_replaced_by_a_whole_one_and_never_the_other_way(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path / "a", rows=50)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    journal = tmp_path / "b" / run.name / "journal" / "0.1.j"
    damaged = bytearray(journal.read_bytes())
    damaged[-100] ^= 4
    journal.write_bytes(damaged)
    merge_folders([tmp_path / "a"], tmp_path / "b")
    assert journal.read_bytes() == (run / "journal" / "0.1.j").read_bytes()
    journal.write_bytes(damaged)
    report = merge_folders([tmp_path / "b"], tmp_path / "a")
    assert "is damaged" in report.warnings[0]
    assert parse_journal((run / "journal" / "0.1.j").read_bytes()).unread_bytes == 0


def steps_of(journal: Path) -> list[int]:
    return [row.step for row in parse_journal(journal.read_bytes()).rows]


def test_an_older_whole_copy_takes_no_step_from_a_damaged_one(tmp_path: Path) -> None:
    with create_run_folder(tmp_path / "a", "tiny", documents={}, meta=META) as run:
        add_rows(run.journal, 1, 3)
        shutil.copytree(tmp_path / "a", tmp_path / "older")
        add_rows(run.journal, 4, 12)
    journal = run.path / "journal" / "0.1.j"
    damaged = bytearray(journal.read_bytes())
    damaged[damaged.rindex(b'["loss"') + 3] ^= 1  # in the second record of the names
    journal.write_bytes(damaged)
    assert steps_of(journal) == list(range(1, 13))
    report = merge_folders([tmp_path / "older"], tmp_path / "a")
    assert steps_of(journal) == list(range(1, 13))
    assert "that copy has those of both now" in report.warnings[0]
    assert parse_journal(journal.read_bytes()).skipped == ()


@pytest.mark.parametrize("cut", [0, 60])
def test_copies_that_are_damaged_at_different_places_make_a_whole_one(
    tmp_path: Path, cut: int
) -> None:
    run = new_run(tmp_path / "a", rows=40)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole = (run / "journal" / "0.1.j").read_bytes()
    for site, place in (("a", len(whole) - 900), ("b", len(whole) - 300)):
        content = bytearray(whole)
        content[place : place + 50] = bytes(50 - cut // 3)
        (tmp_path / site / run.name / "journal" / "0.1.j").write_bytes(content)
    for target, source in ("ab", "ba"):
        shutil.copytree(tmp_path / target, tmp_path / "all")
        merge_folders([tmp_path / source], tmp_path / "all")
        assert (tmp_path / "all" / run.name / "journal" / "0.1.j").read_bytes() == whole
        shutil.rmtree(tmp_path / "all")


def test_a_copy_without_its_beginning_is_united_or_kept_beside_and_show_says_so(
    tmp_path: Path,
) -> None:
    run = new_run(tmp_path / "a", rows=9)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    journal, other = (tmp_path / site / run.name / "journal" / "0.1.j" for site in "ab")
    whole = journal.read_bytes()
    headless = b"x" + whole[1:]
    other.write_bytes(headless)
    journal.write_bytes(whole[:-60])
    merge_folders([tmp_path / "b"], tmp_path / "a")
    assert steps_of(journal) == list(range(1, 10))
    first = 11 + int.from_bytes(whole[3:7], "little")
    journal.write_bytes(whole[:first])  # nothing is in both, and the places do not tell
    other.write_bytes(headless[first - 20 :])
    merge_folders([tmp_path / "b"], tmp_path / "a")
    assert len(list(journal.parent.iterdir())) == 2
    assert any("attempt 1 exists 2 times" in fault for fault in load_run(run).faults)


def test_names_that_somebody_adds_to_a_journal_rename_no_row(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a", rows=5)
    journal = run / "journal" / "0.1.j"
    before = parse_journal(journal.read_bytes()).rows
    with JournalWriter(tmp_path / "other.j") as writer:
        writer.append_row(1, {"evil": 1, "names": 2})
        writer.append_row(1, {"three": 1, "more": 2, "names": 3})
    journal.write_bytes(journal.read_bytes() + (tmp_path / "other.j").read_bytes())
    assert parse_journal(journal.read_bytes()).rows[:5] == before


def test_of_two_copies_of_a_note_the_whole_one_counts(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    annotate(run, tags=["good"], note="first")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copies = [next((tmp_path / site / run.name / "annotations").iterdir()) for site in "ab"]
    copies[1].write_bytes(b"{")
    report = merge_folders([tmp_path / "b"], tmp_path / "a")
    assert "is damaged" in report.warnings[0]
    merge_folders([tmp_path / "a"], tmp_path / "b")
    assert copies[0].read_bytes() == copies[1].read_bytes()
    copies[1].write_text('{"note": "second"}')
    for target, source in ("ab", "ba"):
        merge_folders([tmp_path / source], tmp_path / target)
        notes = read_annotations(tmp_path / target / run.name).notes
        assert sorted(notes)[-2:] == ["first", "second"]
        assert merge_folders([tmp_path / source], tmp_path / target).copied_files == 0


def test_documents_that_differ_are_both_kept_in_every_order(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for site in "ab":
        (tmp_path / site / run.name / "plan.toml").write_text(f'name = "{site}"\n')
    merge_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "ab")
    merge_folders([tmp_path / "b", tmp_path / "a"], tmp_path / "ba")
    assert content(tmp_path / "ab") == content(tmp_path / "ba")
    assert len([name for name in content(tmp_path / "ab") if "plan.toml" in name]) == 2
    assert merge_folders([tmp_path / "b"], tmp_path / "ab").copied_files == 0


def test_hostile_names_never_leave_the_target(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    (run / "plan.toml").symlink_to(secret)
    (run / "journal" / "0.2.j").symlink_to(secret)
    (tmp_path / "a" / "linked").symlink_to(tmp_path)
    (run / ("x" * 250)).write_text("long")
    os.mkfifo(run / "machine.toml")
    merge_folders([tmp_path / "a"], tmp_path / "b")
    names = content(tmp_path / "b")
    assert sorted(name.partition("/")[2] for name in names) == ["id", "journal/0.1.j"]
    receiver = SyncReceiver(tmp_path / "b")
    run_id = (run / "id").read_text().split()[0]
    for name in ("../x.toml", "/etc/x.toml", "journal/../../x.j", "x.py", "a\0.toml", "x.json/y"):
        with pytest.raises(RecordError):
            receiver.put(run_id, name, "run", BytesIO())
    for folder in ("..", "../x", "a/b", ".hidden", ""):
        with pytest.raises(RecordError):
            receiver.put("0" * 8 + "-0000" * 3 + "-" + "0" * 12, "id", folder, BytesIO())
    with pytest.raises(RecordError, match="no id"):
        receiver.put("../../etc", "id", "run", BytesIO())


def test_nothing_is_written_through_a_link_of_the_target(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    other = new_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copy = tmp_path / "b" / run.name
    shutil.rmtree(copy / "journal")
    (copy / "journal").symlink_to(elsewhere)
    with reopen_run_folder(other, meta=META) as again:
        add_rows(again.journal, 4, 5)
    report = merge_folders([tmp_path / "a"], tmp_path / "b")
    assert "is a link, and nothing is written through links" in report.warnings[0]
    assert list(elsewhere.iterdir()) == []
    assert (tmp_path / "b" / other.name / "journal" / "0.2.j").exists()


def test_a_store_of_a_newer_windlass_is_refused_whole(tmp_path: Path) -> None:
    new_run(tmp_path / "a")
    newer = new_run(tmp_path / "a")
    (newer / "id").write_text((newer / "id").read_text().replace("format 2", "format 99"))
    with pytest.raises(RecordError, match="newer Windlass"):
        merge_folders([tmp_path / "a"], tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_checkpoint_is_copied_without_being_in_memory_and_one_of_another_site_stays(
    tmp_path: Path,
) -> None:
    run, mib = new_run(tmp_path / "a"), 2**20
    layer = run / "checkpoints" / "step-3" / "layer-0000.safetensors"
    layer.parent.mkdir(parents=True)
    layer.write_bytes(b"a")
    os.truncate(layer, 96 * mib)
    begun = layer.with_name(f".{layer.name}.0123abcd.tmp")  # by a merge that was killed
    begun.write_bytes(b"a")
    copies = [tmp_path / name / layer.relative_to(tmp_path / "a") for name in ("b", "objects")]
    tracemalloc.start()
    try:
        merge_folders([tmp_path / "a"], tmp_path / "b", checkpoints=True)
        sync_runs(tmp_path / "a", f"local://{tmp_path / 'objects'}", checkpoints=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 48 * mib
    assert [copy.stat().st_size for copy in copies] == [96 * mib] * 2
    assert [file.name for file in copies[0].parent.iterdir()] == [layer.name]
    copies[0].write_bytes(b"b")
    copies[0].with_name("layer-0001.safetensors").write_bytes(b"b")
    report = merge_folders([tmp_path / "b"], tmp_path / "a", checkpoints=True)
    assert "two checkpoints `checkpoints/step-3` that differ" in report.warnings[0]
    assert {*layer.parent.iterdir()} == {layer, begun}


def test_a_file_that_a_run_removes_meanwhile_is_a_sentence(tmp_path: Path) -> None:
    run = new_run(tmp_path / "a")
    store = FolderStore(tmp_path / "a")
    ((run_id, _),) = store.runs().items()
    (run / "plan.toml").write_text("")
    assert "plan.toml" in store.files(run_id)
    (run / "plan.toml").unlink()
    for read in (store.read, store.digest):
        with pytest.raises(RecordError, match=r"plan\.toml` cannot be read any more"):
            read(run_id, "plan.toml")


def test_runs_go_to_an_object_store_and_come_back_equal(tmp_path: Path) -> None:
    new_run(tmp_path / "a")
    new_run(tmp_path / "a")
    url = f"local://{tmp_path / 'objects'}"
    assert sync_runs(tmp_path / "a", url).copied_files == 4
    assert sync_runs(tmp_path / "a", url).copied_files == 0
    merge_folders([tmp_path / "objects"], tmp_path / "b")
    assert content(tmp_path / "a") == content(tmp_path / "b")


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=6), st.data())
def test_merging_is_a_union_whatever_the_stores_share(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[int, int]], data: st.DataObject
) -> None:
    root = tmp_path_factory.mktemp("stores")
    stores = [root / str(index) for index in range(3)]
    for store in stores:
        store.mkdir()
    for first, second in places:
        run = new_run(stores[first])
        if second != first:
            shutil.copytree(run, stores[second] / run.name)
            with reopen_run_folder(stores[second] / run.name, meta=META) as again:
                add_rows(again.journal, 4, 5)
    orders = list(itertools.permutations(stores))
    one, other = data.draw(st.permutations(orders))[:2]
    merge_folders(one, root / "one")
    merge_folders(other, root / "other")
    assert content(root / "one") == content(root / "other")
    assert set(content(root / "one")) >= {name for store in stores for name in content(store)}


@pytest.mark.slow
def test_a_merge_killed_at_any_moment_is_completed_by_the_next_one(tmp_path: Path) -> None:
    generator = random.Random(7)
    stores = [tmp_path / name for name in "abc"]
    runs = [new_run(stores[index % 3], rows=200) for index in range(100)]
    for run in runs[::3]:
        shutil.copytree(run, stores[1] / run.name, dirs_exist_ok=True)
    merge_folders(stores, tmp_path / "expected")
    started = time.perf_counter()
    merge_folders(stores, tmp_path / "timed")
    seconds = time.perf_counter() - started
    code = (
        "import sys; from pathlib import Path; from windlass.record import merge_folders; "
        "print('ready', flush=True); merge_folders([Path(p) for p in sys.argv[1:4]], "
        "Path(sys.argv[4]))"
    )
    for attempt in range(50):
        target = tmp_path / f"target{attempt}"
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, stores), str(target)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(generator.uniform(0, seconds))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        merge_folders(stores, target)
        whole = {name: d for name, d in content(target).items() if not name.endswith(".tmp")}
        assert whole == content(tmp_path / "expected")
        shutil.rmtree(target)
