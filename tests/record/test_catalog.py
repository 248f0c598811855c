"""The catalogue has what the run folders have, and nothing else."""

import math
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from made_stores import make_run, make_step

from windlass.errors import RecordError
from windlass.record.annotations import annotate
from windlass.record.catalog import CATALOG_FILE, CURVES_FILE, Catalog
from windlass.record.run_row import RunQuery, RunRow
from windlass.tracking.run_folder import reopen_run_folder
from windlass.tracking.run_reader import load_run


def refreshed(root: Path) -> Catalog:
    catalog = Catalog.open(root)
    catalog.refresh()
    return catalog


def rows(root: Path) -> list[RunRow]:
    with refreshed(root) as catalog:
        return catalog.rows(RunQuery(archived=None))


def test_a_row_says_what_the_run_folder_says(tmp_path: Path):
    run = make_run(tmp_path, losses=(3.0, 2.5, 2.0, 1.5, 1.25))
    run.end("finished")
    (row,) = rows(tmp_path)
    record = load_run(run.path)
    assert (row.id, row.folder, row.name) == (record.id, record.folder, run.path.name)
    assert (row.state, row.attempts, row.ranks, row.step, row.steps) == ("finished", 1, 1, 5, 100)
    assert (row.loss, row.held_out_loss) == (1.25, 5.0)
    assert (row.seconds, row.predicted_seconds) == (0.5, 0.4)
    assert (row.low_seconds, row.high_seconds, row.outside_interval) == (0.3, 0.5, False)
    assert row.kinds == {"backward": 0.3, "forward": 0.2}
    assert (row.memory_bytes, row.tokens_per_second) == (2**30, 1024.0)
    assert row.started == record.events[0].time
    assert row.ended == record.events[-1].time
    assert row.settings["train.learning_rate"] == 1e-3
    assert (row.settings["phases"], row.settings["compile"]) == (2, True)
    assert row.faults == ()


def test_the_state_is_that_of_the_last_attempt_and_of_the_lock(tmp_path: Path):
    finished, killed, running = (make_run(tmp_path) for _ in range(3))
    finished.end("interrupted")
    killed.close()
    with refreshed(tmp_path) as catalog:
        assert [row.state for row in catalog.rows()] == ["running", "killed", "interrupted"]
        with reopen_run_folder(finished.path, meta={}) as again:
            again.append_step(make_step(3, 7.0))
            again.append_step(make_step(4, 8.0))
            again.end("finished")
        running.close()
        catalog.refresh()
        states = {row.id: (row.state, row.attempts, row.step) for row in catalog.rows()}
    assert states[running.id] == ("killed", 1, 3)
    assert states[finished.id] == ("finished", 2, 4)


def test_a_run_that_goes_on_is_read_again(tmp_path: Path):
    run = make_run(tmp_path)
    with refreshed(tmp_path) as catalog:
        run.append_step(make_step(4, 0.5))
        catalog.refresh()
        (row,) = catalog.rows()
        assert (row.step, row.loss, row.state) == (4, 0.5, "running")
        assert not catalog.refresh()
    run.close()


def test_a_list_is_answered_while_another_thread_reads_runs(tmp_path: Path):
    for _ in range(3):
        make_run(tmp_path, losses=(3.0,))
    answers: list[int] = []
    with Catalog.open(tmp_path) as catalog, ThreadPoolExecutor(1) as reader:

        def ask(*_: object) -> None:
            answers.append(len(reader.submit(catalog.rows).result(timeout=10)))

        catalog.refresh(ask)
    assert answers == [1, 2, 3]


def test_a_second_process_sees_what_the_first_one_read(tmp_path: Path):
    make_run(tmp_path).end("finished")
    with refreshed(tmp_path) as first, refreshed(tmp_path) as second:
        make_run(tmp_path).end("finished")
        first.refresh()
        first.save()
        assert second.refresh()
        assert second.rows() == first.rows()
        assert second.curves([r.id for r in second.rows()], ["loss"]).keys() == {
            row.id for row in first.rows()
        }


def test_equal_stores_have_equal_catalogues_byte_for_byte(tmp_path: Path):
    names = [f"run{number}" for number in range(6)]
    for number, name in enumerate(names):
        run = make_run(tmp_path, losses=(1.0 + number,), folder=tmp_path / "a" / name)
        run.end("finished")
        annotate(run.path, tags=["kept"], note=f"number {number}")
    for copy in ("b", "c"):
        order = random.Random(copy).sample(names, len(names))
        for name in order:  # one by one, with a catalogue between them
            shutil.copytree(tmp_path / "a" / name, tmp_path / copy / name)
            if copy == "b":
                refreshed(tmp_path / copy).close()
    contents = set()
    for store in ("a", "b", "c"):
        refreshed(tmp_path / store).close()
        contents.add((tmp_path / store / CATALOG_FILE).read_bytes())
    assert len(contents) == 1
    assert str(tmp_path).encode() not in contents.pop()


