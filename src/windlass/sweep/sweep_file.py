"""The files of a sweep: what it searches, and one small file for each trial.

`sweeps/NAME.toml` below the folder of runs is written once. `sweeps/NAME/0007.json` has a trial; it
is written by the one process that drives the sweep, each time whole, so that a killed driver leaves
nothing that the next one cannot read.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import Field, JsonValue, field_validator, model_validator

from windlass.atomic_files import atomic_write
from windlass.document import Document
from windlass.errors import InputErrors, RecordError, RequestError, did_you_mean
from windlass.sweep.search_space import Choice, Dimension, grid_points, parse_dimension
from windlass.tracking import FolderLock, is_locked

SWEEPS_FOLDER = "sweeps"
"""Below the folder of runs."""
ARM = "arm"
"""The name of the dimension whose choices are the arms of a sweep."""
Sampler = Literal["tpe", "random", "grid"]
Pruner = Literal["none", "median", "halving"]
Executor = Literal["local", "slurm", "submitit-local"]
TrialState = Literal["waiting", "running", "finished", "pruned", "failed"]
_CHANGEABLE = ("trials", "jobs")
"""What may differ when a sweep is started again."""


class SweepRequest(Document):
    """What a sweep searches, and how; the same search is the same sweep."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
    """Name of the sweep, of its files and of its group in the record."""
    request: dict[str, Any] = Field(default_factory=dict)
    """What all runs have in common: keys of a request by dotted key."""
    space: dict[str, str | tuple[Any, ...]] = Field(default_factory=dict)
    """What they differ in: a range such as `1e-4..1e-2:log` or choices, by dotted key."""
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Named sets of keys that are compared as a whole, such as `dense` and `sparse`; a trial's
    set is its value of `arm`."""
    objectives: tuple[str, ...] = ("loss",)
    """Series to make small: `loss`, `held_out_loss`, `seconds` or any other; after `max:` one to
    make large."""
    sampler: Sampler = "tpe"
    pruner: Pruner = "none"
    prune_from: Annotated[int, Field(ge=1)] = 50
    """The first step at which trials are compared."""
    prune_every: Annotated[int, Field(ge=1)] = 50
    """Steps from one comparison of the `median` pruner to the next."""
    trials: Annotated[int, Field(ge=1, le=100_000)] = 20
    """Number of trials."""
    seed: int = 0
    """Seed of the sampler; the runs have theirs from `train.seed`."""
    jobs: Annotated[int, Field(ge=1)] | None = None
    """Most runs at a time, which share this machine's cores; None means as many as predicted memory
    and cores allow."""
    executor: Executor = "local"
    """Where runs are started: here, or through submitit by Slurm."""
    slurm: dict[str, JsonValue] = Field(default_factory=dict)
    """Further parameters for submitit beside memory, time and cores, such as `slurm_partition`."""

    @field_validator("request", "space", mode="before")
    @classmethod
    def _flat(cls, tree: object) -> object:
        """Tables of a file, as dotted keys."""
        return dict(_flat(tree)) if isinstance(tree, Mapping) else tree

    @field_validator("arms", mode="before")
    @classmethod
    def _flat_arms(cls, arms: object) -> object:
        if not isinstance(arms, Mapping):
            return arms
        return {name: cls._flat(keys) for name, keys in arms.items()}

    @field_validator("objectives", mode="before")
    @classmethod
    def _one_objective(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        dimensions = self.dimensions()
        if not dimensions:
            raise ValueError(
                "nothing is searched: give a key a range or choices, such as "
                "`train.learning_rate=1e-4..1e-2:log`"
            )
        both = sorted(set(self.space) & {*self.request, *chain.from_iterable(self.arms.values())})
        if both:
            where = "request" if both[0] in self.request else "arms"
            raise ValueError(f"`{both[0]}` is in `{where}` and in `space`; leave one of them out")
        names = [name for name, _ in self.directions()]
        if not names or len(set(names)) < len(names) or not all(names):
            raise ValueError(f"`objectives` = {list(self.objectives)}: name each of them once")
        if len(names) > 1 and self.pruner != "none":
            raise ValueError(
                f"`pruner` = {self.pruner} with {len(names)} objectives; a pruner compares by one"
            )
        return self

    def dimensions(self) -> tuple[Dimension, ...]:
        """The space.

        Raises:
            RequestError: a range is none.
        """
        space = dict(self.space) | ({ARM: tuple(self.arms)} if self.arms else {})
        return tuple(parse_dimension(key, value) for key, value in space.items())

    def directions(self) -> tuple[tuple[str, bool], ...]:
        """Each objective: the name of its series, and whether it should become large."""
        return tuple(
            (name.removeprefix("max:"), name.startswith("max:")) for name in self.objectives
        )

    @property
    def total(self) -> int:
        """Number of trials; a grid has no more than its points."""
        if self.sampler != "grid":
            return self.trials
        return min(self.trials, grid_points(self.dimensions()))

    def overrides(self, params: Mapping[str, Choice]) -> tuple[str, ...]:
        """The request of a trial as overrides, `key=value` each."""
        arm = self.arms.get(str(params.get(ARM)), {})
        own = {key: value for key, value in params.items() if key != ARM}
        values = {**self.request, **arm, **own}
        return tuple(f"{key}={_toml(value)}" for key, value in values.items())


class Trial(Document):
    """One point of the space, and what became of it."""

    number: int
    """Counted from 0."""
    params: dict[str, Any]
    state: TrialState = "waiting"
    run: str
    """The name of its run folder."""
    starts: int = 0
    """How often a process was started for it."""
    deaths: int = 0
    """How often such a process was killed."""
    job: str | None = None
    """The number that Slurm gave it."""
    predicted_seconds: float | None = None
    """Predicted time of all its steps."""
    predicted_bytes: int | None = None
    """Predicted peak memory of all its devices together."""
    steps: int | None = None
    """Requested number of steps."""
    values: tuple[float, ...] = ()
    """The objectives at its end, or where it was pruned; empty if it has none."""
    pruned_at: int | None = None
    """The step at which it was found worse than others."""
    reason: str | None = None
    """Why it failed or was pruned."""

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state in ("finished", "pruned", "failed")


class SweepFolder:
    """The files of one sweep."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        self.name = name
        self.path = root / SWEEPS_FOLDER / name
        self.request_file = root / SWEEPS_FOLDER / f"{name}.toml"

    def request(self) -> SweepRequest:
        """What is searched.

        Raises:
            RecordError: there is no such sweep.
            InputErrors: its file is damaged.
        """
        if not self.request_file.is_file():
            raise RecordError(
                f"no sweep `{self.name}` in `{self.root}`"
                f"{did_you_mean(self.name, sweep_names(self.root))}; start one with "
                "`windlass sweep`"
            )
        return SweepRequest.load(self.request_file)

    def adopt(self, request: SweepRequest) -> SweepRequest:
        """Writes what is searched, or finds that it is what was searched before.

        Raises:
            InputErrors: there is another search of that name.
        """
        if self.request_file.is_file():
            before = self.request()
            faults = list(_differences(before, request))
            if faults:
                raise InputErrors(faults)
            jobs = request.jobs or before.jobs
            request = before.model_copy(update={"trials": request.trials, "jobs": jobs})
            if request == before:
                return before
        request.save(self.request_file)
        return request

    def trials(self) -> dict[int, Trial]:
        """All trials by number.

        Raises:
            RequestError: a file is damaged.
        """
        files = sorted(self.path.glob("[0-9]*.json"), key=lambda path: int(path.stem))
        return {trial.number: trial for trial in map(Trial.load, files)}

    def trial(self, number: int) -> Trial:
        """One trial.

        Raises:
            RequestError: there is no such trial.
        """
        return Trial.load(self._file(number, "json"))

    def save(self, trial: Trial) -> None:
        """Writes a trial."""
        trial.save(self._file(trial.number, "json"))

    def log_file(self, number: int) -> Path:
        """Where the process of a trial writes what it has to say."""
        return self._file(number, "log")

    def run_folder(self, trial: Trial) -> Path:
        """The run folder of a trial."""
        return self.root / trial.run

    def note_error(self, number: int, message: str) -> None:
        """Keeps why the process of a trial could not do its work, for the driver."""
        atomic_write(self._file(number, "error"), message)

    def error(self, number: int) -> str | None:
        """Why the process of a trial could not do its work; None if it could."""
        path = self._file(number, "error")
        return path.read_text(encoding="utf-8") if path.is_file() else None

    def lock_trial(self, number: int) -> FolderLock:
        """The lock of a trial, which its process holds as long as it lives.

        Raises:
            RecordError: another process runs it.
        """
        return FolderLock(self.lock_file(number))

    def lock_file(self, number: int) -> Path:
        """The lock file of a trial."""
        return self._file(number, "lock")

    def lock_driver(self) -> FolderLock:
        """The lock of the process that drives the sweep.

        Raises:
            RecordError: another one does.
        """
        path = self.path / "driver.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_locked(path):
            raise RecordError(
                f"sweep `{self.name}` is driven by {_holder(path)} already; "
                f"`windlass sweep show {self.name}` shows how far it is"
            )
        return FolderLock(path)

    def _file(self, number: int, suffix: str) -> Path:
        return self.path / f"{number:04}.{suffix}"


