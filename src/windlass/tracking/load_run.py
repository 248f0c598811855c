"""A run as one value, read from its folder; what is missing or damaged does not hide the rest."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from windlass.document import Document
from windlass.errors import InputErrors, RecordError, RequestError
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction, Timeline
from windlass.schema.request import Request
from windlass.schema.run_record import (
    ATTEMPTS_FOLDER,
    ENVIRONMENT_FILE,
    GRAPH_FILE,
    MACHINE_FILE,
    MEASURED_TIMELINE_FILE,
    PLAN_FILE,
    PREDICTED_TIMELINE_FILE,
    PREDICTION_FILE,
    REQUEST_FILE,
    Environment,
    RunState,
    Step,
)
from windlass.tracking.journal import Journal, JournalEvent, read_head_and_tail, read_journal
from windlass.tracking.run_folder import journal_files, journal_path, read_run_id
from windlass.tracking.run_index import run_state
from windlass.tracking.step_records import read_steps

D = TypeVar("D", bound=Document)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """All that a run folder tells."""

    id: str
    folder: Path
    state: RunState
    steps: tuple[Step, ...]
    """In order; steps that a later attempt did again stand as it did them."""
    events: tuple[JournalEvent, ...]
    """Of all attempts, in order."""
    attempts: int
    current_plan_steps: tuple[Step, ...] = ()
    """Those of `steps` that the plan at hand has run: what its prediction is held against. All of
    them, unless an attempt went on under another plan."""
    steps_by_rank: tuple[tuple[Step, ...], ...] = ()
    """As each device of several told its steps in the last attempt: the first and the last ones of
    a long journal. Empty where there is one device."""
    request: Request | None = None
    plan: Plan | None = None
    graph: Graph | None = None
    machine: Machine | None = None
    prediction: Prediction | None = None
    environment: Environment | None = None
    predicted_timeline: Timeline | None = None
    measured_timeline: Timeline | None = None
    faults: tuple[str, ...] = ()
    """What could not be read, one sentence each."""

    @property
    def meta(self) -> dict[str, object]:
        """The opening fields of all attempts, the last wins."""
        opening = (event.fields for event in self.events if event.name == "meta")
        return {key: value for fields in opening for key, value in fields.items()}

    @property
    def model(self) -> str:
        """The model's name; `?` if nothing tells it."""
        if self.request is not None:
            return self.request.model.name
        return str(self.meta.get("model", "?"))


def load_run(folder: Path) -> RunRecord:
    """Reads a run folder.

    Raises:
        RecordError: the folder holds no run.
    """
    run_id = read_run_id(folder)
    faults: list[str] = []
    attempts = [attempt for rank, attempt in journal_files(folder) if rank == 0]
    journals = [_journal(journal_path(folder, 0, attempt), faults) for attempt in attempts]
    since = _planned_since(folder)
    current = [j for at, j in zip(attempts, journals, strict=True) if at >= since]
    return RunRecord(
        id=run_id,
        folder=folder,
        state=run_state(folder, journals),
        steps=read_steps(journals),
        events=tuple(event for journal in journals for event in journal.events),
        attempts=len(attempts),
        current_plan_steps=read_steps(current),
        steps_by_rank=_devices(folder, attempts[-1]) if attempts else (),
        request=_document(Request, folder / REQUEST_FILE, faults),
        plan=_document(Plan, folder / PLAN_FILE, faults),
        graph=_document(Graph, folder / GRAPH_FILE, faults),
        machine=_document(Machine, folder / MACHINE_FILE, faults),
        prediction=_document(Prediction, folder / PREDICTION_FILE, faults),
        environment=_document(Environment, folder / ENVIRONMENT_FILE, faults),
        predicted_timeline=_document(Timeline, folder / PREDICTED_TIMELINE_FILE, faults),
        measured_timeline=_document(Timeline, folder / MEASURED_TIMELINE_FILE, faults),
        faults=tuple(faults),
    )


def _planned_since(folder: Path) -> int:
    """The first attempt under the plan at hand."""
    with contextlib.suppress(OSError):
        earlier = [each.name for each in (folder / ATTEMPTS_FOLDER).iterdir()]
        return 1 + max((int(name) for name in earlier if name.isdigit()), default=0)
    return 1


def _devices(folder: Path, attempt: int) -> tuple[tuple[Step, ...], ...]:
    """What each device told of an attempt; of one that told nothing that can be read, nothing."""
    ranks = [rank for rank, at in journal_files(folder) if at == attempt]
    if len(ranks) < 2:
        return ()
    found: dict[int, tuple[Step, ...]] = {}
    for rank in ranks:
        with contextlib.suppress(RecordError):
            found[rank] = read_steps([read_head_and_tail(journal_path(folder, rank, attempt))])
    return tuple(found.get(rank, ()) for rank in range(max(ranks) + 1))


def _document(cls: type[D], path: Path, faults: list[str]) -> D | None:
    """The document, or None with a fault if it is damaged; a missing file is no fault."""
    if not path.exists():
        return None
    try:
        return cls.load(path)
    except (RequestError, InputErrors) as error:
        faults.append(f"{path.name}: {str(error).splitlines()[0]}")
        return None


def _journal(path: Path, faults: list[str]) -> Journal:
    try:
        journal = read_journal(path)
    except RecordError as error:
        faults.append(str(error))
        return Journal()
    if journal.unread_bytes:
        faults.append(
            f"{path.parent.name}/{path.name}: {journal.unread_bytes} bytes after byte "
            f"{journal.read_bytes} are torn or damaged and left unread"
        )
    return journal
