"""`windlass check`: verifies that a plan computes what a single device computes."""

import hashlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.table import Table

from windlass import api
from windlass.cli.command_options import SEARCHED_PLAN, AsJson, PlanOptions, build_request
from windlass.cli.console import ProgressBars, console, print_json
from windlass.cli.isolated_process import run_isolated
from windlass.cli.verification_output import VERIFICATION_STEPS, verify_and_print
from windlass.errors import RunBroken
from windlass.report import describe_phases
from windlass.schema import CHECKPOINT_FOLDER, Request
from windlass.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDigest:
    """The results of a few steps under one plan."""

    plan: str
    """A short description of the plan."""
    losses: tuple[float, ...]
    """Loss in nats a token, one for each step."""
    norms: tuple[float, ...]
    """Global gradient norm, one for each step."""
    weights: str
    """SHA-256 over names and bytes of all final weights, in the order of their names."""
    predicted_seconds: float
    """Predicted time of one step."""
    measured_seconds: float
    """Measured time of the last step."""
    predicted_bytes: int
    """Predicted peak of device memory."""
    measured_bytes: int
    """Measured peak of device memory."""


def check(
    model: str | None = None,
    *overrides: str,
    options: PlanOptions = SEARCHED_PLAN,
    faults: bool = False,
    as_json: AsJson = False,
) -> None:
    """Train a few steps under a plan and on one device, and compare everything they compute.

    A plan for several devices runs on as many local processes. Losses, gradient norms, every
    layer's output and input gradient, every weight gradient and every weight are compared, in
    float64 where possible. A plan for one device in phases is compared bit for bit with a run that
    keeps all layers in memory. The exit code is 0 if everything is equal, and 1 if not.

    For example: `windlass check gpt-tiny parallel.pipeline=2 parallel.data=2`.

    Args:
        model: A name (`windlass models` lists them), your own `file.py:function`, or the TOML
            file of a plan.
        overrides: `key=value`, such as `parallel.pipeline=2`, `phases=12` or `train.steps=5`.
        options: Device memory budget, request file, and a plan file in place of a search; if the
            plan is too large for this machine, a downscaled one of the same structure is checked.
        faults: Also inject faults, and check that each is detected and its layer named.
        as_json: Print the comparison as JSON.
    """
    plan = options.plan
    if plan is None and model is not None and model.endswith(".toml"):
        plan, model = Path(model), None
    with ProgressBars() as progress:
        request = _shortened(build_request(model, overrides, options), overrides)
        if plan is not None:
            planned, notes = _from_file(plan, request, progress)
        else:
            planned, notes = api.plan(request, progress=progress), ()
        if plan is None and not faults and planned.plan.parallel.devices == 1:
            _compare_with_in_memory_run(request, planned, progress, as_json=as_json)
        else:
            verify_and_print(planned, notes, progress, faults=faults, as_json=as_json)


def _from_file(
    path: Path, request: Request, progress: api.Progress
) -> tuple[api.Planned, tuple[str, ...]]:
    """A plan from a file, downscaled if this machine needs it; and the changes, a sentence each."""
    plan, request = api.load_plan(path, request)
    planned = api.rehearse_as_is(plan, request, progress=progress)
    if planned is not None:
        return planned, ()
    return api.downscale_plan(plan, request, progress=progress)


def _compare_with_in_memory_run(
    request: Request, planned: api.Planned, progress: api.Progress, *, as_json: bool
) -> None:
    """Compares a single-device plan, bit for bit, with a run that keeps all layers in memory."""
    # The same arithmetic in the same order, without phases or a memory budget.
    in_memory = request.model_copy(
        update={
            "memory": None,
            "phases": 1,
            "precision": planned.plan.precision,
            "compile": planned.plan.compile,
            "batch": request.batch.model_copy(update={"micro": planned.plan.batch.micro}),
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        digests = []
        for index, each in enumerate((request, in_memory)):
            progress("checking", index, 2)
            digests.append(_run(each, Path(folder) / str(index)))
        progress("checking", 2, 2)
    checked, reference = digests
    if as_json:
        equal = _equal(checked, reference)
        print_json({"checked": checked, "in_memory": reference, "equal": equal})
    else:
        console.print(_table(checked, reference))
    if not _equal(checked, reference):
        sys.exit(1)


def _shortened(request: Request, overrides: tuple[str, ...]) -> Request:
    """The request with `VERIFICATION_STEPS` steps, unless an override sets their number."""
    explicit = any(override.startswith("train.steps=") for override in overrides)
    steps = request.train.steps if explicit and request.train.steps else VERIFICATION_STEPS
    changes = {"steps": steps, "evaluate_every": steps + 1, "save_every": steps + 1}
    return request.model_copy(update={"train": request.train.model_copy(update=changes)})


def _run(request: Request, folder: Path) -> RunDigest:
    """Trains in a process of its own, so that its peak memory is its own too.

    Raises:
        RunBroken: the process ended with an error.
    """
    request_file = folder.with_suffix(".toml")
    request.save(request_file)
    run_isolated("windlass", "train", "--file", str(request_file), "--folder", str(folder))
    record = api.load(folder)
    if record.plan is None or record.prediction is None:
        raise RunBroken(f"`{folder}` holds no plan")
    last = record.steps[-1]
    return RunDigest(
        plan=describe_phases(record.plan),
        losses=tuple(step.loss for step in record.steps),
        norms=tuple(step.gradient_norm for step in record.steps),
        weights=_weights_sha256(folder / CHECKPOINT_FOLDER / str(last.saved)),
        predicted_seconds=record.prediction.step_seconds,
        measured_seconds=last.seconds,
        predicted_bytes=record.prediction.peaks[0].peak_bytes,
        measured_bytes=last.memory_bytes,
    )


def _weights_sha256(checkpoint: Path) -> str:
    """The hash of all weights of a checkpoint, independent of their place within the files."""
    from safetensors import safe_open

    digest = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            keys = file.keys()
            for name in sorted(key for key in keys if key.startswith("weight/")):
                digest.update(name.encode())
                digest.update(file.get_tensor(name).tobytes())
    return digest.hexdigest()


def _equal(checked: RunDigest, reference: RunDigest) -> bool:
    return all(
        getattr(checked, name) == getattr(reference, name)
        for name in ("losses", "norms", "weights")
    )


def _table(checked: RunDigest, reference: RunDigest) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=_verdict(checked, reference),
                  title_justify="left", title_style="bold")  # fmt: skip
    for head in ("", "checked", "in memory"):
        table.add_column(head, overflow="fold")
    columns = [_cells(digest) for digest in (checked, reference)]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _cells(digest: RunDigest) -> dict[str, str]:
    """One column of the table, by row name."""
    return {
        "plan": digest.plan,
        "weights": digest.weights[:16],
        "loss": f"{digest.losses[-1]:.6f}",
        "gradient norm": f"{digest.norms[-1]:.6f}",
        "predicted peak": format_bytes(digest.predicted_bytes),
        "measured peak": format_bytes(digest.measured_bytes),
        "predicted step": format_seconds(digest.predicted_seconds),
        "measured step": format_seconds(digest.measured_seconds),
    }


def _verdict(checked: RunDigest, reference: RunDigest) -> str:
    if _equal(checked, reference):
        return f"equal bit for bit after {len(checked.losses)} steps"
    pairs = zip(checked.losses, reference.losses, strict=True)
    differs = next((step for step, (a, b) in enumerate(pairs, 1) if a != b), None)
    if differs is None:
        return "NOT EQUAL: the losses agree, but gradient norms or weights differ"
    return f"NOT EQUAL: the losses differ from step {differs} on"
