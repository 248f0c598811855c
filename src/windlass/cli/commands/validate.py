"""`windlass validate`: holds predictions against runs here, or those that others published."""

import statistics
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from windlass import api
from windlass.api.validate import judge_tables
from windlass.cli.commands.validate_tables import show_evaluated
from windlass.cli.console import ProgressBars, console, print_json
from windlass.cli.isolated_process import run_isolated
from windlass.cli.options import AsJson
from windlass.errors import InputErrors, RequestError, RunBroken, did_you_mean
from windlass.schema.graph import Precision
from windlass.schema.plan import Plan, Recompute
from windlass.schema.run_record import Step

_WARM_SECONDS, _WARM_STEPS = 2.0, 2
"""Steps that are run and left out: at least so many, and for so long. Caches fill in the first few,
and a processor that was idle takes a second or two to come to its speed."""
_MEASURED_SECONDS, _MEASURED_STEPS = 4.0, 5
"""Steps that count: at least so many, and for so long."""

_SIZES = (("gpt-tiny", 256), ("gpt-mini", 256), ("gpt2-124m", 256))
"""Model and sequence; each meets every cell of `_CELLS`."""
_CELLS = (
    (2, "none", "float32", False),
    (2, "full", "bfloat16", True),
    (8, "none", "bfloat16", True),
    (8, "full", "float32", False),
)
"""Micro-batch, recompute, precision, compile: both levels of each, in both company."""

_SHORT: dict[Precision, str] = {"float32": "fp32", "bfloat16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedPlan:
    """One plan, predicted and measured. Memory is the peak of a fresh process."""

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
    """What the yardstick took before and after the run, over what it took in the probe."""

    @property
    def plan(self) -> str:
        """Micro-batch by sequence, and what is not the default."""
        words = [f"{self.micro} × {self.sequence}", _SHORT[self.precision]]
        words += ["compiled"] if self.compiled else []
        return " ".join(words + (["recompute"] if self.recompute == "full" else []))

    @property
    def seconds_error(self) -> float:
        """Predicted over measured step time, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def steady_error(self) -> float:
        """The same had the machine kept the speed that the probe met."""
        return self.predicted_seconds * self.drift / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        """Predicted over measured peak memory, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def validate(*what: str, as_json: AsJson = False) -> None:
    """Hold predictions against runs: 12 plans on this machine, or tables of published runs.

    Args:
        what: `here` (the default) runs plans in fresh processes; `TABLE.csv ...` predicts rows.
        as_json: Print the rows as JSON.
    """
    tables = [name for name in what if name != api.HERE]
    if tables and len(tables) < len(what):
        raise RequestError(f"`{api.HERE}` stands alone; leave out `{tables[0]}`, or `{api.HERE}`")
    if tables:
        wrong = [name for name in tables if not name.lower().endswith(".csv")]
        if wrong:
            raise RequestError(
                f"cannot validate `{wrong[0]}`{did_you_mean(wrong[0], [api.HERE])}; write "
                f"`{api.HERE}`, or name CSV files of measured runs"
            )
        judged, faults = judge_tables(tables)
        if judged or as_json:
            show_evaluated(judged, as_json=as_json)
        if faults:
            raise InputErrors(faults)
        return
    _validate_here(as_json=as_json)


def _validate_here(*, as_json: bool) -> None:
    rows: list[ValidatedPlan] = []
    total = len(_SIZES) * len(_CELLS)
    with ProgressBars() as progress, tempfile.TemporaryDirectory() as folder:
        progress("validating", 0, total)
        # Whatever has to be made once, tokens and compiled code's headers, is no part of a run.
        _train(_SIZES[0][0], "train.steps=1", "--folder", str(Path(folder) / "first"))
        for row in _sweep(Path(folder)):
            rows.append(row)
            progress("validating", len(rows), total)
    if as_json:
        print_json(rows)
    else:
        console.print(_table(rows))
        console.print(_summary(rows))


def _sweep(folder: Path) -> Iterator[ValidatedPlan]:
    """Trains every plan of the sweep for a few steps, each in a process of its own."""
    for model, sequence in _SIZES:
        for micro, recompute, precision, compiled in _CELLS:
            words = (
                model, f"train.sequence={sequence}", f"train.batch={micro}",
                f"batch.micro={micro}", f"recompute={recompute}", f"precision={precision}",
                f"compile={str(compiled).lower()}",
            )  # fmt: skip
            planned = api.plan(*words)
            seconds = planned.prediction.step_seconds
            warm = max(_WARM_STEPS, round(_WARM_SECONDS / seconds))
            steps = warm + max(_MEASURED_STEPS, round(_MEASURED_SECONDS / seconds))
            place = folder / f"{model}-{micro}-{recompute}-{precision}"
            before = _yardstick_seconds()
            _train(
                *words, f"train.steps={steps}", f"train.evaluate_every={steps + 1}",
                f"train.save_every={steps + 1}", "--folder", str(place),
            )  # fmt: skip
            around = statistics.fmean((before, _yardstick_seconds()))
            yield _row(place, planned.plan, warm, around / planned.machine.speed_check_seconds)


def _train(*words: str) -> None:
    """Runs `windlass train` in a process of its own."""
    run_isolated("windlass", "train", *words)


def _yardstick_seconds() -> float:
    """How long this machine takes just now for the same work as always."""
    return float(run_isolated("windlass.hardware.probe.speed_check"))


def _row(place: Path, plan: Plan, warm: int, drift: float) -> ValidatedPlan:
    record = api.load(place)
    if record.prediction is None or record.request is None:
        raise RunBroken(f"`{place}` holds no prediction")
    measured: tuple[Step, ...] = record.steps[warm:]
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
    """Narrow enough for a terminal of 80 columns: one unit for a whole column."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True,
        caption="predicted / measured: ms a step, MiB at the peak; slower: the machine, since its "
        "probe", caption_justify="left",
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
            f"at the probe's speed: {_spread(row.steady_error for row in rows)}",
            f"peak memory: {_spread(row.bytes_error for row in rows)}",
            f"{len(rows)} plans",
        )
    )


def _spread(errors: Iterable[float]) -> str:
    found = [abs(error) for error in errors]
    return f"median error {statistics.median(found):.1%}, worst {max(found):.1%}"
