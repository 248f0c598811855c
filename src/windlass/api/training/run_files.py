"""The documents in a run folder: its plan, its prediction and its environment."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.plan import Planned
from windlass.atomic_files import storage_errors
from windlass.cost import simulate
from windlass.document import Document
from windlass.errors import RecordError
from windlass.planner import PlanningResult, resolve_defaults
from windlass.program import Program
from windlass.schema import (
    ATTEMPTS_FOLDER,
    ENVIRONMENT_FILE,
    GRAPH_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    PREDICTED_TIMELINE_FILE,
    PREDICTION_FILE,
    PROGRAM_FILE,
    REQUEST_FILE,
)
from windlass.tracking import RunFolder, RunRecord, collect_environment

if TYPE_CHECKING:
    from windlass.data import TokenDataset


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
        ENVIRONMENT_FILE: collect_environment(sys.argv),
    }


def run_metadata(planned: Planned, tokens: "TokenDataset") -> dict[str, object]:
    """What lists and pages show of a run without reading its documents."""
    return {
        "model": planned.request.model.name,
        "machine": planned.machine.name,
        "steps": planned.request.train.steps,
        "predicted_seconds": planned.prediction.step_seconds,
        "unigram_entropy": tokens.meta.held_out_unigram_nats,
        "unigram_bits_per_byte": tokens.meta.held_out_unigram_bits_per_byte,
        "tokens": tokens.fingerprint,
    }


def planned_from_record(record: RunRecord) -> Planned:
    """What a run was made from, read from its documents.

    Raises:
        RecordError: a document is missing or cannot be read.
    """
    request, graph, machine, plan, prediction = (
        record.request, record.graph, record.machine, record.plan, record.prediction,
    )  # fmt: skip
    if not (request and graph and machine and plan and prediction):
        why = "; ".join(record.faults) or "files are missing"
        raise RecordError(f"run `{record.folder.name}` cannot be resumed: {why}")
    # A folder of an earlier version does not hold the sequence, which its plan does.
    train = request.train.model_copy(update={"sequence": plan.batch.sequence})
    resolved, _ = resolve_defaults(request.model_copy(update={"train": train}), graph, machine)
    result = PlanningResult(plan=plan, prediction=prediction)
    return Planned(request=resolved, graph=graph, machine=machine, result=result)


def replace_plan(folder: RunFolder, planned: Planned, programs: tuple[Program, ...]) -> None:
    """Gives a run another plan from this attempt on; keeps the documents of the last attempt.

    Raises:
        StorageError: the disk is full.
    """
    for name, document in run_documents(planned, programs).items():
        _keep_copy(folder.path / name, folder.attempt - 1)
        folder.save(name, document)


def _keep_copy(path: Path, attempt: int) -> None:
    folder = path.parent / ATTEMPTS_FOLDER / str(attempt)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.name)
