"""Runs of other trackers are taken over to the bit, and only once."""

import json
import os
import shutil
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from windlass.errors import RecordError, RequestError
from windlass.integrations import import_runs
from windlass.record import annotate, merge_folders, read_annotations
from windlass.schema import CONFIG_FILE, RunConfig
from windlass.tracking import Journal, JournalRow, journal_path, load_run, read_journal

SOURCES = {
    "mlflow": "mlflow.db",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
TRACKERS = tuple(SOURCES)


def journal_of(folder: Path) -> Journal:
    return read_journal(journal_path(folder, 0, 1))


def series(rows: Iterable[JournalRow]) -> dict[str, list[tuple[int, str]]]:
    points: dict[str, list[tuple[int, str]]] = {}
    for row in rows:
        for name, value in row.values.items():
            points.setdefault(name, []).append((row.step, value.hex()))
    return points


def imported(peer_runs: Path, root: Path, tracker: str) -> dict[str, Path]:
    """Folders of the runs of one tracker by their names, `1` and `2`."""
    runs = import_runs(peer_runs / SOURCES[tracker], root).runs
    return {item.run.name[-1]: item.folder for item in runs}


def all_bytes(root: Path) -> dict[str, bytes]:
    return {str(f.relative_to(root)): f.read_bytes() for f in root.rglob("*") if f.is_file()}


@pytest.mark.parametrize("tracker", TRACKERS)
def test_every_value_is_equal_to_the_bit(
    peer_runs: Path,
    tmp_path: Path,
    expected_series: Callable[[str, str], dict[str, list[tuple[int, str]]]],
    tracker: str,
):
    folders = imported(peer_runs, tmp_path / "runs", tracker)
    assert sorted(folders) == ["1", "2"]
    for seed, folder in folders.items():
        assert series(journal_of(folder).rows) == expected_series(tracker, seed)


@pytest.mark.parametrize(
    ("tracker", "states", "learning_rate"),
    [
        ("mlflow", ["finished", "broken"], "0.30000000000000004"),
        ("trackio", ["finished", "finished"], 0.30000000000000004),
        ("wandb", ["finished", "broken"], 0.30000000000000004),
    ],
)
def test_states_and_settings_come_along(
    peer_runs: Path, tmp_path: Path, tracker: str, states: list[str], learning_rate: object
):
    folders = imported(peer_runs, tmp_path / "runs", tracker)
    records = [load_run(folders[seed]) for seed in ("1", "2")]
    assert [record.state for record in records] == states
    assert all(not record.faults for record in records)
    values = RunConfig.load(folders["1"] / CONFIG_FILE).values
    assert values["optimizer.lr"] == learning_rate
    assert records[0].meta["model"] == values["model"] == "tiny <script>alert(1)</script>"


def test_times_tags_and_notes_come_along(peer_runs: Path, tmp_path: Path):
    mlflow = imported(peer_runs, tmp_path / "runs", "mlflow")["1"]
    first, second, *_ = journal_of(mlflow).rows
    assert (first.time, second.time) == (1_700_000_000.123, 1_700_000_001.123)
    assert read_annotations(mlflow).tags == ("team==cmd()",)
    wandb = imported(peer_runs, tmp_path / "runs", "wandb")["1"]
    assert read_annotations(wandb).tags == ("=cmd()", "baseline")
    assert read_annotations(wandb).notes == ("one of two",)


def test_importing_twice_changes_nothing(peer_runs: Path, tmp_path: Path):
    root = tmp_path / "runs"
    import_runs(peer_runs, root)
    before = all_bytes(root)
    again = import_runs(peer_runs, root)
    assert {item.change for item in again.runs} == {"unchanged"}
    assert len(again.runs) == 8
    assert all_bytes(root) == before


def test_the_same_runs_imported_at_two_sites_are_one_after_a_merge(peer_runs: Path, tmp_path: Path):
    import_runs(peer_runs, tmp_path / "a")
    moved = peer_runs.rename(tmp_path / "moved")
    for source in SOURCES.values():
        import_runs(moved / source, tmp_path / "b")
    assert all_bytes(tmp_path / "a") == all_bytes(tmp_path / "b")
    report = merge_folders([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert (report.runs, report.warnings) == (8, [])


def test_a_run_that_has_grown_replaces_what_was_imported_of_it(peer_runs: Path, tmp_path: Path):
    root, store = tmp_path / "runs", peer_runs / "mlflow.db"
    before = imported(peer_runs, root, "mlflow")["1"]
    with sqlite3.connect(store) as database:
        (run_id,) = database.execute("SELECT run_uuid FROM runs WHERE name = 'run 1'").fetchone()
        values = ("loss", 0.125, 1_700_000_040_000, run_id, 40, False)
        database.execute("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", values)
    again = import_runs(store, root)
    assert sorted(item.change for item in again.runs) == ["changed", "unchanged"]
    assert imported(peer_runs, root, "mlflow")["1"] == before
    assert series(journal_of(before).rows)["loss"][-1] == (40, (0.125).hex())
    assert len(list(root.glob("*/id"))) == 2


def test_an_older_copy_of_a_store_changes_nothing(peer_runs: Path, tmp_path: Path):
    root, store = tmp_path / "runs", peer_runs / "mlflow.db"
    (peer_runs / "backup").mkdir()
    shutil.copy(store, peer_runs / "backup" / "mlflow.db")
    with sqlite3.connect(peer_runs / "backup" / "mlflow.db") as database:
        database.execute("DELETE FROM metrics WHERE step > 10")
    import_runs(store, root)
    before = all_bytes(root)
    for source in (peer_runs / "backup", peer_runs):
        changes = {item.change for item in import_runs(source, root, "mlflow").runs}
        assert changes == {"unchanged"}
    assert all_bytes(root) == before


def test_a_tag_that_was_taken_away_stays_away(peer_runs: Path, tmp_path: Path):
    folder = imported(peer_runs, tmp_path / "runs", "wandb")["1"]
    annotate(folder, remove=["baseline"])
    imported(peer_runs, tmp_path / "runs", "wandb")
    assert read_annotations(folder).tags == ("=cmd()",)


def test_what_is_no_number_is_counted(peer_runs: Path, tmp_path: Path):
    left_out = import_runs(peer_runs, tmp_path / "runs").left_out
    assert left_out == {"values that are no numbers": 4, "text summaries": 2}


def test_ids_sort_by_the_start_of_the_runs(peer_runs: Path, tmp_path: Path):
    runs = import_runs(peer_runs, tmp_path / "runs").runs
    by_id = sorted(runs, key=lambda item: item.run.id)
    starts = [int(item.run.started * 1000) for item in by_id]
    assert starts == sorted(starts)
    assert len({item.run.id for item in runs}) == 8


def damaged(tracker: str, peer_runs: Path, change: Callable[[bytes, int], bytes]) -> None:
    """Every 149th byte in turn: what is still read was written, and nothing else comes up."""
    pattern = {"wandb": "wandb/*.wandb", "tensorboard": "tensorboard/run1/*"}[tracker]
    file = min(peer_runs.glob(pattern))
    whole = file.read_bytes()
    full = set(_points(file))
    assert len(full) == 52
    for offset in range(0, len(whole), 149):
        file.write_bytes(change(whole, offset))
        try:
            assert set(_points(file)) <= full, offset
        except RecordError as error:
            assert offset < 100, error  # noqa: PT017  the head of a file tells what it is


def _points(file: Path) -> list[tuple[str, int, str]]:
    from windlass.integrations.imports.tensorboard_events import read_tensorboard
    from windlass.integrations.imports.wandb_offline import read_wandb

    is_wandb = file.suffix == ".wandb"
    runs = list(read_wandb([file], [])) if is_wandb else [read_tensorboard(file.parent, [file])]
    return [
        (name, step, value)
        for run in runs
        for name, points in series(run.rows).items()
        for step, value in points
    ]


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_file_that_ends_anywhere_is_read_up_to_there(peer_runs: Path, tracker: str):
    damaged(tracker, peer_runs, lambda whole, offset: whole[:offset])


@pytest.mark.parametrize("tracker", ["wandb", "tensorboard"])
def test_a_flipped_bit_never_changes_a_value(peer_runs: Path, tracker: str):
    def flip(whole: bytes, offset: int) -> bytes:
        return whole[:offset] + bytes((whole[offset] ^ 16,)) + whole[offset + 1 :]

    damaged(tracker, peer_runs, flip)


def test_hostile_names_and_values_stay_inside_the_store(peer_runs: Path, tmp_path: Path):
    root, store = tmp_path / "runs", peer_runs / "mlflow.db"
    hostile = "../../../etc/\0passwd\ud800".encode(errors="surrogatepass")
    with sqlite3.connect(store) as database:
        database.execute("UPDATE runs SET name = CAST(? AS TEXT)", (hostile,))
        database.execute("UPDATE metrics SET key = CAST(? AS TEXT) WHERE step = 3", (hostile,))
        database.execute("UPDATE metrics SET value = 'text' WHERE step = 4")
        database.execute("UPDATE metrics SET step = 9223372036854775807 WHERE step = 5")
    outcome = import_runs(store, root)
    assert outcome.left_out == {"metrics that are no numbers": 4}
    assert {item.folder.parent for item in outcome.runs} == {root}
    for item in outcome.runs:
        assert not load_run(item.folder).faults
        assert any("passwd" in name for name in series(journal_of(item.folder).rows))
    assert {path.name for path in tmp_path.iterdir()} == {"peers", "runs"}


def test_a_deeply_nested_value_is_left_out(peer_runs: Path, tmp_path: Path):
    bomb = '{"a":' * 100_000 + "1" + "}" * 100_000
    with sqlite3.connect(peer_runs / "trackio" / "peers.db") as database:
        database.execute("UPDATE metrics SET metrics = ? WHERE step = 3", (bomb,))
    folders = imported(peer_runs, tmp_path / "runs", "trackio")
    assert 3 not in {row.step for row in journal_of(folders["1"]).rows}


def test_a_view_without_end_is_a_sentence_and_other_stores_are_read(
    peer_runs: Path, tmp_path: Path
):
    with sqlite3.connect(peer_runs / "endless.db") as database:
        rows = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
        for table in ("metrics", "configs"):
            database.execute(f"CREATE VIEW {table} AS {rows}")
    (peer_runs / "damaged.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    outcome = import_runs(peer_runs, tmp_path / "runs")
    assert len(outcome.runs) == 8
    assert any("`configs` where a tracker has a table" in text for text in outcome.warnings)
    assert any("damaged.db` cannot be read as a store" in text for text in outcome.warnings)


def test_a_sparse_file_is_read_a_block_at_a_time(peer_runs: Path):
    file = min(peer_runs.glob("wandb/*.wandb"))
    points = _points(file)
    os.truncate(file, 2**28)
    events = min(peer_runs.glob("tensorboard/run1/*"))
    os.truncate(events, 2**35)
    tracemalloc.start()
    try:
        assert _points(file) == points
        assert len(_points(events)) == 52
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.parametrize("time", ["'text'", "1e300", "-1e300", "9e999", "NULL"])
def test_a_run_that_began_at_no_time_is_taken_over(peer_runs: Path, tmp_path: Path, time: str):
    with sqlite3.connect(peer_runs / "mlflow.db") as database:
        database.execute(f"UPDATE runs SET start_time = {time}, end_time = {time}")  # noqa: S608
    folders = imported(peer_runs, tmp_path / "runs", "mlflow")
    for folder in folders.values():
        assert folder.name[:2] in ("19", "20")
        record = load_run(folder)
        assert not record.faults
        assert all(0 <= event.time <= 4e9 for event in record.events)


def test_a_source_without_runs_is_refused_in_a_sentence(peer_runs: Path, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match=r"`.*empty` holds no runs; import reads MLflow's"):
        import_runs(tmp_path / "empty", tmp_path / "runs")
    with pytest.raises(RecordError, match="does not exist"):
        import_runs(tmp_path / "missing", tmp_path / "runs")
    with pytest.raises(RecordError, match="holds runs of wandb and none of mlflow"):
        import_runs(peer_runs / "wandb", tmp_path / "runs", "mlflow")
    with pytest.raises(RequestError, match="did you mean `wandb`"):
        import_runs(peer_runs, tmp_path / "runs", "wandbb")
    (tmp_path / "empty" / "meta.yaml").write_text("experiment_id: '0'\n")
    with pytest.raises(RecordError, match="mlflow migrate-filestore"):
        import_runs(tmp_path / "empty", tmp_path / "runs")
    (tmp_path / "empty" / "store.db").write_bytes(b"SQLite format 3\0" + b"x" * 5000)
    with pytest.raises(RecordError, match=r"store.db` cannot be read as a store"):
        import_runs(tmp_path / "empty", tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_settings_of_hyperparameters_are_read_from_event_files(tmp_path: Path):
    from tensorboard.compat.proto import event_pb2
    from tensorboard.plugins.hparams import plugin_data_pb2, summary_v2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    assert plugin_data_pb2 is not None
    summary = summary_v2.hparams_pb({"lr": 0.25, "optimizer": "adam", "amp": True})
    writer = EventFileWriter(str(tmp_path / "logs"))
    writer.add_event(event_pb2.Event(wall_time=5.0, summary=summary))
    writer.close()
    item, *_ = import_runs(tmp_path / "logs", tmp_path / "runs").runs
    values = json.loads((item.folder / CONFIG_FILE).read_text())["values"]
    assert values == {"lr": 0.25, "optimizer": "adam", "amp": True}


def test_what_a_restarted_writer_had_written_behind_its_step_is_left_out(tmp_path: Path):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    folder = tmp_path / "logs"

    def write(suffix: str, values: dict[int, float], start: int | None) -> None:
        writer = EventFileWriter(str(folder), filename_suffix=suffix)
        if start is not None:  # as `SummaryWriter(purge_step=...)` does
            session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            writer.add_event(event_pb2.Event(wall_time=10, step=start, session_log=session))
        for step, value in values.items():
            one = summary_pb2.Summary.Value(tag="loss", simple_value=value)
            summary = summary_pb2.Summary(value=[one])
            writer.add_event(event_pb2.Event(wall_time=10 + step, step=step, summary=summary))
        writer.close()

    write(".1", {1: 4.0, 2: 3.0, 3: 9.0, 4: 9.0}, None)
    write(".2", {3: 2.0}, 3)

    item, *_ = import_runs(folder, tmp_path / "runs").runs

    rows = journal_of(item.folder).rows
    assert series(rows)["loss"] == [
        (step, value.hex()) for step, value in ((1, 4.0), (2, 3.0), (3, 2.0))
    ]
