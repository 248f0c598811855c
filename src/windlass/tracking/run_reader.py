"""Loads a run folder as one value; a missing or damaged file does not hide the rest."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast, get_args

from windlass.atomic_files import open_regular_file
from windlass.document import Document
from windlass.errors import InputErrors, RecordError, RequestError, did_you_mean
from windlass.schema import (
    CODE_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    EVALUATIONS_FOLDER,
    GRAPH_FILE,
    MACHINE_FILE,
    MEASURED_TIMELINE_FILE,
    PLAN_FILE,
    PREDICTED_TIMELINE_FILE,
    PREDICTION_FILE,
    REQUEST_FILE,
    SAMPLE_FILE,
    CodeSnapshot,
    DataManifest,
    Environment,
    Graph,
    Machine,
    Plan,
    Prediction,
    Request,
    RunState,
    Step,
    TaskScore,
    Timeline,
    fact_table_html,
)
from windlass.tracking.folder_lock import ID_FILE, LOCK_FILE, is_locked
from windlass.tracking.journal import Journal, JournalEvent
from windlass.tracking.journal_reader import read_head_and_tail, read_journal
from windlass.tracking.record_faults import (
    ChangedFile,
    changed_files,
    describe_skipped,
    first_attempt_of_plan,
    journal_faults,
)
from windlass.tracking.run_folder import (
    RUN_FORMAT,
    SHORT_ID_DIGITS,
    journal_files,
    read_run_format,
    read_run_id,
)
from windlass.tracking.step_records import read_steps
from windlass.units import format_seconds

D = TypeVar("D", bound=Document)
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunRecord:
    """The contents of a run folder."""

    id: str
    folder: Path
    state: RunState
    steps: tuple[Step, ...]
    """In order; where a later attempt repeated steps, its steps count."""
    events: tuple[JournalEvent, ...]
    """Events of all attempts, in order."""
    attempts: int
    current_plan_steps: tuple[Step, ...] = ()
    """Those of `steps` that ran under the current plan, to compare with its prediction; all steps
    unless a later attempt changed the plan."""
    steps_by_rank: tuple[tuple[Step, ...], ...] = ()
    """Steps of the last attempt by rank, as that rank measured them; from a long journal only the
    first and last ones. Empty on a single device."""
    request: Request | None = None
    plan: Plan | None = None
    graph: Graph | None = None
    machine: Machine | None = None
    prediction: Prediction | None = None
    environment: Environment | None = None
    code: CodeSnapshot | None = None
    """The code of the last attempt; None of a run of an earlier version of Windlass."""
    data: DataManifest | None = None
    predicted_timeline: Timeline | None = None
    measured_timeline: Timeline | None = None
    sample: str | None = None
    """Text that the model wrote at the end of the run; None if none was kept."""
    evaluations: tuple[TaskScore, ...] = ()
    """Scores of its checkpoints on tasks, by step, then by the name of the task."""
    faults: tuple[str, ...] = ()
    """One sentence for each file that is damaged or changed, and for steps that are lost."""
    changed_files: Mapping[str, ChangedFile] = field(default_factory=lambda: MappingProxyType({}))
    """The files, by name, whose content is not what the run wrote."""

    def __repr__(self) -> str:
        return f"<RunRecord {self.id} of {self.model}: {', '.join(self._facts().values())}>"

    def _repr_html_(self) -> str:
        return fact_table_html(f"{self.model}, run {self.id}", self._facts())

    def _facts(self) -> dict[str, str]:
        facts = {"state": self.state, "folder": str(self.folder)}
        if self.steps:
            last, count = self.steps[-1], self.meta.get("steps", "?")
            facts["steps"] = f"step {last.step} of {count}"
            facts["loss"] = f"loss {last.loss:.4f}"
        if self.prediction is not None:
            facts["predicted"] = f"{format_seconds(self.prediction.step_seconds)} a step predicted"
        return facts | {f"fault {i}": fault for i, fault in enumerate(self.faults, start=1)}

    @property
    def meta(self) -> dict[str, object]:
        """Fields of the opening events of all attempts; the last attempt wins."""
        opening = (event.fields for event in self.events if event.name == "meta")
        return {key: value for fields in opening for key, value in fields.items()}

    @property
    def parent(self) -> str | None:
        """The run that this one started from, `<end of id>@<step>`; None if it has none."""
        return describe_parent(self.meta)

    @property
    def model(self) -> str:
        """The model's name; `?` if neither request nor journal has it."""
        if self.request is not None:
            return self.request.model.name
        return str(self.meta.get("model", "?"))


