"""`windlass validate here`: holds predictions against runs on this machine."""

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from windlass import api
from windlass.cli.console import Bars, console, print_json
from windlass.cli.words import AsJson
from windlass.errors import RequestError, RunBroken, did_you_mean
from windlass.spec.record import Step
from windlass.units import show_bytes, show_seconds

_WARM_STEPS = 2
"""The first steps compile and fill caches; they are run and left out."""
_MEASURED_STEPS = 5

_SIZES = (("gpt-tiny", 256), ("gpt-mini", 256), ("gpt2-124m", 256))
"""Model and sequence; each meets every cell of `_CELLS`."""
_CELLS = (
    (2, "none", "float32", False),
    (2, "layer", "bfloat16", True),
    (8, "none", "bfloat16", True),
    (8, "layer", "float32", False),
)
"""Micro-batch, recompute, precision, compile: both levels of each, in both company."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan, predicted and measured. Memory is the peak of a fresh process."""

    model: str
    plan: str
    predicted_seconds: float
    measured_seconds: float
    predicted_bytes: int
    measured_bytes: int

    @property
    def seconds_error(self) -> float:
        """Predicted over measured step time, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def bytes_error(self) -> float:
        """Predicted over measured peak memory, less one."""
        return self.predicted_bytes / self.measured_bytes - 1


def validate(what: str = "here", *, as_json: AsJson = False) -> None:
    """Run 12 plans in fresh processes and compare step time and peak memory with predictions.

    Args:
        what: `here`, this machine.
        as_json: print the rows as JSON.
    """
    if what != api.HERE:
        raise RequestError(
            f"cannot validate `{what}`{did_you_mean(what, [api.HERE])}; write `here`"
        )
    rows: list[Row] = []
    total = len(_SIZES) * len(_CELLS)
    with Bars() as progress, tempfile.TemporaryDirectory() as folder:
        progress("validating", 0, total)
        for row in _sweep(Path(folder)):
            rows.append(row)
            progress("validating", len(rows), total)
    if as_json:
        print_json(rows)
    else:
        console.print(_table(rows))
        console.print(_summary(rows))


def _sweep(folder: Path) -> Iterator[Row]:
    """Trains every plan of the sweep for a few steps, each in a process of its own."""
    steps = _WARM_STEPS + _MEASURED_STEPS
    for model, sequence in _SIZES:
        for micro, recompute, precision, compiled in _CELLS:
            parts = [f"{micro} × {sequence}", precision]
            parts += ["compiled"] if compiled else []
            name = ", ".join(parts + (["recompute"] if recompute == "layer" else []))
            place = folder / f"{model}-{micro}-{recompute}-{precision}"
            words = (
                "train", model, f"train.steps={steps}", f"train.sequence={sequence}",
                f"train.batch={micro}", f"batch.micro={micro}", f"recompute={recompute}",
                f"precision={precision}", f"compile={str(compiled).lower()}",
                f"train.evaluate_every={steps + 1}", f"train.save_every={steps + 1}",
                "--folder", str(place),
            )  # fmt: skip
            done = subprocess.run(  # noqa: S603  our own words, no shell
                (sys.executable, "-m", "windlass", *words),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RunBroken(f"the run of {model}, {name} ended with {done.stderr.strip()}")
            yield _row(place, model, name)


def _row(place: Path, model: str, plan: str) -> Row:
    record = api.load(place)
    if record.prediction is None:
        raise RunBroken(f"`{place}` holds no prediction")
    measured: tuple[Step, ...] = record.steps[_WARM_STEPS:]
    return Row(
        model=model,
        plan=plan,
        predicted_seconds=record.prediction.step_seconds,
        measured_seconds=statistics.median(step.seconds for step in measured),
        predicted_bytes=record.prediction.peaks[0].peak_bytes,
        measured_bytes=measured[-1].memory_bytes,
    )


def _table(rows: list[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("model", no_wrap=True)
    table.add_column("micro-batch × sequence", overflow="fold")
    for head in ("predicted step", "measured", "error", "predicted peak", "measured", "error"):
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(
            row.model, row.plan,
            show_seconds(row.predicted_seconds), show_seconds(row.measured_seconds),
            f"{row.seconds_error:+.1%}",
            show_bytes(row.predicted_bytes), show_bytes(row.measured_bytes),
            f"{row.bytes_error:+.1%}",
        )  # fmt: skip
    return table


def _summary(rows: list[Row]) -> str:
    seconds = [abs(row.seconds_error) for row in rows]
    nbytes = [abs(row.bytes_error) for row in rows]
    return (
        f"step time: median error {statistics.median(seconds):.1%}, worst {max(seconds):.1%}; "
        f"peak memory: median error {statistics.median(nbytes):.1%}, worst {max(nbytes):.1%}; "
        f"{len(rows)} plans"
    )
