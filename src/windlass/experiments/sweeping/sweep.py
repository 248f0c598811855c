"""`sweep` searches settings with many runs, which share this machine or go through Slurm."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from windlass.child_processes import module_command
from windlass.document import leaf_fields
from windlass.errors import InputErrors, RequestError, WindlassError
from windlass.experiments.sweeping.trial_plan import measured_machine, plan_trial
from windlass.hardware import core_count
from windlass.jobs import Progress
from windlass.record import RUNS
from windlass.schema import Machine, Request
from windlass.sweep import (
    Driver,
    SweepFolder,
    SweepRequest,
    SweepStatus,
    Trial,
    Workplace,
    best_trials,
    end_points,
    grid_points,
    importance,
    is_range_or_choices,
    make_jobs,
    most_jobs,
    read_trials,
)

_TRIAL_MODULE = "windlass.experiments.sweeping.trial_process"
"""Run by name and not imported, as it imports what trains."""
_DIGITS = 6
"""Digits of a fingerprint that tell sweeps of one model apart."""
_MOST_GRID = 100
"""Points up to which a search of finitely many is a grid unless another sampler is named."""


class SweepSettings(TypedDict, total=False):
    """What a sweep may be told beside its request and its space; see `SweepRequest`."""

    name: str | None
    objectives: tuple[str, ...]
    sampler: str | None
    pruner: str | None
    prune_from: int | None
    prune_every: int | None
    trials: int | None
    seed: int | None
    jobs: int | None
    executor: str | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Sweep:
    """A sweep as far as it has come."""

    request: SweepRequest
    folder: Path
    """Its files; the runs are in the folder with the runs, as group `request.name`."""
    trials: tuple[Trial, ...]
    """By number."""

    def __repr__(self) -> str:
        done = sum(trial.is_done for trial in self.trials)
        return f"<Sweep {self.request.name}: {done} of {self.request.total} trials>"

    @property
    def best(self) -> tuple[Trial, ...]:
        """The best trial; with several objectives all that no other beats in each of them."""
        return best_trials(self.request, self.trials)

    @property
    def importance(self) -> Mapping[str, float]:
        """How much of the spread of the first objective each key explains, 0 to 1."""
        return importance(self.request, self.trials)


def make_sweep_request(
    what: str | Path | None = None, *overrides: str, **settings: Unpack[SweepSettings]
) -> SweepRequest:
    """What a sweep searches, from a file or a command line; the same words give the same name.

    Args:
        what: a model's name, or the `.toml` file of a sweep; None means `gpt-tiny`.
        overrides: `key=value` of the request, or `key=RANGE` and `key=CHOICE,CHOICE` of the space;
            the last part of a key is enough where only one has it.
        **settings: fields of `SweepRequest`; None leaves one out.

    Raises:
        RequestError: the file cannot be read.
        InputErrors: everything that is wrong with keys, ranges and settings.
    """
    file = Path(what) if what is not None and str(what).endswith(".toml") else None
    words = [f"request.model.name={_word(str(what))}"] if what is not None and file is None else []
    words += [_placed(override) for override in overrides]
    given = {key: value for key, value in settings.items() if value not in (None, ())}
    given.setdefault("name", "sweep" if file is None else file.stem)
    words += [f"{key}={_word(value)}" for key, value in given.items()]
    request = SweepRequest.resolve(file, words)
    request = _with_defaults(request)
    if file is None and settings.get("name") is None:
        model = re.sub(r"[^A-Za-z0-9]+", "-", str(what or "gpt-tiny")).strip("-") or "model"
        plain = request.model_copy(update={"trials": 1, "jobs": None})
        request = request.model_copy(
            update={"name": f"{model[:40]}-{plain.fingerprint()[:_DIGITS]}"}
        )
    _require_valid_points(request)
    return request


def sweep(
    what: str | Path | SweepRequest | None = None,
    *overrides: str,
    root: Path | str = RUNS,
    stop: Callable[[], bool] | None = None,
    observe: Callable[[SweepStatus], None] | None = None,
    progress: Progress | None = None,
    **settings: Unpack[SweepSettings],
) -> Sweep:
    """Runs a sweep to its end; started again, it goes on where it was, and runs nothing twice.

    For example: `windlass.sweep("gpt-tiny", "train.learning_rate=1e-4..1e-2:log", trials=20)`.

    Args:
        what: a model's name, the `.toml` file of a sweep, or the result of `make_sweep_request`.
        overrides: `key=value` of the request; with a range or choices the key is searched.
        root: the folder that holds the run folders.
        stop: polled; True lets all runs save and end.
        observe: called with how far the sweep is.
        progress: called with how far planning and a first measurement of this machine are.
        **settings: fields of `SweepRequest`; None leaves one out.

    Raises:
        InputErrors: everything that is wrong with keys, ranges and settings.
        RecordError: another process drives this sweep.
        RunInterrupted: `stop` returned True; the same call goes on.
        StorageError: the disk is full.
    """
    if isinstance(what, SweepRequest):
        if overrides or settings:
            raise RequestError("a complete sweep takes no overrides; give them to make it")
        request = what
    else:
        request = make_sweep_request(what, *overrides, **settings)
    folder = SweepFolder(Path(root).absolute(), request.name)
    lock = folder.lock_driver()
    try:
        request = folder.adopt(request)
        machine = measured_machine(request, progress)
        if request.jobs is None:
            request = folder.adopt(request.model_copy(update={"jobs": _jobs(request, machine)}))
        workplace = _workplace(folder, request, machine)
        driver = Driver(
            folder, request, workplace, stop=stop or (lambda: False), observe=observe or _ignore
        )
        trials = driver.run()
    finally:
        lock.release()
    return Sweep(request=request, folder=folder.path, trials=trials)


def load_sweep(name: str, *, root: Path | str = RUNS) -> Sweep:
    """A sweep as far as it has come, whether it goes on or not.

    Args:
        name: its name.
        root: the folder that holds the run folders.

    Raises:
        RecordError: there is no such sweep.
        InputErrors: one of its files is damaged.
    """
    request, trials = read_trials(Path(root), name)
    return Sweep(request=request, folder=SweepFolder(Path(root), name).path, trials=trials)


def _workplace(folder: SweepFolder, request: SweepRequest, machine: Machine) -> Workplace:
    """This machine, or Slurm, as the place where trials run."""
    is_local, count = request.executor == "local", request.jobs or 1
    return Workplace(
        jobs=make_jobs(request, folder, max(1, core_count() // count) if is_local else 1),
        most_jobs=count,
        capacity_bytes=machine.device.memory.capacity_bytes if is_local else None,
        predict=lambda trial: _predict(request, trial),
        command=lambda trial: _command(folder, trial),
    )


def _ignore(status: SweepStatus) -> None:
    del status


def _predict(request: SweepRequest, trial: Trial) -> Trial:
    """The trial with its predicted time and memory.

    Raises:
        WindlassError: its request is not valid, or nothing fits.
    """
    planned = plan_trial(request, trial)
    prediction, steps = planned.prediction, planned.request.train.steps
    devices = planned.plan.parallel.devices
    return trial.model_copy(
        update={
            "predicted_seconds": prediction.step_seconds * steps,
            "predicted_bytes": prediction.peaks[0].peak_bytes * devices,
            "steps": steps,
        }
    )


def _command(folder: SweepFolder, trial: Trial) -> tuple[str, ...]:
    words = (str(folder.root), folder.name, str(trial.number), str(trial.starts))
    return tuple(module_command(_TRIAL_MODULE, *words))


def _jobs(request: SweepRequest, machine: Machine) -> int:
    """Runs at a time, by the predicted memory of the first point that fits this machine."""
    if request.executor != "local" or machine.device.kind != "cpu":
        return 1
    for point in end_points(request.dimensions()):
        trial = Trial(number=0, params=point, run=request.name)
        try:
            predicted = _predict(request, trial)
        except WindlassError:
            continue
        return most_jobs(
            core_count(),
            request.total,
            needed_bytes=predicted.predicted_bytes or 1,
            capacity_bytes=machine.device.memory.capacity_bytes,
        )
    return 1


def _placed(override: str) -> str:
    """An override of the request as one of the sweep: of its `space` or its `request`."""
    key, equals, value = override.partition("=")
    table = "space" if is_range_or_choices(value) else "request"
    return f"{table}.{_full_key(key.strip())}={value}" if equals else override


def _full_key(key: str) -> str:
    """The dotted key that ends with a word, if only one does; otherwise the word itself."""
    keys = [known for known, _ in leaf_fields(Request)]
    ends = [known for known in keys if known.endswith(f".{key}")]
    return ends[0] if key not in keys and len(ends) == 1 else key


def _word(value: object) -> str:
    """The value of an override, as TOML has it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def _with_defaults(request: SweepRequest) -> SweepRequest:
    """The sampler and the number of trials that fit the space, where they were left open."""
    space, given = request.dimensions(), request.model_fields_set
    is_finite = all(dimension.is_finite for dimension in space)
    most = request.trials if "trials" in given else _MOST_GRID
    sampler = request.sampler
    if "sampler" not in given and is_finite and grid_points(space) <= most:
        sampler = "grid"
    trials = request.trials
    if "trials" not in given and sampler == "grid":
        trials = grid_points(space)
    return request.model_copy(update={"sampler": sampler, "trials": trials})


def _require_valid_points(request: SweepRequest) -> None:
    """Refuses a space with a value that no request takes.

    Raises:
        InputErrors: all of them.
    """
    messages: dict[str, None] = {}
    for point in end_points(request.dimensions()):
        try:
            Request.resolve(None, request.overrides(point))
        except InputErrors as error:
            messages |= dict.fromkeys(error.messages)
        except RequestError as error:
            messages[str(error)] = None
    if messages:
        raise InputErrors(tuple(messages))
