"""The documents in a run folder: its plan, its prediction and its environment."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.atomic_files import atomic_write, hash_file, storage_errors
from windlass.cost import simulate
from windlass.document import Document
from windlass.errors import InputErrors, RecordError, RequestError
from windlass.jobs import Planned
from windlass.planner import PlanningResult, resolve_defaults
from windlass.program import Program
from windlass.schema import (
    ATTEMPTS_FOLDER,
    CODE_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    GRAPH_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    PREDICTED_TIMELINE_FILE,
    PREDICTION_FILE,
    PROGRAM_FILE,
    REQUEST_FILE,
)
from windlass.tracking import (
    RunFolder,
    RunRecord,
    collect_environment,
    make_data_manifest,
    snapshot_code,
)
from windlass.training.inputs.run_data import with_saved_config

if TYPE_CHECKING:
    from windlass.data import ExampleDataset, TokenDataset

IMPORTED = "imported"
"""Key of a run's metadata with the folder that its weights were imported from."""
_PLANNED_FILES = (REQUEST_FILE, GRAPH_FILE, MACHINE_FILE, PLAN_FILE, PREDICTION_FILE)
"""What the next attempt at a run is made from, if its plan stays."""


def run_documents(planned: Planned, programs: tuple[Program, ...]) -> dict[str, Document]:
    """The documents of a new run, by file name."""
    timeline = simulate(planned.plan, planned.graph, planned.machine, programs)
    return {
        REQUEST_FILE: planned.request,
        PLAN_FILE: planned.plan,
        GRAPH_FILE: planned.graph,
        MACHINE_FILE: planned.machine,
        PREDICTION_FILE: planned.prediction,
        PROGRAM_FILE: programs[0],
        PREDICTED_TIMELINE_FILE: timeline,
    }


def input_documents(
    planned: Planned, tokens: "TokenDataset | ExampleDataset"
) -> dict[str, Document]:
    """The inputs of an attempt that no plan names: its environment, code and data."""
    file, colon, _ = planned.request.model.name.partition(".py:")
    code = snapshot_code(Path(f"{file}.py") if colon else None)
    return {
        ENVIRONMENT_FILE: collect_environment(sys.argv, code),
        CODE_FILE: code,
        DATA_FILE: make_data_manifest(tokens, planned.request.data.sources),
    }


def record_inputs(folder: RunFolder, documents: Mapping[str, Document]) -> None:
    """Puts the inputs of a further attempt on record, as far as they differ from the last one's.

    What they replace is kept with the files of that attempt.
    """
    changed = []
    for name, document in documents.items():
        path = folder.path / name
        if path.exists():
            with suppress(RequestError, InputErrors):
                if type(document).load(path).fingerprint() == document.fingerprint():
                    continue
            _keep_copy(path, folder.attempt - 1)
        folder.save(name, document)
        changed.append(name)
    if changed:
        folder.seal(*changed)


def run_metadata(planned: Planned, tokens: "TokenDataset | ExampleDataset") -> dict[str, object]:
    """What lists and pages show of a run without reading its documents."""
    return {
        "model": planned.request.model.name,
        "machine": planned.machine.name,
        "steps": planned.request.train.steps,
        "predicted_seconds": planned.prediction.step_seconds,
        "predicted_interval": [planned.prediction.low_seconds, planned.prediction.high_seconds],
        "tokens": tokens.fingerprint,
        "objects": planned.objects.names,
        **_text_metadata(tokens),
    }


def _text_metadata(tokens: "TokenDataset | ExampleDataset") -> dict[str, object]:
    """The loss of a model that knows only the frequencies of tokens; nothing of examples."""
    from windlass.data import ExampleDataset

    if isinstance(tokens, ExampleDataset):
        return {}
    return {
        "unigram_entropy": tokens.meta.held_out_unigram_nats,
        "unigram_bits_per_byte": tokens.meta.held_out_unigram_bits_per_byte,
    }