@pytest.mark.parametrize("name", [CATALOG_FILE, CURVES_FILE])
@pytest.mark.parametrize("damage", ["garbage", "truncated", "newer", "deleted"])
def test_a_damaged_or_newer_catalogue_is_built_anew(tmp_path: Path, name: str, damage: str):
    make_run(tmp_path).end("finished")
    before = rows(tmp_path)
    path = tmp_path / name
    if damage == "newer":
        with sqlite3.connect(path) as database:
            database.execute("PRAGMA user_version = 99")
        database.close()
    elif damage == "deleted":
        path.unlink()
    else:
        content = path.read_bytes()
        path.write_bytes(b"x" * len(content) if damage == "garbage" else content[:5000])
    with refreshed(tmp_path) as catalog:
        assert catalog.rows() == before
        assert len(catalog.curves([before[0].id], ["loss"])[before[0].id]["loss"].steps) == 3


def test_a_folder_that_cannot_be_written_has_its_catalogue_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = tmp_path / "runs"
    make_run(root).end("finished")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda path, _: Path(path) != root)  # root writes everywhere
    assert len(rows(root)) == 1
    assert not (root / CATALOG_FILE).exists()
    assert list((tmp_path / "cache").rglob(CATALOG_FILE))


def test_a_folder_that_is_missing_has_no_runs_and_is_not_made(tmp_path: Path):
    assert rows(tmp_path / "nothing") == []
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(RecordError, match="is no folder of runs"):
        Catalog.open(tmp_path / "file")


def test_a_run_that_was_deleted_leaves_the_catalogue(tmp_path: Path):
    run = make_run(tmp_path)
    run.end("finished")
    with refreshed(tmp_path) as catalog:
        shutil.rmtree(run.path)
        catalog.refresh()
        assert catalog.rows() == []
        with pytest.raises(RecordError, match=f"no run `{run.id}`"):
            catalog.row(run.id)


