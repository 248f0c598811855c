"""A run record holds all files of its folder, and damage to one file hides no other."""

import hashlib
import math
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from windlass.errors import RecordError
from windlass.schema.request import Request
from windlass.schema.run_record import (
    ATTEMPTS_FOLDER,
    PLAN_FILE,
    PREDICTION_FILE,
    REQUEST_FILE,
    Step,
)
from windlass.tracking.journal import JournalWriter
from windlass.tracking.journal_reader import read_journal
from windlass.tracking.run_folder import (
    RunFolder,
    create_run_folder,
    journal_path,
    rank_journal,
    reopen_run_folder,
)
from windlass.tracking.run_reader import load_run
from windlass.tracking.step_records import append_step, read_steps

SIZES = st.floats(allow_nan=False)
STEPS = st.builds(
    Step,
    step=st.integers(1, 10**6),
    loss=SIZES, gradient_norm=SIZES, learning_rate=SIZES, seconds=SIZES,
    tokens=st.integers(0, 2**40), memory_bytes=st.integers(0, 2**50),
    read_bytes=st.integers(0, 2**50), written_bytes=st.integers(0, 2**50), flush_seconds=SIZES,
    by_kind=st.dictionaries(st.sampled_from(["forward", "backward", "update"]), SIZES),
    arrivals=st.dictionaries(st.sampled_from(["receive", "sync"]), SIZES),
    cpu_seconds=st.none() | SIZES,
    contention=st.none() | st.floats(0, 1),
    device_memory_bytes=st.none() | st.integers(0, 2**50),
    held_out_loss=st.none() | SIZES,
    held_out_bits_per_byte=st.none(),
    saved=st.none() | st.text(max_size=10),
)  # fmt: skip


def step(number: int, loss: float = 1.0) -> Step:
    return Step(
        step=number, loss=loss, gradient_norm=1.0, learning_rate=1e-3, tokens=512,
        seconds=0.5, memory_bytes=2**30, by_kind={"forward": 0.2, "backward": 0.3},
    )  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(STEPS, max_size=5, unique_by=lambda step: step.step))
def test_a_step_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, steps: list[Step]):
    steps.sort(key=lambda step: step.step)
    path = tmp_path_factory.mktemp("journal") / "0.1.j"
    with JournalWriter(path) as journal:
        for item in steps:
            append_step(journal, item)
    assert read_steps([read_journal(path)]) == tuple(steps)


def test_a_journal_without_traffic_is_read_with_zero_traffic(
    tmp_path: Path,
):
    with JournalWriter(tmp_path / "0.1.j") as journal:
        journal.append_row(1, {"loss": 2.0, "seconds": 0.5, "memory_bytes": 5.0})
    (read,) = read_steps([read_journal(tmp_path / "0.1.j")])
    assert (read.read_bytes, read.written_bytes, read.flush_seconds) == (0, 0, 0.0)


def test_an_evaluation_in_bits_per_byte_comes_back(tmp_path: Path):
    with JournalWriter(tmp_path / "0.1.j") as journal:
        item = Step(
            step=3, loss=2.0, gradient_norm=0.5, learning_rate=1e-3, tokens=1, seconds=1.0,
            memory_bytes=1, held_out_loss=2.5, held_out_bits_per_byte=1.2,
        )  # fmt: skip
        append_step(journal, item)
    assert read_steps([read_journal(tmp_path / "0.1.j")]) == (item,)


def test_a_later_attempt_replaces_the_steps_that_it_repeats(tmp_path: Path):
    run = create_run_folder(tmp_path, "gpt", documents={}, meta={"steps": 9})
    for number in range(1, 8):
        run.append_step(step(number, loss=1.0))
    run.close()
    second = reopen_run_folder(run.path, meta={"steps": 12})
    for number in range(6, 10):
        second.append_step(step(number, loss=2.0))
    second.end("finished")
    third = reopen_run_folder(run.path, meta={})
    third.end("interrupted")
    record = load_run(run.path)
    assert [item.step for item in record.steps] == list(range(1, 10))
    assert [item.loss for item in record.steps] == [1.0] * 5 + [2.0] * 4
    assert (record.attempts, record.state, record.meta["steps"]) == (3, "interrupted", 12)


def test_missing_files_are_none_and_damaged_ones_are_faults(tmp_path: Path):
    run = create_run_folder(tmp_path, "gpt", documents={REQUEST_FILE: Request()}, meta={})
    run.append_step(step(1))
    run.end("broken", reason="loss is nan")
    (run.path / PREDICTION_FILE).write_text('{"plan": "x"')
    path = journal_path(run.path, 0, 1)
    path.write_bytes(path.read_bytes() + b"\x02half")
    record = load_run(run.path)
    assert record.request == Request()
    assert record.model == "gpt-tiny"
    assert (record.plan, record.prediction, record.state) == (None, None, "broken")
    assert len(record.steps) == 1
    assert "prediction.json" in record.faults[0] or "prediction.json" in record.faults[1]
    assert any("5 bytes are torn" in fault for fault in record.faults)


