"""The Python functions that run training: what they yield, how runs end, what they refuse."""

import hashlib
import os
import resource
import shutil
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

import windlass
from command_line import TINY
from windlass.atomic_files import hash_file
from windlass.document import Document
from windlass.errors import (
    InputErrors,
    MachineError,
    PlanError,
    RecordError,
    RequestError,
    RunBroken,
    RunFinished,
    StorageError,
)
from windlass.inference.text_samples import write_sample
from windlass.program.memory.disk_usage import disk_usage
from windlass.schema import run_record as names
from windlass.schema.plan import Plan
from windlass.schema.request import Request
from windlass.schema.run_record import Step
from windlass.tracking.journal import HEAD, HEADER_BYTES, ROW
from windlass.tracking.run_folder import create_run_folder, reopen_run_folder
from windlass.training.disk_check import disk_usage_bytes

MODEL, *OVERRIDES = TINY


def started(home: Path, *overrides: str) -> windlass.Run:
    """A tiny run that is ready to go."""
    words = (*OVERRIDES, f"data.source={home / 'text'}", "train.steps=6", *overrides)
    return windlass.train(MODEL, *words, root=home / "runs")


def replace_document(folder: Path, name: str, document: Document) -> None:
    """Replaces a document of a run as another attempt would."""
    with reopen_run_folder(folder, meta={}) as run:
        run.save(name, document)
        run.seal(name)


def numbers(run: windlass.Run) -> list[tuple[int, float, float]]:
    return [(s.step, s.loss, s.gradient_norm) for s in windlass.load(run.folder).steps]


def test_a_run_yields_the_steps_that_its_record_holds(home: Path) -> None:
    run = started(home)

    steps = list(run)

    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    record = windlass.load(run.folder)
    assert record.state == "finished"
    assert [step.loss for step in record.steps] == [step.loss for step in steps]
    assert [found.id for found in windlass.runs(root=home / "runs")] == [record.id]
    assert windlass.load(run.short_id, root=home / "runs").id == record.id
    assert windlass.report(run.folder).read_text().startswith("<!DOCTYPE html>")
    assert "".join(windlass.sample(run.folder, "3 times ", tokens=5))


def test_the_page_of_a_run_has_a_sample_where_it_costs_little(home: Path) -> None:
    run = started(home)
    list(run)

    write_sample(run)
    assert windlass.load(run.folder).sample is None

    request = run.planned.request
    longer = request.model_copy(
        update={"train": request.train.model_copy(update={"steps": 100_000})}
    )
    run.planned = replace(run.planned, request=longer)
    write_sample(run)
    assert windlass.load(run.folder).sample


def test_a_run_abandoned_midway_is_interrupted_and_resumes_to_the_same_numbers(home: Path) -> None:
    whole, left = started(home, "train.save_every=2"), started(home, "train.save_every=2")
    list(whole)
    steps = iter(left)
    for step in steps:
        if step.step == 3:
            break
    del steps

    assert windlass.load(left.folder).state == "interrupted"
    resumed = windlass.resume(left.folder, root=home / "runs")
    list(resumed)

    assert resumed.done == 2
    assert windlass.load(left.folder).state == "finished"
    assert numbers(left) == numbers(whole)


def test_a_requested_stop_is_reported_and_the_run_can_be_resumed(home: Path) -> None:
    run = started(home)
    planned = run.planned
    list(run)
    stopped = windlass.train(planned, root=home / "runs", stop=lambda: True)

    with pytest.raises(windlass.WindlassError, match="stopped"):
        list(stopped)

    assert windlass.load(stopped.folder).state == "interrupted"
    assert len(list(windlass.resume(stopped.folder, root=home / "runs"))) == 6


def test_a_run_is_iterated_over_once(home: Path) -> None:
    run = started(home)
    list(run)
    with pytest.raises(RecordError, match="iterated over before"):
        list(run)


def test_a_finished_run_cannot_be_resumed(home: Path) -> None:
    run = started(home)
    list(run)
    with pytest.raises(RecordError, match="has finished all its 6 steps"):
        windlass.resume(run.folder)


def test_another_machine_can_be_planned_for_and_not_trained_on(home: Path) -> None:
    with pytest.raises(MachineError, match="not this one"):
        started(home, "machine=a100-80gb")
    assert not (home / "runs").exists()


