"""What a further attempt at a run puts on record."""

from pathlib import Path

from windlass.schema import (
    ATTEMPTS_FOLDER,
    CODE_FILE,
    ENVIRONMENT_FILE,
    CodeSnapshot,
    CodeTree,
)
from windlass.tracking import (
    collect_environment,
    create_run_folder,
    input_fingerprints,
    load_run,
    reopen_run_folder,
)
from windlass.training.run_files import record_inputs


def test_an_attempt_on_other_code_records_it_and_keeps_the_last_one(tmp_path: Path) -> None:
    first, second = (CodeSnapshot(windlass=CodeTree(commit=name)) for name in ("1a", "2b"))
    documents = {CODE_FILE: first, ENVIRONMENT_FILE: collect_environment(["train"])}
    with create_run_folder(tmp_path, "m", documents=documents, meta={}) as run:
        folder = run.path
    before = input_fingerprints(folder)

    with reopen_run_folder(folder, meta={}) as run:
        now = {CODE_FILE: second, ENVIRONMENT_FILE: collect_environment(["resume"])}
        record_inputs(run, now)

    record, after = load_run(folder), input_fingerprints(folder)
    assert (record.code, record.faults) == (second, ())
    assert CodeSnapshot.load(folder / ATTEMPTS_FOLDER / "1" / CODE_FILE) == first
    assert [name for name in before if before[name] != after[name]] == ["code"]
    assert not (folder / ATTEMPTS_FOLDER / "1" / ENVIRONMENT_FILE).exists()


def test_a_run_of_an_earlier_version_gets_its_inputs_with_its_next_attempt(tmp_path: Path) -> None:
    with create_run_folder(tmp_path, "m", documents={}, meta={}) as run:
        folder = run.path
    code = CodeSnapshot(windlass=CodeTree(commit="1a"))
    with reopen_run_folder(folder, meta={}) as run:
        record_inputs(run, {CODE_FILE: code})
    assert (load_run(folder).code, load_run(folder).faults) == (code, ())
    assert not (folder / ATTEMPTS_FOLDER).exists()