def sweep_names(root: Path) -> tuple[str, ...]:
    """The names of all sweeps among some runs, in order."""
    return tuple(sorted(path.stem for path in (root / SWEEPS_FOLDER).glob("*.toml")))


def lock_holder(path: Path) -> int | None:
    """The process that holds a lock file on this host; None if none does.

    The file of a lock that nobody holds may still name a process.
    """
    if not is_locked(path):
        return None
    try:
        return int(json.loads(path.read_text(encoding="utf-8"))["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _holder(path: Path) -> str:
    pid = lock_holder(path)
    return "another process" if pid is None else f"process {pid}"


def _differences(before: SweepRequest, now: SweepRequest) -> Iterator[str]:
    """One sentence for each key in which two searches differ."""
    old, new = before.model_dump(mode="json"), now.model_dump(mode="json")
    for key in old:
        if key not in _CHANGEABLE and old[key] != new[key]:
            yield (
                f"sweep `{now.name}` has `{key}` = {json.dumps(old[key])}, and not "
                f"{json.dumps(new[key])}; give the other search another `--name`"
            )


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _toml(value: object) -> str:
    """A value as TOML writes it."""
    try:
        tree = {"value": list(value) if isinstance(value, tuple) else value}
        return tomli_w.dumps(tree).partition("=")[2].strip().replace("\n", " ")
    except TypeError as error:
        raise RequestError(f"{value!r} is no value of a request: {error}") from None
