"""`windlass check`: proves a plan equal to one device on which every layer stays near."""

import hashlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from windlass import api
from windlass.cli.console import ProgressBars, Report, console, print_json
from windlass.cli.isolated_process import run_isolated
from windlass.cli.options import AsJson, build_request
from windlass.cli.verification_output import VERIFICATION_STEPS, verify_and_print
from windlass.errors import RunBroken
from windlass.report.formatting import describe_phases
from windlass.schema import run_record as names
from windlass.schema.request import Request
from windlass.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDigest:
    """What a few steps of one plan left behind."""

    plan: str
    losses: tuple[float, ...]
    norms: tuple[float, ...]
    weights: str
    """SHA-256 over the names and numbers of all weights, in the order of their names."""
    predicted_seconds: float
    measured_seconds: float
    """Of the last step."""
    predicted_bytes: int
    measured_bytes: int


def check(
    model: str | None = None,
    *overrides: str,
    plan: Path | None = None,
    memory: str | None = None,
    file: Path | None = None,
    faults: bool = False,
    as_json: AsJson = False,
) -> None:
    """Train some steps under a plan and on one device, and compare all that the two compute.

    A plan of several devices runs on as many local processes: losses, norms, what each layer puts
    out and passes down, every gradient and every weight are compared, in float64 where that can be.
    A plan of one device in phases is compared bit for bit with the run in memory. The exit code is
    0 if all is equal, and 1 if not.

    Args:
        model: a name (`windlass models` lists them), `file.py:function` of your own, or the TOML
            file of a plan.
        overrides: `key=value`, such as `parallel.pipeline=2`, `phases=12` or `train.steps=5`.
        plan: the TOML file of a plan; one too large for this machine is proved in small.
        near: budget for the near memory, such as `4GiB`.
        file: a request in TOML.
        faults: make mistakes on purpose too, and see that each is found.
        as_json: print what was compared as JSON.
    """
    if plan is None and model is not None and model.endswith(".toml"):
        plan, model = Path(model), None
    with ProgressBars() as progress:
        request = _short(
            build_request(model, overrides, on=None, memory=memory, file=file), overrides
        )
        if plan is not None:
            planned, notes = _from_file(plan, request, model, progress)
        else:
            planned, notes = api.plan(request, progress=progress), ()
        if plan is None and not faults and planned.plan.parallel.devices == 1:
            _in_memory(request, planned, progress, as_json=as_json)
        else:
            verify_and_print(planned, notes, progress, faults=faults, as_json=as_json)


def _from_file(
    path: Path, request: Request, model: str | None, progress: Report
) -> tuple[api.Planned, tuple[str, ...]]:
    """A plan's file made ready for this machine: as it is if it can be, else in small."""
    plan = api.load_plan(path)
    name = model or plan.graph.partition("@")[0]
    named = request.model_copy(
        update={"model": request.model.model_copy(update={"name": name})}
    )  # fmt: skip
    found = api.rehearse_as_is(plan, named, progress=progress)
    if found is not None:
        return found, ()
    return api.downscale_plan(plan, named, progress=progress)


def _in_memory(
    request: Request, planned: api.Planned, progress: Report, *, as_json: bool
) -> None:  # fmt: skip
    """Holds a plan of one device against the run whose layers are all near, bit for bit."""
    # The same arithmetic in the same order, all of it near.
    whole = request.model_copy(
        update={
            "memory": None,
            "phases": 1,
            "precision": planned.plan.precision,
            "compile": planned.plan.compile,
            "batch": request.batch.model_copy(update={"micro": planned.plan.batch.micro}),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        runs = []
        for turn, each in enumerate((request, whole)):
            progress("checking", turn, 2)
            runs.append(_run(each, Path(folder) / str(turn)))
        progress("checking", 2, 2)
    one, other = runs
    if as_json:
        print_json({"checked": one, "in_memory": other, "equal": _equal(one, other)})
    else:
        console.print(_table(one, other))
    if not _equal(one, other):
        sys.exit(1)


def _short(request: Request, overrides: tuple[str, ...]) -> Request:
    """The request with a few steps, unless it says how many."""
    asked = any(override.startswith("train.steps=") for override in overrides)
    steps = request.train.steps if asked else VERIFICATION_STEPS
    rarely = {"steps": steps, "evaluate_every": steps + 1, "save_every": steps + 1}
    return request.model_copy(update={"train": request.train.model_copy(update=rarely)})


def _run(request: Request, place: Path) -> RunDigest:
    """Trains in a process of its own, whose memory is then its own too.

    Raises:
        RunBroken: it ended with an error.
    """
    asked = place.with_suffix(".toml")
    request.save(asked)
    run_isolated("windlass", "train", "--file", str(asked), "--folder", str(place))
    record = api.load(place)
    if record.plan is None or record.prediction is None:
        raise RunBroken(f"`{place}` holds no plan")
    last = record.steps[-1]
    return RunDigest(
        plan=describe_phases(record.plan),
        losses=tuple(step.loss for step in record.steps),
        norms=tuple(step.gradient_norm for step in record.steps),
        weights=_weights(place / names.CHECKPOINT_FOLDER / str(last.saved)),
        predicted_seconds=record.prediction.step_seconds,
        measured_seconds=last.seconds,
        predicted_bytes=record.prediction.peaks[0].peak_bytes,
        measured_bytes=last.memory_bytes,
    )


def _weights(checkpoint: Path) -> str:
    """The hash of all weights of a checkpoint, wherever in their files they lie."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            names_of = file.keys()
            for name in sorted(key for key in names_of if key.startswith("weight/")):
                digest.update(name.encode())
                digest.update(file.get_tensor(name).tobytes())
    return digest.hexdigest()


def _equal(one: RunDigest, other: RunDigest) -> bool:
    mine, its = ((run.losses, run.norms, run.weights) for run in (one, other))
    return mine == its


def _table(one: RunDigest, other: RunDigest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_verdict(one, other),
                  title_justify="left", title_style="bold")  # fmt: skip
    for head in ("", "checked", "in memory"):
        table.add_column(head, overflow="fold")
    for name, *cells in (
        ("plan", one.plan, other.plan),
        ("weights", one.weights[:16], other.weights[:16]),
        ("loss", f"{one.losses[-1]:.6f}", f"{other.losses[-1]:.6f}"),
        ("gradient norm", f"{one.norms[-1]:.6f}", f"{other.norms[-1]:.6f}"),
        ("predicted peak", format_bytes(one.predicted_bytes), format_bytes(other.predicted_bytes)),
        ("measured peak", format_bytes(one.measured_bytes), format_bytes(other.measured_bytes)),
        ("predicted step", format_seconds(one.predicted_seconds),
         format_seconds(other.predicted_seconds)),
        ("measured step", format_seconds(one.measured_seconds),
         format_seconds(other.measured_seconds)),
    ):  # fmt: skip
        table.add_row(name, *cells)
    return table


def _verdict(one: RunDigest, other: RunDigest) -> str:
    if _equal(one, other):
        return f"equal bit for bit after {len(one.losses)} steps"
    pairs = zip(one.losses, other.losses, strict=True)
    differs = next((step for step, (a, b) in enumerate(pairs, 1) if a != b), None)
    if differs is None:
        return "NOT EQUAL: the losses are, norms or weights are not"
    return f"NOT EQUAL: the losses differ from step {differs} on"
