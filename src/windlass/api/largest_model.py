"""Biggest: finds the largest model that this machine trains, trains a step of it, proves it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.api.machines import HERE, Progress
from windlass.api.model_graph import build_requested_model, capture
from windlass.api.plan import Planned, make_request, plan
from windlass.api.runs import RUNS
from windlass.api.training.disk_check import disk_usage_bytes
from windlass.api.training.setup import prepare_batches
from windlass.api.training.train import train
from windlass.atomic_files import atomic_write, free_disk_bytes
from windlass.cost.simulator.offload_queue import first_step_cost
from windlass.errors import InputErrors, MachineError, PlanError, RequestError
from windlass.models.catalog import model_names as model_names
from windlass.models.catalog import published_parameter_count
from windlass.program.lowering.lower import lower
from windlass.program.memory.disk_usage import disk_usage
from windlass.report.formatting import describe_traffic
from windlass.schema import run_record as names
from windlass.schema.largest_model import LargestModelRun, PredictedMeasured, ReferenceComparison
from windlass.schema.request import Request
from windlass.schema.run_record import Step
from windlass.units import format_bytes

if TYPE_CHECKING:
    from windlass.models.layer_stack import LayerStack

MIN_STEP_TOKENS = 2048
"""Of the step that counts."""

FREE_DISK_SHARE = 0.1
"""Share of the free disk that is left to everybody else."""

_LEAST_STATE_BYTES = 6
"""A parameter's master, and two moments of 8 bits: no plan keeps less."""

_ONE_STEP = ("train.steps=1", "train.save_every=1", "train.keep=1", "train.evaluate_sequences=0")

_MOMENTS = ("moments=float32", "moments=bfloat16", "moments=int8")
"""Tried in this order."""


def largest_model(
    model: str | None = None,
    *overrides: str,
    memory: str | None = None,
    root: Path | str = RUNS,
    progress: Progress | None = None,
) -> Planned:
    """The plan of one step of the largest named model that this machine trains.

    Its state must leave a tenth of the free disk. Each model is tried with moments in float32,
    then in fewer bits, unless they are asked for.

    Args:
        model: only this one; None tries all of the catalogue, by parameters.
        overrides: `key=value`; a step has `LEAST_TOKENS` at least.
        near: budget for the near tier, such as `4GiB`.
        root: where its run folder would lie.
        progress: told which model is tried.

    Raises:
        PlanError: none fits; the message says why the smallest does not.
        WindlassError: what is wrong with the overrides or the model.
    """
    tried = (model,) if model is not None else tuple(_by_parameters(Path(root)))
    refusal: PlanError | None = None
    for turn, name in enumerate(tried):
        if progress is not None:
            progress("looking for the largest model", turn, len(tried))
        for moments in _moments(overrides):
            asked = _one_step(name, (*moments, *overrides), memory)
            try:
                planned = plan(asked, progress=progress)
                _require_spare(planned, Path(root))
            except (PlanError, InputErrors) as error:
                refusal = PlanError(str(error))
            else:
                return planned
    raise refusal or PlanError("the catalogue names no model that this disk has room for")


