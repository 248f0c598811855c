"""One drawn run: predicted, measured in a fresh process, and kept in a file as soon as it ends."""

import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from windlass.atomic_files import cache_folder, storage_errors
from windlass.child_processes import module_command
from windlass.document import Document
from windlass.errors import RunBroken, WindlassError
from windlass.jobs import EVERY_PART, HERE, Planned, find_machine, load, plan
from windlass.schema import Measurement as Measurement
from windlass.units import format_seconds
from windlass.verify.local_validation.draw import OWN, DrawnRun, draw_runs

_WARM_UP_SECONDS, _WARM_UP_STEPS = 1.5, 3
"""Minimal length of the warm-up, whose steps do not count: caches fill, an idle processor reaches
its full clock rate, and the third step samples memory after each instruction."""
_MEASURED_SECONDS, _MEASURED_STEPS = 3.0, 5
"""Minimal length of the measurement."""
RUN_FOLDER = "run"
"""The subfolder of a measured run."""
_MOST_STEP_SECONDS = 2.0
"""Predicted step above which a run is cut: so many steps as are measured then take 16 s, and
the run half a minute, without what a compiler takes. No step is drawn for more than 1.6 s, but for
products as fast as `draw` says."""
_MOST_ATTEMPTS = 3
"""Times that a run is measured while other processes take its cores; the quietest counts."""
_MOST_REPEATED_SECONDS = 45.0
"""Time from which on a disturbed measurement is not repeated."""

Announce = Callable[[str], None]
"""Is told what is done now, in a few words."""


class ValidatedRun(Document):
    """One drawn run with its measurement, or the reason why there is none."""

    number: int
    sort: str
    model: str
    overrides: tuple[str, ...]
    """As drawn: `key=value` of the request."""
    cut: tuple[str, ...] | None = None
    """What ran in place of them, because this machine is predicted to be too slow for a step as
    drawn; None if they did."""
    measurement: Measurement | None = None
    problem: str | None = None
    """Why it was refused or failed; None if it ran."""


def validate_random_plans(
    count: int, seed: int, announce: Announce, stack: str = OWN
) -> Iterator[ValidatedRun]:
    """Predicts and measures the first `count` runs of a seed, and yields each as it ends.

    Runs that were measured before, under the same measurement of this machine, come from their
    file and are not run again.

    Args:
        count: number of runs.
        seed: seed of the draw.
        announce: is told what runs now, and how long that is predicted to take.
        stack: what runs them.

    Raises:
        RequestError: `count` is below 1, or nothing here runs the plans of the stack.
        MachineError: this machine cannot be measured.
        StorageError: the file cannot be written.
    """
    drawn = draw_runs(count, seed, stack)
    path = validated_runs_file(seed)
    kept = {(row.number, row.model, row.overrides): row for row in _read(path)}
    for run in drawn:
        row = kept.get((run.number, run.model, run.overrides))
        if row is None:
            row = _validate(run, announce)
            _append(path, row)
        yield row


def validated_runs_file(seed: int) -> Path:
    """The file that keeps the runs of a seed; a new measurement of this machine has its own.

    Raises:
        MachineError: this machine cannot be measured.
    """
    machine = find_machine(HERE, needs=EVERY_PART).fingerprint()
    return cache_folder() / "validation" / f"seed-{seed}-{machine}.jsonl"


def _read(path: Path) -> Iterator[ValidatedRun]:
    """The rows of a file, without a last one that a kill tore."""
    if path.exists():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                yield ValidatedRun.model_validate(json.loads(line))
            except (ValueError, ValidationError):
                continue


def _append(path: Path, row: ValidatedRun) -> None:
    with storage_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write("\n" * torn + row.to_json() + "\n")


def _validate(run: DrawnRun, announce: Announce) -> ValidatedRun:
    """Predicts and measures one run; again if other processes disturbed it."""
    row = ValidatedRun(number=run.number, sort=run.sort, model=run.model, overrides=run.overrides)
    try:
        cut, planned = plan_within(run, _MOST_STEP_SECONDS)
        row = row.model_copy(update={"cut": None if cut == run else cut.overrides})
        announce(f"{run.number:3d} {run.sort:19s} {run.model} {_describe_length(planned)}")
        measurement = min(_attempts(planned), key=lambda each: each.contention or 0.0)
    except WindlassError as error:
        return row.model_copy(update={"problem": str(error)})
    return row.model_copy(update={"measurement": measurement})


def plan_within(run: DrawnRun, step_seconds: float) -> tuple[DrawnRun, Planned]:
    """The run and its plan, cut until a step is predicted to take no longer, or nothing is left.

    Raises:
        WindlassError: it cannot be planned.
    """
    planned = plan(run.model, *run.overrides)
    while (seconds := planned.prediction.step_seconds) > step_seconds:
        smaller = run.cut(step_seconds / seconds)
        if smaller is None:
            break
        run, planned = smaller, plan(smaller.model, *smaller.overrides)
    return run, planned