def test_a_damaged_run_is_a_row_with_its_faults(tmp_path: Path):
    run = make_run(tmp_path)
    run.end("finished")
    journal = run.path / "journal" / "0.1.j"
    content = bytearray(journal.read_bytes())
    content[len(content) // 2] ^= 1
    journal.write_bytes(bytes(content))
    (run.path / "request.toml").write_text("not toml")
    (run.path / "environment.json").write_text('{"host": ')
    (run.path / "annotations").mkdir()
    (run.path / "annotations" / "0.json").write_text("[]")
    (row,) = rows(tmp_path)
    assert row.step >= 2
    for name in ("journal/0.1.j", "request.toml", "environment.json", "annotations/0.json"):
        assert any(fault.startswith(f"{name}: ") for fault in row.faults), name


def test_a_sealed_file_that_was_changed_is_a_fault(tmp_path: Path):
    run = make_run(tmp_path)
    run.seal("plan.toml")
    run.end("finished")
    assert rows(tmp_path)[0].faults == ()
    with (run.path / "plan.toml").open("a") as file:
        file.write("# edited\n")
    assert "plan.toml: has changed" in rows(tmp_path)[0].faults[0]


def test_hostile_events_and_names_are_data(tmp_path: Path):
    run = make_run(
        tmp_path, model="x'); DROP TABLE run; --\0\ud800",
        meta={"steps": 1e300, "predicted_seconds": "fast", "predicted_interval": [1], "name": 7,
              "parent": {"id": ["\ud800"]}, "group": "<script>"},
    )  # fmt: skip
    run.append_event("seal", files={"../../etc/passwd": "0", "plan.toml": 3})
    run.end("finished")
    (row,) = rows(tmp_path)
    assert row.model == "x'); DROP TABLE run; --??"
    assert (row.steps, row.predicted_seconds, row.group) == (None, None, "<script>")
    assert len(row.faults) == 1


def test_numbers_that_are_not_finite_are_null_and_counted(tmp_path: Path):
    run = make_run(tmp_path, losses=(1.0, math.nan, math.inf, 4.0, math.nan))
    run.end("broken")
    with refreshed(tmp_path) as catalog:
        (row,) = catalog.rows(RunQuery(filter="loss is null and state = 'broken'"))
        loss = catalog.series(row.id)["loss"]
        curve = catalog.curves([row.id], ["loss"])[row.id]["loss"]
    assert (loss.count, loss.nonfinite, loss.minimum, loss.maximum) == (5, 3, 1.0, 4.0)
    np.testing.assert_array_equal(curve.high, [1, math.nan, math.nan, 4, math.nan])


def test_peers_share_graph_plan_and_machine_and_are_not_broken(tmp_path: Path):
    def of(graph: str) -> str:
        run = make_run(tmp_path)
        for name in ("graph.json", "machine.toml"):
            (run.path / name).write_text(graph if name == "graph.json" else "x")
        run.end("finished")
        return run.id

    first, second, other, broken = of("a"), of("a"), of("b"), of("a")
    with refreshed(tmp_path) as catalog:
        annotate(catalog.row(broken).folder, broken=True)
        catalog.refresh()
        assert [row.id for row in catalog.peers(first)] == [second]
        assert catalog.peers(other) == []


def test_curves_of_many_runs_keep_their_spikes_in_few_points(tmp_path: Path):
    losses = [1.0] * 2000
    losses[777] = 99.0
    run = make_run(tmp_path, losses=())
    for step, loss in enumerate(losses, start=1):
        run.journal.append_row(step, {"loss": loss})
    run.end("finished")
    with refreshed(tmp_path) as catalog:
        for points in (500, 60, 7):
            curve = catalog.curves([run.id], ["loss", "nothing"], points)[run.id]["loss"]
            assert len(curve.steps) <= points
            assert (curve.high.max(), curve.median.max()) == (99.0, 1.0)
            bucket = int(np.argmax(curve.high))
            assert curve.steps[bucket] <= 778 < [*curve.steps, 2001][bucket + 1]


def test_folders_without_a_run_or_of_another_format_have_no_row(tmp_path: Path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "file").write_text("x")
    make_run(tmp_path).end("finished")
    old = make_run(tmp_path, "gpt-old")
    old.close()
    (old.path / "id").write_text(f"{old.id}\n")
    with refreshed(tmp_path) as catalog:
        assert [row.model for row in catalog.rows()] == ["gpt-tiny"]
        assert catalog.unread_folders() == (old.path.name,)
        assert not catalog.refresh()


def test_a_run_that_went_on_at_two_sites_says_so_once(tmp_path: Path):
    here, there = tmp_path / "here" / "run", tmp_path / "there" / "run"
    make_run(here.parent, folder=here).end("interrupted")
    shutil.copytree(here, there)
    for folder, loss in ((here, 0.5), (there, 0.25)):
        with reopen_run_folder(folder, meta={}) as again:
            again.append_step(make_step(4, loss))
            again.end("finished")
    shutil.copy(there / "journal" / "0.2.j", here / "journal" / "0.2+0123abcd.j")
    (row,) = rows(here.parent)
    (fault,) = row.faults
    assert fault.startswith("the run went on at 2 sites: attempt 2 exists 2 times")
    assert fault in load_run(here).faults
    assert (row.attempts, row.step) == (3, 4)


def test_a_catalogue_goes_on_in_memory_on_a_full_disk(tmp_path: Path):
    make_run(tmp_path).end("finished")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # no file can become larger
    try:
        found = rows(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(found) == 1
    assert rows(tmp_path) == found


@pytest.mark.slow
def test_processes_that_are_killed_while_they_refresh_leave_a_good_catalogue(tmp_path: Path):
    root, draw = tmp_path / "runs", random.Random(1)
    code = f"from windlass.record import Catalog; c = Catalog.open({str(root)!r})"
    code += "; c.refresh(); c.close()"
    processes: list[subprocess.Popen[bytes]] = []
    for number in range(60):
        make_run(root, losses=(1.0 + number,)).end("finished")
        if number % 4 == 0:
            processes.append(subprocess.Popen((sys.executable, "-c", code)))
        for process in processes:
            if process.poll() is None and draw.random() < 0.05:
                process.kill()
        time.sleep(0.05)
    assert {process.wait(timeout=60) for process in processes} <= {0, -9}
    with refreshed(root) as catalog:
        assert len(catalog.rows()) == 60
        curves = catalog.curves([row.id for row in catalog.rows()], ["loss"])
        assert all("loss" in curve for curve in curves.values())
    content = (root / CATALOG_FILE).read_bytes()
    for name in (CATALOG_FILE, CURVES_FILE):
        (root / name).unlink()
    refreshed(root).close()
    assert (root / CATALOG_FILE).read_bytes() == content
