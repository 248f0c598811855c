"""The software that runs a plan whose request names none."""

from dataclasses import replace

from windlass.errors import InputErrors, PlanError
from windlass.jobs import Planned, Progress, plan_request
from windlass.program import unmet_needs
from windlass.stacks import load_stack

_STACK = "torch"


def on_default_stack(planned: Planned, *, progress: Progress | None = None) -> Planned:
    """The plan to run, for `torch` if it is for several GPUs; its first note says why.

    Args:
        planned: what a search has found, for the stack that its request names, if any.
        progress: called with how far the search is.

    Raises:
        PlanError: nothing fits.
    """
    several = planned.plan.parallel.devices > 1 and planned.machine.device.kind == "cuda"
    if planned.request.stack is not None or not several:
        return planned
    own = f"runs on Windlass's own runtime: `{_STACK}`, the default for several GPUs,"
    if needs := unmet_needs(planned.request, load_stack(_STACK)):
        return _with_note(planned, f"{own} has no {needs[0].lacks} (`{needs[0].key}`)")
    request = planned.request.model_copy(update={"stack": _STACK})
    try:
        other = plan_request(request, planned.objects, progress)
        prediction = other.prediction
    except (InputErrors, PlanError) as error:
        return _with_note(planned, f"{own} has no plan for it: {str(error).splitlines()[0]}")
    note = (
        f"runs on PyTorch's own distributed parts, stack `{_STACK}`, the default for several GPUs; "
        f"`--stack windlass` is Windlass's own runtime ({_ratio(planned, prediction.step_seconds)})"
    )
    return _with_note(other, note)


def _ratio(own: Planned, seconds: float) -> str:
    """How long a step of the own runtime takes beside one of so many seconds."""
    return f"predicted at {own.prediction.step_seconds / seconds:.2f} of its time a step"


def _with_note(planned: Planned, note: str) -> Planned:
    return replace(planned, notes=(note, *planned.notes))
