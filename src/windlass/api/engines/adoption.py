"""`adopt` makes a run in the record of a log that another engine wrote."""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import RenderableType

from windlass import planner
from windlass.answer import Answer
from windlass.api.engines.engine_handover import Pricing
from windlass.document import Document
from windlass.engines import engine_versions, load_engine
from windlass.errors import RecordError, RequestError
from windlass.flags import AnyPath, OnMachine, RunsFolder
from windlass.integrations import (
    LogSize,
    PortableRun,
    ReadLog,
    clean_text,
    load_log_format,
    read_log,
    write_run,
)
from windlass.jobs import RUNS, Planned, plan as plan_model
from windlass.schema import (
    GRAPH_FILE,
    MACHINE_FILE,
    PLAN_FILE,
    PREDICTION_FILE,
    REQUEST_FILE,
    ModelIdentity,
    Prediction,
)
from windlass.tracking import JournalRow

_SUFFIXES = (".log", ".txt", ".out", ".err", ".jsonl", ".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptedRun(Answer):
    """A run in the record that another engine ran."""

    folder: Path
    engine: str
    steps: int
    seconds: float | None
    """Median of a step without warm-up; None where the log tells no times."""
    predicted_seconds: float | None
    left_out: Mapping[str, int]
    """How many things of each kind could not be read."""
    change: str

    @property
    def notes(self) -> tuple[str, ...]:
        """What could not be read."""
        parts = ", ".join(f"{count} {what}" for what, count in self.left_out.items())
        return (f"not taken over: {parts}",) if parts else ()

    def lines(self) -> Iterator[RenderableType]:
        """Where the run is, its step beside the predicted one, and what to do next."""
        yield f"run      {self.folder} ({self.change}): {self.steps} steps of {self.engine}"
        if self.seconds is not None:
            beside = ""
            if self.predicted_seconds is not None:
                more = 100 * (self.seconds / self.predicted_seconds - 1)
                beside = f", predicted {self.predicted_seconds:.3g} s ({more:+.0f} %)"
            yield f"step     {self.seconds:.3g} s by the median{beside}"
        if self.predicted_seconds is not None:
            yield f"next     windlass judge {self.folder}"


def adopt(
    *logs: AnyPath,
    stack: str,
    plan: Annotated[AnyPath | None, Parameter(name="--plan")] = None,
    on: OnMachine = None,
    name: str | None = None,
    root: RunsFolder = RUNS,
) -> AdoptedRun:
    """Make a run in the record of a log that another engine wrote.

    For example: `windlass adopt slurm-17.out --stack torchtitan --plan handover/plan.toml`, then
    `windlass judge last`.

    Args:
        logs: The log, or the folder of one run's logs, or the logs of its restarts in order.
        stack: The engine that wrote it, such as `torchtitan` or `megatron-bridge`; `mllog` for
            results of MLPerf.
        plan: The plan that it ran, as a file or the folder of `export`; then there is a prediction.
        on: The machine, if it is another than the plan's.
        name: What to call the run; that of the log if not given.
        root: The folder that holds the run folders.

    Raises:
        RequestError: no log is named, or no engine has that name.
        RecordError: a log cannot be read, or holds no step.
        WindlassError: what is wrong with the plan.
        StorageError: the record cannot be written.
    """
    form = load_log_format(stack)
    paths = _paths(logs)
    priced = None if plan is None else _priced(Path(plan), stack, on)
    read = read_log(paths, form, LogSize() if priced is None else _size(priced[0]))
    run = _portable(read, paths, stack, name, priced)
    written = write_run(run, Path(root))
    seconds = sorted(step.values["seconds"] for step in read.steps if "seconds" in step.values)
    return AdoptedRun(
        folder=written.folder, engine=stack, steps=len(read.steps),
        seconds=seconds[len(seconds) // 2] if seconds else None,
        predicted_seconds=None if priced is None else priced[1].step_seconds,
        left_out=read.left_out, change=written.change,
    )  # fmt: skip


def _paths(logs: tuple[AnyPath, ...]) -> list[Path]:
    """The files of the run, those of a folder by name."""
    if not logs:
        raise RequestError("name a log, or the folder of one; `windlass adopt --help` lists all")
    paths: list[Path] = []
    for log in map(Path, logs):
        inside = sorted(log.iterdir()) if log.is_dir() else [log]
        paths += [
            file for file in inside
            if file == log
            or (file.suffix in _SUFFIXES and file.is_file() and not file.is_symlink())
        ]  # fmt: skip
    if not paths:
        raise RecordError(f"`{logs[0]}` holds no file that ends in {', '.join(_SUFFIXES)}")
    return paths


def _priced(path: Path, stack: str, on: str | None) -> tuple[Planned, Prediction]:
    """The plan that the engine ran, with what is predicted of it on the engine's stack."""
    made = plan_model(None, machine=on, plan=path / PLAN_FILE if path.is_dir() else path)
    if stack.partition("@")[0] not in engine_versions():
        return made, made.prediction
    identity = made.plan.model or ModelIdentity(name=made.graph.name)
    pricing = Pricing.of(made, load_engine(stack), identity)
    result = planner.result_of_given_plan(
        pricing.plan, made.request, pricing.graph, pricing.machine
    )
    if result.plan is None or result.prediction is None:
        return made, made.prediction
    return pricing.with_result(result), result.prediction


def _size(planned: Planned) -> LogSize:
    plan = planned.plan
    return LogSize(
        tokens=plan.tokens_per_step, samples=plan.global_batch, ranks=plan.parallel.devices
    )


def _portable(
    read: ReadLog,
    paths: list[Path],
    stack: str,
    name: str | None,
    priced: tuple[Planned, Prediction] | None,
) -> PortableRun:
    """The run as the record has it."""
    started = next((step.time for step in read.steps if step.time is not None), 0.0)
    rows, time = [], started
    for step in read.steps:
        taken = step.values.get("seconds", step.values.get("warm_up_seconds", 0.0))
        time = step.time if step.time is not None else time + taken
        rows.append(JournalRow(step=step.step, time=time, values=step.values))
    documents: dict[str, Document] = {}
    meta: dict[str, object] = {"steps": read.steps[-1].step}
    if priced is not None:
        planned, prediction = priced
        documents = {
            REQUEST_FILE: planned.request, PLAN_FILE: planned.plan, GRAPH_FILE: planned.graph,
            MACHINE_FILE: planned.machine, PREDICTION_FILE: prediction,
        }  # fmt: skip
        meta |= {
            "model": planned.request.model.name, "machine": planned.machine.name,
            "predicted_seconds": prediction.step_seconds,
            "predicted_interval": [prediction.low_seconds, prediction.high_seconds],
        }  # fmt: skip
    place = paths[0].resolve()
    first = read.steps[0]
    mark = hashlib.sha256(f"{first.step} {first.time} {first.values}".encode()).hexdigest()[:16]
    return PortableRun(
        origin=stack, origin_id=f"{place.parent.name}/{place.name}/{mark}",
        name=clean_text(name or place.stem), rows=tuple(rows), started=started, ended=time,
        state="finished", config={"engine": stack}, left_out=read.left_out, documents=documents,
        meta=meta,
    )  # fmt: skip