def test_unreadable_files_are_faults_and_raise_nothing(tmp_path: Path):
    run = create_run_folder(tmp_path, "gpt", documents={}, meta={})
    run.close()
    (run.path / "plan.toml").write_bytes(b"\xff\xfe")
    (run.path / "machine.toml").write_text("unknown = 1")
    record = load_run(run.path)
    assert len(record.faults) == 2
    assert (record.plan, record.machine, record.model) == (None, None, "?")


def test_a_locked_run_is_running(tmp_path: Path):
    with create_run_folder(tmp_path, "gpt", documents={}, meta={}) as run:
        assert load_run(run.path).state == "running"
    assert load_run(run.path).state == "killed"


def test_a_loss_that_is_nan_is_read_back_as_nan(tmp_path: Path):
    run = create_run_folder(tmp_path, "gpt", documents={}, meta={})
    run.append_step(step(1, loss=math.nan))
    run.close()
    assert math.isnan(load_run(run.path).steps[0].loss)


def test_a_folder_without_a_run_cannot_be_loaded(tmp_path: Path):
    with pytest.raises(RecordError, match="holds no run"):
        load_run(tmp_path)


def test_each_rank_has_its_steps_of_the_last_attempt_and_none_counts_twice(tmp_path: Path):
    def attempt(run: RunFolder, *numbers: int) -> Path:
        with run, rank_journal(run.path, 1, run.attempt) as other:
            for number in numbers:
                run.append_step(step(number))
                append_step(other, step(number, loss=9.0))
        return run.path

    folder = attempt(create_run_folder(tmp_path, "m", documents={}, meta={}), 1, 2)
    attempt(reopen_run_folder(folder, meta={}), 3, 4)
    record = load_run(folder)
    assert [step.step for step in record.steps] == [1, 2, 3, 4]
    assert all(step.loss == 1.0 for step in record.steps)
    assert [[step.step for step in steps] for steps in record.steps_by_rank] == [[3, 4], [3, 4]]
    assert (record.attempts, record.state) == (2, "killed")


def test_a_rank_whose_record_ends_early_is_named_once_the_run_has_finished(tmp_path: Path):
    with create_run_folder(tmp_path, "m", documents={}, meta={}) as run:
        with rank_journal(run.path, 1, run.attempt) as other:
            append_step(other, step(1))
        for number in (1, 2, 3):
            run.append_step(step(number))
        assert load_run(run.path).faults == ()
        run.end("finished")
    (fault,) = load_run(run.path).faults
    assert fault == "the record of rank 1 ends with step 1, that of rank 0 with 3"


def test_only_steps_of_the_current_plan_are_compared_with_its_prediction(tmp_path: Path):
    with create_run_folder(tmp_path, "m", documents={}, meta={}) as run:
        run.append_step(step(1))
    replaced = run.path / ATTEMPTS_FOLDER / "1" / PLAN_FILE
    replaced.parent.mkdir(parents=True)
    replaced.touch()
    with reopen_run_folder(run.path, meta={}) as run:
        run.append_step(step(2))
    record = load_run(run.path)
    assert [step.step for step in record.steps] == [1, 2]
    assert [step.step for step in record.current_plan_steps] == [2]


def test_what_a_damaged_or_missing_journal_held_is_said(tmp_path: Path):
    with create_run_folder(tmp_path, "m", documents={}, meta={}) as run:
        for number in range(1, 5):
            run.append_step(step(number, loss=number))
    for number in (5, 6):
        with reopen_run_folder(run.path, meta={}) as attempt:
            attempt.append_step(step(number, loss=number))
    assert load_run(run.path).faults == ()
    first = journal_path(run.path, 0, 1)
    content = bytearray(first.read_bytes())
    content[content.index(struct.pack("<d", 2.0))] ^= 1
    first.write_bytes(content)
    journal_path(run.path, 0, 2).unlink()

    record = load_run(run.path)

    assert [item.step for item in record.steps] == [1, 3, 4, 6]
    torn, missing, lost = record.faults
    assert "bytes are torn or damaged and were skipped" in torn
    assert missing == "the journal of attempt 2 is missing"
    assert "the record lacks steps 2 and 5;" in lost


def test_a_sealed_file_that_has_changed_is_named_with_both_fingerprints(tmp_path: Path):
    document = {REQUEST_FILE: Request()}
    with create_run_folder(tmp_path, "m", documents=document, meta={}) as run:
        (run.path / "note.txt").write_text("one")
        run.seal("note.txt")
    assert load_run(run.path).changed_files == {}
    (run.path / "note.txt").write_text("two")

    record = load_run(run.path)

    (name,) = record.changed_files
    (fault,) = record.faults
    digests = [hashlib.sha256(text).hexdigest()[:12] for text in (b"two", b"one")]
    assert name == "note.txt"
    assert fault == (
        f"note.txt: has changed; its fingerprint is `{digests[0]}`, and the run recorded "
        f"`{digests[1]}`"
    )
