"""`windlass validate`: compares predictions with runs on this machine, or with published runs."""

import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from windlass import api
from windlass.cli.command_options import AsJson
from windlass.cli.commands.validate_tables import print_evaluations
from windlass.cli.console import ProgressBars, console, print_json
from windlass.cli.isolated_process import run_isolated
from windlass.errors import InputErrors, RequestError, RunBroken, did_you_mean
from windlass.schema import Plan, Precision, Recompute, Step

_WARM_UP_SECONDS, _WARM_UP_STEPS = 2.0, 2
"""Minimal length of the warm-up, whose steps do not count. Caches fill in the first few steps, and
an idle processor takes a second or two to reach its full clock rate."""
_MEASURED_SECONDS, _MEASURED_STEPS = 4.0, 5
"""Minimal length of the measurement."""

_MODELS = (("gpt-tiny", 256), ("gpt-mini", 256), ("gpt2-124m", 256))
"""Models, each with its sequence length; each runs with every entry of `_SETTINGS`."""
_SETTINGS = (
    (2, "none", "float32", False),
    (2, "full", "bfloat16", True),
    (8, "none", "bfloat16", True),
    (8, "full", "float32", False),
)
"""Micro-batch, recompute, precision and compile; each takes both of its values twice."""

_PRECISION_LABELS: dict[Precision, str] = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedPlan:
    """One plan, predicted and measured in a fresh process. Memory is the peak."""

    model: str
    micro: int
    sequence: int
    precision: Precision
    compiled: bool
    recompute: Recompute
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int
    measured_bytes: int
    drift: float
    """Time of the machine's speed check around the run, over its time during the probe."""

    @property
    def plan(self) -> str:
        """`2 × 256 bf16 compiled`: micro-batch, sequence, and settings other than the default."""
        words = [f"{self.micro} × {self.sequence}", _PRECISION_LABELS[self.precision]]
        words += ["compiled"] if self.compiled else []
        return " ".join(words + (["recompute"] if self.recompute == "full" else []))

    @property
    def seconds_error(self) -> float:
        """Predicted over measured step time, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def corrected_seconds_error(self) -> float:
        """The same, corrected for the drift of the machine's speed since its probe."""
        return self.predicted_seconds * self.drift / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        """Predicted over measured peak memory, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def validate(*what: str, as_json: AsJson = False) -> None:
    """Compare predictions with measurements: 12 plans run here, or tables of published runs.

    For example: `windlass validate validation/*.csv`.

    Args:
        what: `here` (the default) trains with 12 plans, each in a fresh process; `TABLE.csv ...`
            predicts the runs of these tables.
        as_json: Print the rows as JSON.
    """
    tables = [name for name in what if name != api.HERE]
    if tables and len(tables) < len(what):
        raise RequestError(
            f"`{api.HERE}` cannot be combined with tables; leave out `{tables[0]}` or `{api.HERE}`"
        )
    if tables:
        wrong = [name for name in tables if not name.lower().endswith(".csv")]
        if wrong:
            raise RequestError(
                f"cannot validate `{wrong[0]}`{did_you_mean(wrong[0], [api.HERE])}; write "
                f"`{api.HERE}`, or name CSV files of measured runs"
            )
        evaluations, problems = api.evaluate_tables(tables)
        if evaluations or as_json:
            print_evaluations(evaluations, as_json=as_json)
        if problems:
            raise InputErrors(problems)
        return
    _validate_here(as_json=as_json)


def _validate_here(*, as_json: bool) -> None:
    rows: list[ValidatedPlan] = []
    total = len(_MODELS) * len(_SETTINGS)
    with ProgressBars() as progress, tempfile.TemporaryDirectory() as folder:
        progress("validating", 0, total)
        # This run makes what is made once per machine: the tokens, and headers of compiled code.
        _train(_MODELS[0][0], "train.steps=1", "--folder", str(Path(folder) / "first"))
        for row in _sweep(Path(folder)):
            rows.append(row)
            progress("validating", len(rows), total)
    if as_json:
        print_json(rows)
    else:
        console.print(_table(rows))
        console.print(_summary(rows))


def _sweep(folder: Path) -> Iterator[ValidatedPlan]:
    """Trains a few steps under each plan of the sweep, each in a process of its own."""
    for model, sequence in _MODELS:
        for micro, recompute, precision, compiled in _SETTINGS:
            args = (
                model, f"train.sequence={sequence}", f"train.batch={micro}",
                f"batch.micro={micro}", f"recompute={recompute}", f"precision={precision}",
                f"compile={str(compiled).lower()}",
            )  # fmt: skip
            planned = api.plan(*args)
            seconds = planned.prediction.step_seconds
            warm_up = max(_WARM_UP_STEPS, round(_WARM_UP_SECONDS / seconds))
            steps = warm_up + max(_MEASURED_STEPS, round(_MEASURED_SECONDS / seconds))
            run_folder = folder / f"{model}-{micro}-{recompute}-{precision}"
            before = _speed_check_seconds()
            _train(
                *args, f"train.steps={steps}", f"train.evaluate_every={steps + 1}",
                f"train.save_every={steps + 1}", "--folder", str(run_folder),
            )  # fmt: skip
            around = statistics.fmean((before, _speed_check_seconds()))
            drift = around / planned.machine.speed_check_seconds
            yield _row(run_folder, planned.plan, warm_up, drift)


def _train(*args: str) -> None:
    """Runs `windlass train` in a process of its own."""
    run_isolated("windlass", "train", *args)


def _speed_check_seconds() -> float:
    """Seconds that this machine now takes for a fixed amount of work."""
    return float(run_isolated("windlass.hardware.probe.speed_check"))


def _row(folder: Path, plan: Plan, warm_up: int, drift: float) -> ValidatedPlan:
    record = api.load(folder)
    if record.prediction is None or record.request is None:
        raise RunBroken(f"`{folder}` holds no prediction")
    measured: tuple[Step, ...] = record.steps[warm_up:]
    return ValidatedPlan(
        model=record.request.model.name,
        micro=plan.batch.micro,
        sequence=plan.batch.sequence,
        precision=plan.precision,
        compiled=plan.compile,
        recompute=plan.recompute,
        predicted_seconds=record.prediction.step_seconds,
        measured_seconds=statistics.median(step.seconds for step in measured),
        predicted_bytes=record.prediction.peaks[0].peak_bytes,
        measured_bytes=measured[-1].memory_bytes,
        drift=drift,
    )


def _table(rows: list[ValidatedPlan]) -> Table:
    """One row a plan; one unit for a whole column keeps it within 80 terminal columns."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
        caption="predicted / measured: ms a step, MiB at the peak; slower: slowdown of the machine "
        "since its probe", caption_justify="left",
    )  # fmt: skip
    table.add_column("model", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    for head in ("step, ms", "error", "slower", "peak, MiB", "error"):
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.model, row.plan,
            f"{row.predicted_seconds * 1e3:.0f} / {row.measured_seconds * 1e3:.0f}",
            f"{row.seconds_error:+.1%}",
            f"{row.drift - 1:+.0%}",
            f"{row.predicted_bytes / 2**20:.0f} / {row.measured_bytes / 2**20:.0f}",
            f"{row.bytes_error:+.1%}",
        )  # fmt: skip
    return table


def _summary(rows: list[ValidatedPlan]) -> str:
    return "; ".join(
        (
            f"step time: {_spread(row.seconds_error for row in rows)}",
            f"corrected for drift: {_spread(row.corrected_seconds_error for row in rows)}",
            f"peak memory: {_spread(row.bytes_error for row in rows)}",
            f"{len(rows)} plans",
        )
    )


def _spread(errors: Iterable[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"median error {statistics.median(sizes):.1%}, worst {max(sizes):.1%}"
