"""The legs of a run whose weights change their shapes: each is a plan and an attempt of its own.

A leg ends with a checkpoint. The next one begins as a resumed run does, under another plan, from
that checkpoint with its layers converted. So a run that is killed anywhere goes on as if it had not
been.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from windlass.errors import PlanError
from windlass.jobs import Planned, Progress, plan_request
from windlass.planner import explain_result
from windlass.schema import CHECKPOINT_FOLDER, CONVERTED_CHECKPOINT_FOLDER, Request
from windlass.sparsity import describe_leg, leg_of_step, legs, sparsity_of_leg
from windlass.training.parent import ParentRun, with_whole_layers
from windlass.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from windlass.runtime import Checkpoint

R = TypeVar("R", bound=Request)


def request_at_step(request: R, step: int) -> R:
    """The request of the leg in which a step runs; itself if the run has one leg only.

    Args:
        step: the step, counted from 1; after the last one it is the last leg's.
    """
    sparsity, steps = request.sparsity, request.train.steps
    if sparsity is None or sparsity.legs == 1 or steps is None:
        return request
    return _of_leg(request, leg_of_step(sparsity, min(step, steps), steps).number)


def _of_leg(request: R, number: int) -> R:
    if request.sparsity is None or request.sparsity.leg == number:
        return request
    sparsity = request.sparsity.model_copy(update={"leg": number})
    return request.model_copy(update={"sparsity": sparsity})


def plan_later_legs(
    planned: Planned, parent: ParentRun | None, progress: Progress | None
) -> Planned:
    """What a new run begins with; its notes say what is predicted for each later leg.

    Args:
        parent: the run that it starts from. One that does not go on with its steps keeps the
            layers that the parent ended with.

    Raises:
        PlanError: the run would not begin with the planned leg, or a later leg does not fit.
    """
    request, sparsity = planned.request, planned.request.sparsity
    if sparsity is None or sparsity.legs == 1:
        return planned
    steps = request.train.steps
    first = parent.step + 1 if parent is not None and parent.continues else 1
    if request_at_step(request, first) != request:
        if parent is not None and not parent.continues:
            return as_single_leg(planned)
        raise PlanError(
            f"the plan is of leg {sparsity.leg} of `sparsity.schedule` = {sparsity.schedule}, and "
            f"step {first} of the run is in {describe_leg(sparsity, first, steps)}; set "
            f"`sparsity.leg` = {leg_of_step(sparsity, first, steps).number}"
        )
    notes = []
    for leg in legs(sparsity, steps)[sparsity.leg + 1 :]:
        if leg.first <= leg.last:
            later = plan_request(_of_leg(request, leg.number), planned.objects, progress)
            words = describe_leg(sparsity, leg.first, steps)
            if not later.result.fits:
                raise PlanError(f"{words} does not fit: {explain_result(later.result).verdict}")
            step, peak = later.prediction.step_seconds, later.prediction.peaks[0].peak_bytes
            notes.append(
                f"{words}: predicted {format_seconds(step)} a step, {format_bytes(peak)} at the "
                "peak"
            )
    return replace(planned, notes=(*planned.notes, *notes))


def as_single_leg(planned: Planned) -> Planned:
    """The same plan for a run whose layers stay as they are in the planned leg."""
    request, sparsity = planned.request, planned.request.sparsity
    if sparsity is None or sparsity.legs == 1:
        return planned
    of_leg = sparsity_of_leg(sparsity)
    static = of_leg and of_leg.model_copy(update={"schedule": "static", "leg": 0})
    request = request.model_copy(update={"sparsity": static})
    plan = planned.plan.model_copy(update={"model": request.model_identity})
    return replace(planned, request=request, result=replace(planned.result, plan=plan))


def start_of_leg(checkpoint: "Checkpoint", planned: Planned, folder: Path) -> "Checkpoint":
    """The checkpoint that an attempt starts from: shards merged, layers as the leg has them.

    Args:
        checkpoint: a checkpoint of the run, perhaps of another leg than the planned one.
        folder: the run folder, which receives the files until the first step.

    Raises:
        CheckpointError: a shard is missing.
    """
    saved = request_at_step(planned.request, checkpoint.manifest.step)
    whole = with_whole_layers(checkpoint, replace(planned, request=saved), folder)
    if saved == planned.request:
        return whole
    from windlass.runtime import convert_checkpoint

    old, new = (
        planned.objects.stack(request.model_identity, seed=None)
        for request in (saved, planned.request)
    )
    into = folder / CHECKPOINT_FOLDER / CONVERTED_CHECKPOINT_FOLDER
    return convert_checkpoint(whole, old, new, into, graph=planned.plan.graph)


def refuse_offloaded_masks(planned: Planned) -> None:
    """Refuses masks that change while optimizer state is offloaded.

    Raises:
        PlanError: the schedule changes masks, and the optimizer state is offloaded.
    """
    sparsity = planned.request.sparsity
    if sparsity is None or not sparsity.changes_masks or not planned.plan.is_offloaded("optimizer"):
        return
    raise PlanError(
        f"`sparsity.schedule` = {sparsity.schedule} resets blocks of the optimizer state, which "
        "must be in device memory for that and is offloaded in this plan; allow more `memory`, "
        "set `phases` = 1, or set `sparsity.schedule` = static, gradual or then-dense"
    )
