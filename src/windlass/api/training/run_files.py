"""The documents in a run folder: its plan, its prediction and its environment."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.plan import Planned
from windlass.atomic_files import storage_errors
from windlass.cost.simulator.timeline import simulate
from windlass.document import Document
from windlass.errors import RecordError
from windlass.planner.result import PlanningResult
from windlass.program.instruction import Program
from windlass.schema import run_record as names
from windlass.tracking.environment import collect_environment
from windlass.tracking.load_run import RunRecord
from windlass.tracking.run_folder import RunFolder

if TYPE_CHECKING:
    from windlass.data.token_files import TokenDataset


def run_documents(planned: Planned, programs: tuple[Program, ...]) -> dict[str, Document]:
    """The documents of a new run, by file name."""
    timeline = simulate(planned.plan, planned.graph, planned.machine, programs)
    return {
        names.REQUEST_FILE: planned.request,
        names.PLAN_FILE: planned.plan,
        names.GRAPH_FILE: planned.graph,
        names.MACHINE_FILE: planned.machine,
        names.PREDICTION_FILE: planned.prediction,
        names.PROGRAM_FILE: programs[0],
        names.PREDICTED_TIMELINE_FILE: timeline,
        names.ENVIRONMENT_FILE: collect_environment(sys.argv),
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
    result = PlanningResult(plan=plan, prediction=prediction)
    return Planned(request=request, graph=graph, machine=machine, result=result)


def replace_plan(folder: RunFolder, planned: Planned, programs: tuple[Program, ...]) -> None:
    """Gives a run another plan from this attempt on; keeps the documents of the last attempt.

    Raises:
        StorageError: the disk is full.
    """
    for name, document in run_documents(planned, programs).items():
        _keep_copy(folder.path / name, folder.attempt - 1)
        folder.save(name, document)


def _keep_copy(path: Path, attempt: int) -> None:
    folder = path.parent / names.ATTEMPTS_FOLDER / str(attempt)
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.name)
