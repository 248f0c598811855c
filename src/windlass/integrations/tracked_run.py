"""A run of a training loop that is not Windlass's own: `init`, `log`, `finish`."""

import atexit
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from windlass.document import Document
from windlass.errors import (
    InputErrors,
    RecordError,
    RequestError,
    StorageError,
    WindlassError,
    is_text,
    shorten,
)
from windlass.integrations.device_values import WaitingRow, record_copies
from windlass.integrations.logged_values import read_values, require_step
from windlass.integrations.portable_run import clean_text, flat_config
from windlass.integrations.rank_meeting import (
    RunPlace,
    await_place,
    distributed_rank,
    require_folder,
    share_place,
)
from windlass.record import annotate
from windlass.schema import (
    CODE_FILE,
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    REQUEST_FILE,
    ConfigValue,
    RunConfig,
    RunState,
)
from windlass.tracking import (
    ID_FILE,
    JournalWriter,
    RunFolder,
    SystemMonitor,
    collect_environment,
    create_run_folder,
    journal_path,
    reopen_run_folder,
    snapshot_code,
)

if TYPE_CHECKING:
    pass

ORIGIN = "init"
"""Field `origin` in the opening event of such runs."""
_logger = logging.getLogger("windlass")
_MAX_NAME_SETS = 60_000
"""Sets of names that one run may log; a journal numbers them with 16 bits."""


def init(
    *,
    config: object = None,
    name: str | None = None,
    group: str | None = None,
    tags: Sequence[str] = (),
    notes: str | None = None,
    root: Path | str = "runs",
    folder: Path | str | None = None,
    rank: int | None = None,
) -> "TrackedRun":
    """A run of your own training loop, recorded like every other run.

        with windlass.init(config={"optimizer": {"lr": 1e-3}}) as run:
            for step, batch in enumerate(batches, start=1):
                run.log({"loss": train(batch)}, step=step)

    Args:
        config: settings: a dict, a dataclass or a result of argparse; nested ones get dotted keys.
        name: what to call the run; None is the name of the program.
        group: a name that several runs share, such as that of a sweep.
        tags: words to find the run by.
        notes: a text about it.
        root: the folder that holds the run folders.
        folder: the run folder itself; a run in it goes on as its next attempt. None names a new
            one under `root`.
        rank: rank of this process, each of which writes a journal of its own. None is that of
            `torch.distributed`, whose ranks then all call `init` at once; without it, 0. Ranks that
            are given need a `folder`, unless only rank 0 records.

    Raises:
        RequestError: the config has no keys, or a rank cannot know where rank 0 records.
        RecordError: another process records in `folder`, or it holds something else.
        StorageError: the disk is full or closed.
    """
    in_group = distributed_rank() if rank is None else None
    rank = rank or in_group or 0
    place = None if folder is None else Path(folder)
    if rank:
        found = share_place(None) if in_group else await_place(require_folder(place, rank))
        if found is None:
            raise RecordError("rank 0 could not open the run; its own error says why")
        path = journal_path(found.folder, rank, found.attempt)
        return TrackedRun(found.folder, JournalWriter(path), None, rank)
    run: RunFolder | None = None
    try:
        name = clean_text(name or Path(sys.argv[0]).stem.strip("-") or "run")
        values = flat_config({} if config is None else config)
        with ExitStack() as undo:
            opened = _open_folder(values, name, group, Path(root), place)
            undo.callback(opened.close)
            if tags or notes:
                annotate(opened.path, tags=tags, note=notes)
            undo.pop_all()
        run = opened
    finally:
        if in_group is not None:
            share_place(RunPlace(run.path, run.attempt) if run else None)
    return TrackedRun(run.path, run.journal, run, 0)


def _open_folder(
    values: Mapping[str, ConfigValue], name: str, group: str | None, root: Path, folder: Path | None
) -> RunFolder:
    """A new run folder, or the next attempt of the run in `folder`."""
    config = RunConfig.model_validate({"values": values})
    model = values.get("model")
    meta = {
        "name": name,
        "model": model if isinstance(model, str) else name,
        "machine": socket.gethostname(),
        "origin": ORIGIN,
        **({"group": clean_text(group)} if group else {}),
    }
    program = Path(sys.argv[0]).absolute()
    code = snapshot_code(folder=program.parent if program.is_file() else None)
    documents: dict[str, Document] = {
        ENVIRONMENT_FILE: collect_environment(sys.argv, code),
        CODE_FILE: code,
    }
    if folder is None or not (folder / ID_FILE).is_file():
        documents[CONFIG_FILE] = config
        return create_run_folder(root, name, documents=documents, meta=meta, folder=folder)
    if (folder / REQUEST_FILE).exists():
        raise RecordError(
            f"`{folder}` holds a run of `windlass train`; go on with it by `windlass resume`"
        )
    run = reopen_run_folder(folder, meta=meta)
    if config.values:
        documents[CONFIG_FILE] = config
    for file, document in documents.items():
        run.save(file, document)
    run.seal(*documents)
    return run