def measure_largest_model(
    planned: Planned,
    *,
    root: Path | str = RUNS,
    folder: Path | None = None,
    keep_checkpoint: bool = False,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> LargestModelRun:
    """Trains one step, and holds it against a plain walk over the same model.

    The run's folder stays, with what is returned in `largest_model.json`.

    Args:
        planned: of one step, as `largest` gives it.
        root: where run folders lie.
        folder: trains into this folder in place of a new one under `root`.
        keep_checkpoint: leaves the checkpoint too, which is as large as the state.
        stop: asked before each micro-batch; True ends the run.
        progress: told how far it is.

    Raises:
        WindlassError: what stopped the run.
    """
    tell = progress or (lambda *_: None)
    run = train(planned, root=root, folder=folder, stop=stop, progress=progress)
    tell("making the state and training one step", 0, None)
    far = 0
    step: Step | None = None
    for done in run:
        step = done
        # While it is there: the state's files go when the run ends.
        far = disk_usage_bytes(run.folder / names.STATE_FOLDER)
    tell("making the state and training one step", 1, 1)
    if step is None or step.saved is None:
        raise RequestError("a record is one step, saved; give what `largest` gives")
    checkpoint = run.folder / names.CHECKPOINT_FOLDER / step.saved
    verified = _verified(planned, checkpoint, step, progress)
    recorded = _recorded(planned, run.folder, step, far, verified)
    atomic_write(run.folder / names.LARGEST_MODEL_FILE, recorded.to_json())
    if not keep_checkpoint:
        shutil.rmtree(run.folder / names.CHECKPOINT_FOLDER, ignore_errors=True)
    return recorded


def require_local(machine: str | None) -> None:
    """Refuses a machine that nothing can be run on.

    Raises:
        MachineError: it is not this one.
    """
    if machine not in (None, HERE):
        raise MachineError(
            f"a record is measured on `{HERE}`, and not on `{machine}`: leave it out"
        )


def _by_parameters(root: Path) -> Iterator[str]:
    """The catalogue's models that this disk may hold, largest first; then those of no source."""
    free = free_disk_bytes(root)
    sizes = {name: published_parameter_count(name) or 0.0 for name in model_names()}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if _LEAST_STATE_BYTES * sizes[name] <= free:
            yield name


def _moments(overrides: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """What to ask for of the moments: as the user does, else each format in turn."""
    if any(override.startswith("moments=") for override in overrides):
        yield ()
    else:
        yield from ((each,) for each in _MOMENTS)


def _one_step(model: str, overrides: tuple[str, ...], near: str | None) -> Request:
    """The request of one step of enough tokens, in which nothing is dropped.

    Raises:
        RequestError: it asks for too few tokens.
    """
    asked = make_request(model, *overrides, *_ONE_STEP, memory=near)
    if ".py" not in model:
        asked = asked.model_copy(update={"model": asked.model.model_copy(update={"dropout": 0.0})})
    train = asked.train
    longest = capture(asked.model).max_sequence or MIN_STEP_TOKENS
    sequence = train.sequence or min(MIN_STEP_TOKENS, longest)
    batch = train.batch
    if not any(override.startswith("train.batch=") for override in overrides):
        batch = -(-MIN_STEP_TOKENS // sequence)
    if batch * sequence < MIN_STEP_TOKENS:
        raise RequestError(
            f"`train.batch` = {batch} of {sequence} tokens are {batch * sequence} a step; a record "
            f"takes {MIN_STEP_TOKENS} at least"
        )
    changed = train.model_copy(update={"sequence": sequence, "batch": batch})
    return asked.model_copy(update={"train": changed})


def _require_spare(planned: Planned, root: Path) -> None:
    """Refuses a model whose state would fill the disk.

    Raises:
        PlanError: nothing fits, or too little of the disk would be left.
    """
    needed = disk_usage(planned.plan, planned.graph, planned.request.train).needed_bytes
    free = free_disk_bytes(root)
    if needed > (1 - FREE_DISK_SHARE) * free:
        raise PlanError(
            f"`{planned.request.model.name}` takes {format_bytes(needed)} under `{root}`, which "
            f"leaves less than {100 * FREE_DISK_SHARE:.0f} % of the {format_bytes(free)} that are free there; "
            "free some, or name another `--folder`"
        )


def _verified(
    planned: Planned, checkpoint: Path, step: Step, progress: Progress | None
) -> ReferenceComparison:
    from windlass.runtime.verify.compare_to_reference import compare_to_reference
    from windlass.runtime.verify.reference_model import reference_step

    plan, train = planned.plan, planned.request.train
    chain: LayerStack = build_requested_model(planned.request.model, seed=train.seed)
    reference = reference_step(
        chain,
        prepare_batches(planned),
        seed=train.seed,
        precision=plan.precision,
        batch=plan.batch,
        progress=progress,
    )
    return compare_to_reference(
        reference, checkpoint, chain, step, train,
        precision=plan.precision, moments=plan.moments,
    )  # fmt: skip


def _recorded(
    planned: Planned, folder: Path, step: Step, far: int, verified: ReferenceComparison
) -> LargestModelRun:
    """What was measured, beside what was predicted for this one step."""
    plan, graph, prediction = planned.plan, planned.graph, planned.prediction
    (program, *_) = lower(plan, graph)
    alone = first_step_cost(plan, graph, planned.machine, program)
    seconds = PredictedMeasured(predicted=alone.seconds, measured=step.seconds + step.flush_seconds)

    def over(count: float) -> PredictedMeasured:
        return PredictedMeasured(
            predicted=count / seconds.predicted, measured=count / seconds.measured
        )

    lying = disk_usage(plan, graph, planned.request.train).state_bytes
    return LargestModelRun(
        model=planned.request.model.name,
        folder=str(folder),
        parameters=graph.parameter_count,
        precision=plan.precision,
        moments=plan.moments,
        phases=len(plan.stages[0].phases),
        tokens=step.tokens,
        device_bytes=PredictedMeasured(
            predicted=prediction.peaks[0].peak_bytes, measured=step.memory_bytes
        ),
        offloaded_bytes=PredictedMeasured(predicted=lying, measured=far),
        read_bytes=PredictedMeasured(predicted=alone.read_bytes, measured=step.read_bytes),
        written_bytes=PredictedMeasured(predicted=alone.written_bytes, measured=step.written_bytes),
        seconds=seconds,
        tokens_per_second=over(step.tokens),
        mfu=over(prediction.model_flop / prediction.peak_flop_rate),
        offload_summary=describe_traffic(prediction),
        verification=verified,
    )