def test_a_tokenizer_with_more_entries_than_the_model_is_refused(home: Path) -> None:
    with pytest.raises(PlanError, match=r"300 entries, .* only 257; raise `model.vocabulary`"):
        started(home, "data.tokenizer=bpe", "data.vocabulary=300")
    assert not (home / "runs").exists()


def test_a_run_that_would_fill_the_disk_is_refused_before_anything_is_written(
    home: Path,
) -> None:
    often = ("train.steps=1000000000", "train.save_every=1", "train.keep=1000000000")
    with pytest.raises(StorageError, match="are free: 1000000000 checkpoints of") as refused:
        windlass.train(MODEL, *OVERRIDES, *often, root=home / "runs")
    for way in ("`train.keep=1` takes", "`train.save_every=1000000000` takes", "`--folder`"):
        assert way in str(refused.value)
    assert not (home / "runs").exists()


def test_resuming_is_refused_if_the_disk_lacks_space_for_the_rest(home: Path) -> None:
    run = started(home, "train.save_every=2")
    next(iter(run))
    path = run.folder / names.REQUEST_FILE
    request = Request.load(path)
    many = {"steps": 10**9, "save_every": 1, "keep": 10**9}
    many_steps = request.model_copy(update={"train": request.train.model_copy(update=many)})
    replace_document(run.folder, names.REQUEST_FILE, many_steps)

    with pytest.raises(StorageError, match=r"resuming takes .* more, or move the folder"):
        windlass.resume(run.folder)

    assert windlass.load(run.folder).attempts == 2


def test_resuming_counts_the_space_of_existing_checkpoints(home: Path) -> None:
    run = started(home, "train.save_every=2", "train.keep=1")
    for step in run:
        if step.step == 4:
            break
    planned, folder = run.planned, run.folder
    present = disk_usage_bytes(folder / names.CHECKPOINT_FOLDER)
    whole = disk_usage(planned.plan, planned.graph, planned.request.train)
    rest = disk_usage(
        planned.plan, planned.graph, planned.request.train, steps_done=4, checkpoints_present=1
    )
    # One of 3 saves remains, beside the existing one: as many as exist at once with `keep` = 1.
    assert rest.needed_bytes == whole.needed_bytes == 2 * whole.checkpoint_bytes
    assert whole.checkpoint_bytes <= present <= 1.2 * whole.checkpoint_bytes


def test_a_file_with_two_hard_links_counts_once(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "one").write_bytes(bytes(8192))
    os.link(tmp_path / "one", tmp_path / "deep" / "two")
    alone = (tmp_path / "one").stat().st_blocks * 512
    assert disk_usage_bytes(tmp_path, tmp_path / "deep", tmp_path / "none") == alone


@pytest.mark.usefixtures("home")
def test_overrides_beside_a_complete_request_are_refused_and_not_ignored() -> None:
    request = windlass.make_request(MODEL, *OVERRIDES)
    with pytest.raises(RequestError, match="takes no overrides"):
        windlass.plan(request, "train.batch=8")
    with pytest.raises(RequestError, match="takes no overrides"):
        windlass.train(windlass.plan(request), "train.batch=8")


def test_a_run_whose_text_has_changed_cannot_be_resumed(home: Path) -> None:
    run = started(home, "train.save_every=2")
    next(iter(run))
    (home / "text" / "four.txt").write_text("more " * 200)
    with pytest.raises(RecordError, match="has changed"):
        windlass.resume(run.folder)


def test_an_invalid_plan_is_refused_before_a_step(home: Path) -> None:
    run = started(home, "train.save_every=2")
    next(iter(run))
    path = run.folder / names.PLAN_FILE
    plan = Plan.load(path)
    batch = plan.batch.model_copy(update={"accumulation": 3})
    replace_document(run.folder, names.PLAN_FILE, plan.model_copy(update={"batch": batch}))

    with pytest.raises(InputErrors, match=r"but `train.batch` is 4"):
        windlass.resume(run.folder)

    assert windlass.load(run.folder).attempts == 2


def test_a_split_backward_of_compiled_layers_is_refused_before_a_step(home: Path) -> None:
    run = started(home, "train.save_every=2")
    next(iter(run))
    path = run.folder / names.PLAN_FILE
    plan = Plan.load(path)
    parallel = plan.parallel.model_copy(update={"schedule": "zero-bubble"})
    split = plan.model_copy(update={"parallel": parallel, "compile": True})
    replace_document(run.folder, names.PLAN_FILE, split)

    with pytest.raises(InputErrors, match=r"`parallel.schedule` = zero-bubble with `compile`"):
        windlass.resume(run.folder)

    assert windlass.load(run.folder).attempts == 2