class TrackedRun:
    """A run that this process records; `init` makes it.

    It ends with `finish`, with its `with` block, or with the process. A run whose process dies
    counts as killed, and keeps all that was logged.
    """

    def __init__(
        self, folder: Path, journal: JournalWriter, run: RunFolder | None, rank: int
    ) -> None:
        self.folder = folder
        """The run folder."""
        self.rank = rank
        """The rank that this process logs for."""
        self._journal = journal
        self._run = run
        self._process = os.getpid()
        self._step = 0
        self._names: set[tuple[str, ...]] = set()
        self._waiting: deque[WaitingRow] = deque()
        self._fault: str | None = None
        self._is_finished = False
        self._open = ExitStack()
        self._open.enter_context(SystemMonitor(journal))
        self._earlier_error = getattr(sys, "last_value", None)
        atexit.register(self._finish_at_exit)

    def log(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Records numbers of one step; it never waits for a device, and no full disk ends it.

        Tensors on a device are copied while it works, and are written once they have arrived, at a
        later call or at the end. NaN and infinite numbers are kept.

        Args:
            values: numbers of Python, numpy or torch by name; nested ones get dotted names.
            step: number of the step; None is the one after the last. One step may be logged in
                several calls.

        Raises:
            RequestError: a value is no number, or a name no text; nothing of the call is recorded.
            RecordError: the run was finished, or belongs to another process.
        """
        if self._is_finished or os.getpid() != self._process:
            raise self._closed()
        step = self._step + 1 if step is None else require_step(step)
        logged = read_values(values)
        numbers, devices = logged.numbers, logged.devices
        names = tuple(numbers)
        if logged.refused or names not in self._names:
            self._require_names(names, logged.refused)
        self._step = step
        if not devices and not self._waiting:
            self._append(step, cast(Mapping[str, float], numbers), None)
            return
        copies = record_copies(devices) if devices else ()
        self._waiting.append(WaitingRow(step, time.time(), numbers, copies))
        while self._waiting and self._waiting[0].has_arrived():
            row = self._waiting.popleft()
            self._append(row.step, row.numbers(), row.time)

    def update_config(self, config: object) -> None:
        """Adds settings to those that the run started with; of equal keys the new value counts.

        Raises:
            RequestError: the config has no keys, or this is not rank 0.
            StorageError: the disk is full or closed.
        """
        if self._run is None or self._is_finished:
            raise RequestError(
                f"rank {self.rank} cannot change the config of the run in `{self.folder}`; rank 0 "
                "does, before it finishes"
            )
        values = RunConfig.load(self.folder / CONFIG_FILE).values | flat_config(config)
        self._run.save(CONFIG_FILE, RunConfig(values=values))
        self._run.seal(CONFIG_FILE)

    def finish(self, state: RunState = "finished") -> None:
        """Writes what is left, and ends the run; finishing twice is harmless.

        Args:
            state: how it ended: `finished`, `broken` or `interrupted`.
        """
        if self._is_finished or os.getpid() != self._process:
            return
        self._is_finished = True
        atexit.unregister(self._finish_at_exit)
        self._open.close()
        try:
            self._write_waiting()
            if self._run is not None:
                self._run.end(state)
            else:
                self._journal.append_event("end", {"state": state})
                self._journal.close()
        except (RecordError, StorageError) as error:
            _logger.warning("the end of the run is not recorded: %s", error)

    def _write_waiting(self) -> None:
        """Writes the rows that devices still have to deliver; a device that failed has none."""
        try:
            while self._waiting:
                self._waiting[0].wait()
                row = self._waiting.popleft()
                self._append(row.step, row.numbers(), row.time)
        except RuntimeError as error:
            lost = len(self._waiting)
            _logger.warning("%d rows stayed on a device that failed: %s", lost, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(_state_after(error))

    def _append(self, step: int, numbers: Mapping[str, float], timestamp: float | None) -> None:
        """Writes a row; what keeps it from the disk is told once, and ends no training."""
        try:
            self._journal.append_row(step, numbers, timestamp=timestamp)
            fault = self._journal.fault
        except (RecordError, StorageError) as error:
            fault = str(error)
        if (fault is None) != (self._fault is None):
            told = (
                "has caught up" if fault is None else f"waits while the training goes on: {fault}"
            )
            _logger.warning("the record in `%s` %s", self.folder, told)
        self._fault = fault

    def _require_names(self, names: tuple[str, ...], refused: list[str]) -> None:
        """Refuses names that no journal can hold, and values that were refused before.

        Raises:
            RequestError: one thing is wrong.
            InputErrors: several things are.
        """
        refused += [
            f"the name {shorten(repr(name))} is no text; name a number by letters"
            for name in names
            if not isinstance(name, str) or not name or not is_text(name)
        ]
        if len(self._names) >= _MAX_NAME_SETS:
            refused.append(f"the run has logged {_MAX_NAME_SETS} sets of names; use fewer")
        if len(refused) == 1:
            raise RequestError(refused[0])
        if refused:
            raise InputErrors(refused)
        self._names.add(names)

    def _closed(self) -> WindlassError:
        if self._is_finished:
            return RecordError(f"the run in `{self.folder}` was finished; `init` starts another")
        return RecordError(
            f"process {os.getpid()} did not start the run in `{self.folder}`; log from process "
            f"{self._process}, or call `init` with a rank here"
        )

    def _finish_at_exit(self) -> None:
        # Python keeps an error that nobody caught there, before it calls this.
        error = getattr(sys, "last_value", None)
        self.finish(_state_after(error if error is not self._earlier_error else None))


def _state_after(error: BaseException | None) -> RunState:
    """How a run has ended that an exception left, or none."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    ended = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
    return "finished" if ended else "broken"