def load_run(folder: Path) -> RunRecord:
    """Reads a run folder.

    Raises:
        RecordError: the folder holds no run, or one of another format.
    """
    run_id = read_run_id(folder)
    faults: list[str] = []
    files = [file for file in journal_files(folder) if file.rank == 0]
    attempts = [file.attempt for file in files]
    journals = [_journal(file.path, faults) for file in files]
    first = first_attempt_of_plan(folder)
    current = [
        journal for attempt, journal in zip(attempts, journals, strict=True) if attempt >= first
    ]
    steps = read_steps(journals)
    events = tuple(event for journal in journals for event in journal.events)
    changed = changed_files(folder, events)
    numbers = sorted({step.step for step in steps})
    faults += journal_faults(run_id, files, events, numbers, changed)
    state = run_state(folder, journals)
    steps_by_rank = _steps_by_rank(folder, attempts[-1]) if attempts else ()
    if state == "finished":
        faults += _short_records(steps_by_rank)
    return RunRecord(
        id=run_id,
        folder=folder,
        state=state,
        steps=steps,
        events=events,
        attempts=len(attempts),
        current_plan_steps=read_steps(current),
        steps_by_rank=steps_by_rank,
        request=_document(Request, folder / REQUEST_FILE, faults),
        plan=_document(Plan, folder / PLAN_FILE, faults),
        graph=_document(Graph, folder / GRAPH_FILE, faults),
        machine=_document(Machine, folder / MACHINE_FILE, faults),
        prediction=_document(Prediction, folder / PREDICTION_FILE, faults),
        environment=_document(Environment, folder / ENVIRONMENT_FILE, faults),
        code=_document(CodeSnapshot, folder / CODE_FILE, faults),
        data=_document(DataManifest, folder / DATA_FILE, faults),
        predicted_timeline=_document(Timeline, folder / PREDICTED_TIMELINE_FILE, faults),
        measured_timeline=_document(Timeline, folder / MEASURED_TIMELINE_FILE, faults),
        sample=_sample(folder / SAMPLE_FILE),
        evaluations=_evaluations(folder / EVALUATIONS_FOLDER, faults),
        faults=tuple(faults),
        changed_files=changed,
    )


def _evaluations(folder: Path, faults: list[str]) -> tuple[TaskScore, ...]:
    """The scores in a folder, whose names begin with their steps."""
    scores = (_document(TaskScore, path, faults) for path in sorted(folder.glob("*.json")))
    return tuple(score for score in scores if score is not None)


def _sample(path: Path) -> str | None:
    """The beginning of a text file; None if there is none."""
    with contextlib.suppress(OSError), open_regular_file(path) as file:
        return file.read(_SAMPLE_BYTES).decode(errors="replace")
    return None


def _steps_by_rank(folder: Path, attempt: int) -> tuple[tuple[Step, ...], ...]:
    """Steps of one attempt by rank; empty for a rank whose journal cannot be read."""
    files = {file.rank: file.path for file in journal_files(folder) if file.attempt == attempt}
    if len(files) < 2:
        return ()
    steps: dict[int, tuple[Step, ...]] = {}
    for rank, path in files.items():
        with contextlib.suppress(RecordError):
            steps[rank] = read_steps([read_head_and_tail(path)])
    return tuple(steps.get(rank, ()) for rank in range(max(files) + 1))


def _short_records(steps_by_rank: Sequence[Sequence[Step]]) -> Iterator[str]:
    """The ranks of a finished run whose record ends early, as after a disk that stayed full."""
    last = [steps[-1].step if steps else 0 for steps in steps_by_rank]
    for rank, step in enumerate(last):
        if step < last[0]:
            yield f"the record of rank {rank} ends with step {step}, that of rank 0 with {last[0]}"


def _document(cls: type[D], path: Path, faults: list[str]) -> D | None:
    """The document; None if the file is missing, and None with a fault if it is damaged."""
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
    if journal.skipped:
        faults.append(describe_skipped(path, journal.skipped))
    return journal


LAST = "last"
"""Names the newest run; `last~1` the one before it, in the words of git."""
_BEFORE_LAST = re.compile(rf"{LAST}(?:~(\d{{1,9}}))?")
_MAX_NAMES = 5