def _attempts(planned: Planned) -> Iterator[Measurement]:
    """Measurements of one plan: one, and more while other processes take its cores."""
    start = time.monotonic()
    for _ in range(_MOST_ATTEMPTS):
        with tempfile.TemporaryDirectory() as folder:
            measurement = measure_plan(planned, Path(folder))
        yield measurement
        if not measurement.is_contended or time.monotonic() - start > _MOST_REPEATED_SECONDS:
            return


def _describe_length(planned: Planned) -> str:
    """`1 x 4 x 256 fp32, 12 steps of 0.40 s, compiling 18 s (predicted)`."""
    prediction, (warm_up, measured) = planned.prediction, _steps(planned)
    words = f"{describe_plan(planned)}, {warm_up + measured} steps of "
    words += format_seconds(prediction.step_seconds)
    if prediction.compile_seconds:
        words += f", compiling {format_seconds(prediction.compile_seconds)}"
    return f"{words} (predicted)"


def _steps(planned: Planned) -> tuple[int, int]:
    """Steps that warm up, and steps that are measured."""
    seconds = planned.prediction.step_seconds
    warm_up = max(_WARM_UP_STEPS, round(_WARM_UP_SECONDS / seconds))
    return warm_up, max(_MEASURED_STEPS, round(_MEASURED_SECONDS / seconds))


def measure_plan(planned: Planned, folder: Path, *, least_steps: int = 0) -> Measurement:
    """Predicted and measured figures of a few steps under exactly this plan, in a fresh process.

    Args:
        planned: a plan for this machine.
        folder: an empty folder; the run is kept in its `RUN_FOLDER`.
        least_steps: fewest steps of the run, with those that do not count.

    Raises:
        RunBroken: the run failed.
    """
    warm_up, measured_steps = _steps(planned)
    steps = max(warm_up + measured_steps, least_steps)
    speed_check_seconds = float(run_isolated("windlass.hardware.probe.speed_check"))
    plan_file = folder / "plan.toml"
    planned.plan.save(plan_file)
    run_isolated(
        "windlass", "train", "--plan", str(plan_file), f"train.steps={steps}",
        f"train.evaluate_every={steps + 1}", f"train.save_every={steps + 1}",
        "train.evaluate_sequences=4", "--folder", str(folder / RUN_FOLDER),
    )  # fmt: skip
    record = load(folder / RUN_FOLDER)
    if record.prediction is None or len(record.steps) < steps:
        raise RunBroken(f"`{folder}` holds no prediction, or fewer than {steps} steps")
    measured = record.steps[warm_up:]
    shares = [step.contention for step in measured if step.contention is not None]
    prediction, peak = record.prediction, record.prediction.peaks[0]
    return Measurement(
        plan=describe_plan(planned),
        predicted_seconds=prediction.step_seconds,
        low_seconds=prediction.low_seconds,
        high_seconds=prediction.high_seconds,
        predicted_bytes=peak.peak_bytes,
        low_bytes=peak.low_bytes,
        high_bytes=peak.high_bytes,
        measured_seconds=statistics.median(step.seconds for step in measured),
        measured_bytes=measured[-1].memory_bytes,
        drift=speed_check_seconds / planned.machine.speed_check_seconds,
        contention=statistics.fmean(shares) if shares else None,
    )


def describe_plan(planned: Planned) -> str:
    """`2 x 4 x 256 bf16 compiled`: accumulation, micro-batch, sequence, and what is not default."""
    plan, parallel = planned.plan, planned.plan.parallel
    batch = plan.batch
    phases = plan.phase_count
    words = [
        plan.stack or "",
        f"{batch.accumulation} x {batch.micro} x {batch.sequence}",
        {"bfloat16": "bf16", "float32": "fp32"}.get(plan.precision, plan.precision),
        "compiled" if plan.compile else "",
        plan.recompute if plan.recompute != "none" else "",
        f"{plan.moments} moments" if plan.moments != "float32" else "",
        f"{phases} phases" if plan.is_offloaded("parameters") else "",
        "state on disk" if plan.offloads and not plan.is_offloaded("parameters") else "",
        f"p{parallel.pipeline}" if parallel.pipeline > 1 else "",
        f"t{parallel.tensor}" if parallel.tensor != 1 else "",
        f"d{parallel.data}" if parallel.data > 1 else "",
        f"zero {plan.sharding.parameters}/{plan.sharding.optimizer}"
        if plan.sharding.optimizer > 1
        else "",
    ]
    return " ".join(filter(None, words))


def run_isolated(module: str, *args: str) -> str:
    """Standard output of `python -m module args`.

    Raises:
        RunBroken: the process ended with an error.
    """
    process = subprocess.run(  # noqa: S603  the arguments are ours, and no shell reads them
        module_command(module, *args), capture_output=True, text=True, check=False
    )
    if process.returncode:
        command = " ".join((module, *args))
        raise RunBroken(f"`{command}` failed: {process.stderr.strip()}")
    return process.stdout