@pytest.fixture
def stopped(home: Path) -> Path:
    """The folder of a run that was stopped after 3 of its 6 steps, with a checkpoint of 2."""
    run = started(home, "train.save_every=2")
    next(step for step in run if step.step == 3)
    return run.folder


def test_a_run_with_a_changed_digit_is_not_resumed_and_the_message_has_both_fingerprints(
    stopped: Path,
) -> None:
    documents = (
        names.REQUEST_FILE, names.PLAN_FILE, names.GRAPH_FILE, names.MACHINE_FILE,
        names.PREDICTION_FILE,
    )  # fmt: skip
    for name in documents:
        content = (stopped / name).read_text()
        digit = next(i for i in range(len(content) // 2, len(content)) if content[i].isdigit())
        other = str((int(content[digit]) + 1) % 10)
        (stopped / name).write_text(content[:digit] + other + content[digit + 1 :])
        prints = (hash_file(stopped / name), hashlib.sha256(content.encode()).hexdigest())
        shown = rf"`{name}` \(its fingerprint is `{prints[0][:12]}`, .* `{prints[1][:12]}`\) has"
        with pytest.raises(RecordError, match=shown):
            windlass.resume(stopped)
        assert any(fault.startswith(f"{name}: ") for fault in windlass.load(stopped).faults)
        (stopped / name).write_text(content)
    path = stopped / names.TOKENIZER_FILE
    path.write_text(path.read_text() + " ")
    with pytest.raises(RecordError, match=r"tokenizer.json"):
        list(windlass.sample(stopped, "3 times", tokens=1))
    assert windlass.load(stopped).attempts == 1


def test_a_request_with_a_changed_digit_is_not_replanned_either(stopped: Path) -> None:
    path = stopped / names.REQUEST_FILE
    path.write_text(path.read_text().replace("steps = 6", "steps = 7"))
    with pytest.raises(RecordError, match=r"`request.toml` \(its fingerprint is"):
        windlass.resume(stopped, "batch.micro=4")


def test_a_plan_whose_replacement_was_killed_halfway_is_restored(stopped: Path) -> None:
    kept = stopped / names.ATTEMPTS_FOLDER / "1"
    kept.mkdir(parents=True)
    for name in (names.REQUEST_FILE, names.PLAN_FILE):
        shutil.copyfile(stopped / name, kept / name)
    before = (stopped / names.PLAN_FILE).read_bytes()
    (stopped / names.PLAN_FILE).write_text("half of another plan")

    assert [step.step for step in windlass.resume(stopped)] == [3, 4, 5, 6]
    assert (stopped / names.PLAN_FILE).read_bytes() == before


def test_a_changed_degree_frees_the_pins_of_the_run_that_depend_on_it_and_says_so(
    home: Path,
) -> None:
    pins = ("sharding.parameters=2", "sharding.optimizer=2", "batch.accumulation=1")
    run = started(home, "parallel.data=2", *pins)
    run._run_folder.close()  # as if it had been killed before its first step

    resumed = windlass.resume(run.folder, "parallel.data=1", "batch.micro=4")

    assert resumed.planned.plan.parallel.devices == 1
    assert not resumed.planned.plan.sharding.parameters > 1
    said = [note for note in resumed.notes if note.endswith("and is left open now")]
    assert [note.split("`")[1] for note in said] == ["sharding.parameters", "sharding.optimizer"]
    assert "`sharding.parameters` = 2 of the run does not go with `parallel.data` = 1" in said[0]
    assert resumed.planned.request.batch.accumulation == 1


def test_a_changed_program_environment_or_tokenizer_is_refused_by_resume(stopped: Path) -> None:
    for name in (names.PROGRAM_FILE, names.ENVIRONMENT_FILE, names.TOKENIZER_FILE):
        before = (stopped / name).read_bytes()
        (stopped / name).write_bytes(before + b" ")
        with pytest.raises(RecordError, match=rf"`{name}` .* has changed since run"):
            windlass.resume(stopped)
        (stopped / name).write_bytes(before)


def test_resume_names_the_command_that_trains_for_more_steps(stopped: Path) -> None:
    with pytest.raises(RequestError, match=r"`windlass train --from \S+ --continue train.steps=9"):
        windlass.resume(stopped, "train.steps=9")


def test_a_run_of_a_loop_of_ones_own_is_called_that_by_resume(tmp_path: Path) -> None:
    with windlass.init(folder=tmp_path / "own") as own:
        own.log({"loss": 1.0})
    with pytest.raises(RecordError, match=r"record of a loop of your own, .*start its own program"):
        windlass.resume(own.folder)


def test_a_journal_that_was_cut_between_two_records_is_behind_the_checkpoint(stopped: Path) -> None:
    journal = stopped / names.JOURNAL_FOLDER / "0.1.j"
    content, ends = journal.read_bytes(), []
    offset = 0
    while offset < len(content):
        kind, _, size = HEAD.unpack_from(content, offset)
        ends += [offset] if kind == ROW else []
        offset += HEADER_BYTES + size
    journal.write_bytes(content[: ends[1]])  # the first step, and whatever is behind it

    resumed = windlass.resume(stopped)

    (note,) = (note for note in resumed.notes if "newest checkpoint" in note)
    assert "is of step 2 and the record ends with step 1, so that `journal` was cut" in note
    assert [step.step for step in resumed] == [3, 4, 5, 6]


def test_a_run_that_was_killed_behind_its_last_checkpoint_has_finished(home: Path) -> None:
    run = started(home)
    list(run)
    journal = run.folder / names.JOURNAL_FOLDER / "0.1.j"
    content = journal.read_bytes()
    journal.write_bytes(content[: content.rindex(b'{"event":"end"') - HEADER_BYTES])
    assert windlass.load(run.folder).state == "killed"
    with pytest.raises(RunFinished, match="has finished all its 6 steps"):
        windlass.resume(run.folder)
    assert windlass.load(run.folder).state == "finished"


def test_a_run_whose_folder_is_deleted_stops_and_says_so(home: Path) -> None:
    run = started(home, "train.save_every=2")
    steps = iter(run)
    next(step for step in steps if step.step == 3)
    # At once, since a checkpoint that is being written may change the folder under `rmtree`.
    shutil.rmtree(run.folder.rename(home / "deleted"))
    with pytest.raises(RecordError, match=r"was deleted or moved while the run was going on"):
        next(steps)
    assert not run.folder.exists()


def test_the_text_is_said_to_have_changed_only_if_it_has(stopped: Path) -> None:
    with reopen_run_folder(stopped, meta={"tokens": "0123456789ab"}):
        pass
    with pytest.raises(RecordError, match=r"is the same as when .* gives other tokens now"):
        windlass.resume(stopped)
    for path in (stopped / names.JOURNAL_FOLDER).iterdir():
        path.write_bytes(path.read_bytes().replace(b'"tokens"', b'"tokenS"'))
    with pytest.raises(RecordError, match=r"journal of run .* has lost which text"):
        windlass.resume(stopped)


def test_a_run_is_not_trained_into_a_folder_of_runs_or_of_anything_else(home: Path) -> None:
    run = started(home)
    list(run)
    with pytest.raises(RecordError, match=rf"holds 1 run, such as `{run.folder.name}`"):
        windlass.train(run.planned, folder=home / "runs")
    with pytest.raises(RecordError, match=r"is not empty: it holds `one` and 2 more"):
        windlass.train(run.planned, folder=home / "text")
    assert not (home / "text" / ".lock").exists()


def test_the_error_that_ends_a_run_is_told_even_if_it_cannot_be_recorded(home: Path) -> None:
    planned = windlass.plan(MODEL, *OVERRIDES)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fails_on_a_full_disk() -> Generator[Step]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
        raise RunBroken("the loss is not finite")
        yield

    folder = create_run_folder(home / "runs", "broken", documents={}, meta={})
    try:
        with pytest.raises(RunBroken, match="the loss is not finite"):
            list(windlass.Run(planned, folder, fails_on_a_full_disk))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_model_that_calls_exit_in_a_run_breaks_it(home: Path) -> None:
    def exits() -> Generator[Step]:
        raise SystemExit
        yield

    folder = create_run_folder(home / "runs", "exits", documents={}, meta={})
    with pytest.raises(RunBroken, match="code of the model `gpt-tiny` called exit"):
        list(windlass.Run(windlass.plan(MODEL, *OVERRIDES), folder, exits))
