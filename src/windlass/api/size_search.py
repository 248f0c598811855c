"""Finds the largest model that this machine trains, trains one step of it, and verifies it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from windlass.atomic_files import atomic_write, free_disk_bytes
from windlass.cost import first_step_cost
from windlass.errors import InputErrors, MachineError, PlanError, RequestError
from windlass.jobs import (
    HERE,
    RUNS,
    Planned,
    Progress,
    build_requested_model,
    capture,
    make_request,
    plan,
    prepare_data,
)
from windlass.models import model_names, published_parameter_count, takes_images
from windlass.program import disk_usage, lower
from windlass.report import describe_traffic
from windlass.schema import (
    CHECKPOINT_FOLDER,
    LARGEST_MODEL_FILE,
    STATE_FOLDER,
    LargestModelRun,
    PredictedMeasured,
    ReferenceComparison,
    Request,
    Step,
)
from windlass.training import disk_usage_bytes, make_batches, train
from windlass.units import format_bytes

MIN_STEP_TOKENS = 2048
"""Fewest tokens of the measured step."""

FREE_DISK_SHARE = 0.1
"""Share of the free disk space that must remain free."""

_MIN_STATE_BYTES = 6
"""Fewest bytes of state per parameter: a float32 master and two int8 moments."""

_ONE_STEP = ("train.steps=1", "train.save_every=1", "train.keep=1", "train.evaluate_sequences=0")

_MOMENT_FORMATS = ("moments=float32", "moments=bfloat16", "moments=int8")
"""Formats of the optimizer's moments, in the order in which they are tried."""


def largest_model(
    model: str | None = None,
    *overrides: str,
    memory: str | None = None,
    root: Path | str = RUNS,
    progress: Progress | None = None,
) -> Planned:
    """The plan of one training step of the largest model that this machine can train.

    Its state must leave a tenth of the free disk space. Each model is tried with moments in
    float32, then in smaller formats, unless an override sets the format.

    Args:
        model: try only this one; None tries all of the catalogue, largest first.
        overrides: `key=value`; the step must have at least `MIN_STEP_TOKENS` tokens.
        memory: device memory budget, such as `4GiB`; None means all of it.
        root: the folder that holds the run folders.
        progress: called with how many models have been tried.

    Raises:
        PlanError: none fits; the message says why the smallest does not.
        WindlassError: what is wrong with the overrides or the model.
    """
    candidates = (model,) if model is not None else tuple(_by_parameter_count(Path(root)))
    failure: PlanError | None = None
    for index, name in enumerate(candidates):
        if progress is not None:
            progress("looking for the largest model", index, len(candidates))
        for moments in _moment_overrides(overrides):
            request = _one_step_request(name, (*moments, *overrides), memory)
            try:
                planned = plan(request, progress=progress)
                _require_free_disk(planned, Path(root))
            except (PlanError, InputErrors) as error:
                failure = PlanError(str(error))
            else:
                return planned
    raise failure or PlanError("the catalogue has no model that fits on this disk")


def measure_largest_model(
    planned: Planned,
    *,
    root: Path | str = RUNS,
    folder: Path | None = None,
    keep_checkpoint: bool = False,
    stop: Callable[[], bool] | None = None,
    progress: Progress | None = None,
) -> LargestModelRun:
    """Trains one step, and compares it with a plain reference step of the same model.

    The run folder stays; `largest_model.json` in it holds the returned value.

    Args:
        planned: one step, as `largest_model` returns it.
        root: the folder that holds the run folders.
        folder: train into this folder instead of a new one under `root`.
        keep_checkpoint: keep the checkpoint, which is as large as the training state.
        stop: polled before each micro-batch; True ends the run.
        progress: called with how far the run and the comparison are.

    Raises:
        WindlassError: what stopped the run.
    """
    report_progress = progress or (lambda *_: None)
    run = train(planned, root=root, folder=folder, stop=stop, progress=progress)
    report_progress("initializing the state and training one step", 0, None)
    offloaded_bytes = 0
    step: Step | None = None
    for done in run:
        step = done
        # Measured now, because the files of offloaded state are deleted when the run ends.
        offloaded_bytes = disk_usage_bytes(run.folder / STATE_FOLDER)
    report_progress("initializing the state and training one step", 1, 1)
    if step is None or step.saved is None:
        raise RequestError(
            "the largest model is measured in one step that is saved; pass the result of "
            "`largest_model`"
        )
    checkpoint = run.folder / CHECKPOINT_FOLDER / step.saved
    comparison = _compare_to_reference(planned, checkpoint, step, progress)
    measured = _measurements(planned, run.folder, step, offloaded_bytes, comparison)
    atomic_write(run.folder / LARGEST_MODEL_FILE, measured.to_json())
    if not keep_checkpoint:
        shutil.rmtree(run.folder / CHECKPOINT_FOLDER, ignore_errors=True)
    return measured