def require_unchanged(record: RunRecord, *names: str) -> None:
    """Refuses a run some of whose files are not as the run wrote them.

    Raises:
        RecordError: at least one has changed; the message has both fingerprints of each.
    """
    changed = [name for name in names if name in record.changed_files]
    if not changed:
        return
    run = shlex.quote(str(record.folder))
    what = " and ".join(f"`{name}` ({record.changed_files[name]})" for name in changed)
    have, them = ("have", "them") if len(changed) > 1 else ("has", "it")
    raise RecordError(
        f"{what} {have} changed since run `{record.folder.name}` wrote {them}; restore {them}, "
        f"then change the run on purpose with `windlass resume {run} key=value`, or start another "
        f"one with `windlass train --from {run} key=value`"
    )


def refuse_other_runs(record: RunRecord) -> None:
    """Refuses to train on from a run that no `windlass train` has made.

    Raises:
        RecordError: it is weights alone, without any optimizer state, or the record of a loop that
            is not Windlass's own.
    """
    origin = record.meta.get("origin")
    if origin is not None and record.request is None:
        what = "a loop of your own" if origin == "init" else f"`{origin}`"
        raise RecordError(
            f"run `{record.folder.name}` is the record of {what}, whose model and state Windlass "
            "does not have; start its own program again, which goes on with the record by "
            f"`windlass.init(folder={str(record.folder)!r})`"
        )
    folder = record.meta.get(IMPORTED)
    if folder is not None:
        is_adapter = record.request is not None and record.request.lora is not None
        what = f"--from {folder}" if is_adapter else f"hf:{folder}"
        raise RecordError(
            f"run `{record.folder.name}` has imported weights and no step to go on from; train "
            f"them by `windlass train {what}`"
        )


def planned_from_record(record: RunRecord) -> Planned:
    """What a run was made from, read from its documents.

    Raises:
        RecordError: a document is missing, has changed or cannot be read.
    """
    require_unchanged(record, *_PLANNED_FILES)
    request, graph, machine, plan, prediction = (
        record.request, record.graph, record.machine, record.plan, record.prediction,
    )  # fmt: skip
    if not (request and graph and machine and plan and prediction):
        why = "; ".join(record.faults) or "files are missing"
        raise RecordError(f"run `{record.folder.name}` cannot be resumed: {why}")
    # A folder of an earlier version does not hold the sequence, which its plan does.
    request = with_saved_config(request, record.folder)
    train = request.train.model_copy(update={"sequence": plan.batch.sequence})
    resolved, _ = resolve_defaults(request.model_copy(update={"train": train}), graph, machine)
    result = PlanningResult(plan=plan, prediction=prediction)
    return Planned(request=resolved, graph=graph, machine=machine, result=result)


def replace_plan(folder: RunFolder, planned: Planned, programs: tuple[Program, ...]) -> None:
    """Gives a run another plan from this attempt on; keeps the documents of the last attempt."""
    documents = run_documents(planned, programs)
    for name, document in documents.items():
        _keep_copy(folder.path / name, folder.attempt - 1)
        folder.save(name, document)
    # Sealed together, after all of them: `restore_replaced_plan` undoes part of them.
    folder.seal(*documents)


def restore_replaced_plan(record: RunRecord) -> tuple[str, ...]:
    """Restores the documents that `replace_plan` had replaced when it was killed.

    They differ from what the journal recorded last, and the copies that it kept do not.

    Returns:
        The names of the restored files.
    """
    copies = [path for path in (record.folder / ATTEMPTS_FOLDER).glob("*") if path.name.isdigit()]
    if record.state == "running" or not copies:
        return ()
    newest = max(copies, key=lambda path: int(path.name))
    restorable = [
        name
        for name, changed in record.changed_files.items()
        if (newest / name).is_file() and hash_file(newest / name) == changed.recorded
    ]
    for name in restorable:
        atomic_write(record.folder / name, (newest / name).read_bytes())
    return tuple(restorable)


def _keep_copy(path: Path, attempt: int) -> None:
    folder = path.parent / ATTEMPTS_FOLDER / str(attempt)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.name)