def describe_other_formats(root: Path) -> str | None:
    """One sentence on the runs under `root` that have another format; None if there are none."""
    formats = {folder: _format(folder) for folder in _folders(root)}
    others = sorted(folder.name for folder, number in formats.items() if number != RUN_FORMAT)
    if not others:
        return None
    names = ", ".join(f"`{name}`" for name in others[:_MAX_NAMES])
    names += f" and {len(others) - _MAX_NAMES} more" if len(others) > _MAX_NAMES else ""
    count = "1 run" if len(others) == 1 else f"{len(others)} runs"
    return (
        f"another version of Windlass wrote {count} in `{root}` (this one reads format "
        f"{RUN_FORMAT}): {names}; read them with that version"
    )


def find_run(root: Path, query: str) -> Path:
    """The run folder that `query` names.

    Args:
        query: a path, a folder's name, the beginning of an id or of its short end, `last`, or
            `last~2` for the second run before the last one.

    Raises:
        RecordError: no run matches, more than one does, or the one that does has another format.
    """
    if "/" in query or query in (".", ".."):
        read_run_id(Path(query))
        return Path(query)
    folders = tuple(_folders(root))
    ids = {folder: read_run_id(folder) for folder in folders if _is_readable(folder)}
    before = _BEFORE_LAST.fullmatch(query)
    if before is not None and ids:
        return _run_before_last(root, ids, int(before[1] or 0))
    exact = [folder for folder in ids if query in (folder.name, ids[folder])]
    matches = exact or [folder for folder in ids if _matches(query, folder.name, ids[folder])]
    if len(matches) == 1:
        return matches[0]
    if not matches and (Path(query) / ID_FILE).is_file():
        return Path(query)
    if not matches:
        raise _no_match(root, query, folders, ids)
    names = ", ".join(f"`{folder.name}`" for folder in sorted(matches)[-_MAX_NAMES:])
    raise RecordError(f"`{query}` means {len(matches)} runs: {names}; write more of the name")


def _run_before_last(root: Path, ids: Mapping[Path, str], count: int) -> Path:
    """The run that so many others came after."""
    if count >= len(ids):
        raise RecordError(
            f"`{LAST}~{count}` of {len(ids)} runs in `{root}`; the first one is "
            f"`{LAST}~{len(ids) - 1}`, and `windlass runs` lists them"
        )
    # Ids begin with the time of the start.
    return sorted(ids, key=lambda folder: ids[folder])[-1 - count]


def run_state(folder: Path, journals: Sequence[Journal]) -> RunState:
    """The state of a run, from its lock and the last event of its last attempt."""
    if is_locked(folder / LOCK_FILE):
        return "running"
    end = journals[-1].end if journals else None
    state = end.fields.get("state") if end else None
    return cast(RunState, state) if state in get_args(RunState) else "killed"


def describe_parent(meta: Mapping[str, object]) -> str | None:
    """The run that another one started from, `<end of id>@<step>`; None if it has none."""
    parent = meta.get("parent")
    if not isinstance(parent, Mapping):
        return None
    return f"{str(parent.get('id', '?'))[-SHORT_ID_DIGITS:]}@{parent.get('step', '?')}"


def _no_match(
    root: Path, query: str, folders: Sequence[Path], ids: Mapping[Path, str]
) -> RecordError:
    """What is wrong where no readable run matches; a run of another format may do so."""
    for folder in folders:
        if folder not in ids and (folder.name.startswith(query) or folder.name.endswith(query)):
            try:
                read_run_id(folder)
            except RecordError as error:
                return error
    if not ids:
        others = describe_other_formats(root)
        more = f" ({others})" if others else ""
        return RecordError(f"no run in `{root}`{more}; start one with `windlass train`")
    names = [name for folder in ids for name in (folder.name, ids[folder][-SHORT_ID_DIGITS:])]
    return RecordError(f"no run `{query}` in `{root}`{did_you_mean(query, (LAST, *names))}")


def _is_readable(folder: Path) -> bool:
    return _format(folder) == RUN_FORMAT


def _format(folder: Path) -> int | None:
    """The format of a run; None if its id file cannot be read."""
    try:
        return read_run_format(folder)
    except RecordError:
        return None


def _folders(root: Path) -> Iterator[Path]:
    if root.exists() and not root.is_dir():
        raise RecordError(f"`{root}` is no folder of runs")
    if root.is_dir():
        yield from (folder for folder in root.iterdir() if (folder / ID_FILE).is_file())


def _matches(query: str, name: str, run_id: str) -> bool:
    short = run_id[-SHORT_ID_DIGITS:]
    return run_id.startswith(query) or short.startswith(query) or name.startswith(query)