def require_local(machine: str | None) -> None:
    """Refuses a machine other than this one, because nothing can run there.

    Raises:
        MachineError: it is another machine.
    """
    if machine not in (None, HERE):
        raise MachineError(
            f"the largest model is measured on `{HERE}`, not on `{machine}`; leave out the machine"
        )


def _by_parameter_count(root: Path) -> Iterator[str]:
    """Names of the models whose state may fit on this disk, largest first.

    Models without a published parameter count come last.
    """
    free = free_disk_bytes(root)
    sizes = {
        name: published_parameter_count(name) or 0.0
        for name in model_names()
        if not takes_images(name)
    }
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if _MIN_STATE_BYTES * sizes[name] <= free:
            yield name


def _moment_overrides(overrides: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Additional overrides to try: each format of the moments, or none if the user sets one.

    Nor if they name an optimizer: only AdamW's moments are stored in fewer bits.
    """
    named = ("moments=", "train.optimizer=")
    if any(override.startswith(named) for override in overrides):
        yield ()
    else:
        yield from ((override,) for override in _MOMENT_FORMATS)


def _one_step_request(model: str, overrides: tuple[str, ...], memory: str | None) -> Request:
    """A request for one step of enough tokens, without dropout."""
    request = make_request(model, *overrides, *_ONE_STEP, memory=memory)
    if ".py" not in model:
        without_dropout = request.model.model_copy(update={"dropout": 0.0})
        request = request.model_copy(update={"model": without_dropout})
    train = request.train
    max_sequence = capture(request.model_identity).max_sequence or MIN_STEP_TOKENS
    sequence = train.sequence or min(MIN_STEP_TOKENS, max_sequence)
    batch = train.batch or -(-MIN_STEP_TOKENS // sequence)
    if batch * sequence < MIN_STEP_TOKENS:
        raise RequestError(
            f"`train.batch` = {batch} with {sequence} tokens a sequence makes {batch * sequence} "
            f"tokens a step; the largest model is measured with at least {MIN_STEP_TOKENS}"
        )
    train = train.model_copy(update={"sequence": sequence, "batch": batch})
    return request.model_copy(update={"train": train})


def _require_free_disk(planned: Planned, root: Path) -> None:
    """Refuses a model whose state would fill the disk."""
    needed = disk_usage(planned.plan, planned.graph, planned.request.train).needed_bytes
    free = free_disk_bytes(root)
    if needed > (1 - FREE_DISK_SHARE) * free:
        raise PlanError(
            f"`{planned.request.model.name}` takes {format_bytes(needed)} under `{root}`, which "
            f"leaves less than {100 * FREE_DISK_SHARE:.0f} % of the {format_bytes(free)} that are "
            "free there; free some, or name another `--folder`"
        )


def _compare_to_reference(
    planned: Planned, checkpoint: Path, step: Step, progress: Progress | None
) -> ReferenceComparison:
    from windlass.runtime import compare_to_reference, reference_step

    plan, settings = planned.plan, planned.request.train
    stack = build_requested_model(planned.request.model_identity, seed=settings.seed)
    reference = reference_step(
        stack,
        make_batches(planned, prepare_data(planned.request, None)),
        seed=settings.seed,
        precision=plan.precision,
        batch=plan.batch,
        z_loss=settings.z_loss,
        progress=progress,
    )
    return compare_to_reference(
        reference, checkpoint, stack, step, settings,
        precision=plan.precision, moments=plan.moments,
    )  # fmt: skip


def _measurements(
    planned: Planned,
    folder: Path,
    step: Step,
    offloaded_bytes: int,
    comparison: ReferenceComparison,
) -> LargestModelRun:
    """The measurements of the step, each beside its prediction."""
    plan, graph, prediction = planned.plan, planned.graph, planned.prediction
    (program, *_) = lower(plan, graph)
    predicted = first_step_cost(plan, graph, planned.machine, program)
    seconds = PredictedMeasured(
        predicted=predicted.seconds, measured=step.seconds + step.flush_seconds
    )

    def per_second(count: float) -> PredictedMeasured:
        return PredictedMeasured(
            predicted=count / seconds.predicted, measured=count / seconds.measured
        )

    state_bytes = disk_usage(plan, graph, planned.request.train).state_bytes
    return LargestModelRun(
        model=planned.request.model.name,
        folder=str(folder),
        parameters=graph.parameter_count,
        precision=plan.precision,
        moments=plan.moments,
        phases=plan.phase_count,
        tokens=step.tokens,
        device_bytes=PredictedMeasured(
            predicted=prediction.peaks[0].peak_bytes, measured=step.memory_bytes
        ),
        offloaded_bytes=PredictedMeasured(predicted=state_bytes, measured=offloaded_bytes),
        read_bytes=PredictedMeasured(predicted=predicted.read_bytes, measured=step.read_bytes),
        written_bytes=PredictedMeasured(
            predicted=predicted.written_bytes, measured=step.written_bytes
        ),
        seconds=seconds,
        tokens_per_second=per_second(step.tokens),
        mfu=per_second(prediction.model_flop / prediction.peak_flop_rate),
        offload_summary=describe_traffic(prediction),
        verification=comparison,
    )
