"""What a proof holds: the events of a run that are brought into its few steps, and what is left."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.jobs import Planned
from windlass.schema import Plan, ResolvedRequest, Step
from windlass.sparsity import updates_masks

_WARMUP = 0.6
"""Share of warm-up steps: of three steps two, so that no two have the same learning rate."""

_TWICE = 2
"""How often each event of a run happens in a proof, at least."""

_FLOAT16_STEPS = 5
"""Steps with two overflows in float16, and a step that updates after each."""

_SKIPPED = ("2", "4")
"""Batches that a proof leaves out if its run leaves out some: its steps take 1, 3 and 5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofScope:
    """What the runs of a proof held."""

    events: Mapping[str, int]
    """How often each event that the request schedules happened in the compared steps."""
    not_compared: tuple[str, ...]
    """What was compared with nothing, or with less than the request asks for, in words."""


def proof_steps(request: Any, default: int) -> int:  # noqa: ANN401  of any state of completion
    """Steps of a proof in which everything that a request schedules can happen twice."""
    adapts = request.precision == "float16" and request.train.loss_scale is None
    return max(default, _FLOAT16_STEPS) if adapts else default


def proof_settings(request: ResolvedRequest, plan: Plan, *, steps: int) -> dict[str, Any]:
    """The parts of a request that are changed so that its events happen in a few steps."""
    train = request.train.model_copy(
        update={
            "steps": steps, "save_every": 1, "keep": steps, "warmup": _WARMUP,
            # Before the stop, and after it.
            "evaluate_every": max(1, steps - 1), "evaluate_tasks_every": None,
            # A micro-batch for each replica, and one that is not full.
            "evaluate_sequences": plan.batch.micro * plan.parallel.data + 1,
            "skip_batches": request.train.skip_batches and _SKIPPED,
        }
    )  # fmt: skip
    sparsity = request.sparsity
    if sparsity is not None and sparsity.changes_masks:
        # After the first steps, of which the last one sees what the masks have become.
        until = min(1.0, max(sparsity.until, (_TWICE + 0.1) / steps))
        sparsity = sparsity.model_copy(update={"every": 1, "until": until})
    return {"train": train, "sparsity": sparsity}


def overflows(planned: Planned) -> bool:
    """Whether gradients are made to overflow, as a run in float16 now and then sees it."""
    settings = planned.request.train
    return planned.plan.precision == "float16" and settings.loss_scale is None


def proof_scope(asked: Planned, proved: Planned, runs: Mapping[str, Sequence[Step]]) -> ProofScope:
    """What some runs of a proof held.

    Args:
        asked: the plan as it was asked for.
        proved: the plan that was proved.
        runs: the steps of each run that was compared.
    """
    steps = [step for name in ("plan", "epochs") for step in runs.get(name, ())]
    events = dict(_events(asked, proved, steps, len([name for name in runs if name in _COMPARED])))
    rare = [
        f"{name}: happened {_times(count)} in the proof"
        for name, count in events.items()
        if count < _TWICE
    ]
    return ProofScope(events=events, not_compared=(*rare, *_left_out(asked, proved)))


_COMPARED = ("plan", "epochs")
"""The run under the plan, and the one beside plain PyTorch."""


def _events(
    asked: Planned, proved: Planned, steps: Sequence[Step], runs: int
) -> Iterator[tuple[str, int]]:
    """Each event that a request schedules, and how often it happened in some steps."""
    settings, sparsity = asked.request.train, proved.request.sparsity
    yield "end of the warm-up", runs
    if settings.evaluate_sequences:
        yield "evaluation", sum(step.held_out_loss is not None for step in steps)
    if settings.ema is not None:
        yield (
            "evaluation of averaged weights",
            sum(step.held_out_loss_ema is not None for step in steps),
        )
    if sparsity is not None and sparsity.changes_masks:
        count = proved.request.train.steps
        yield "mask update", sum(updates_masks(sparsity, step.step, count) for step in steps)
    if settings.skip_batches:
        yield "batch left out", runs * len(_SKIPPED)
    if overflows(proved):
        yield "overflow in float16", sum(step.gradient_norm != step.gradient_norm for step in steps)


def _left_out(asked: Planned, proved: Planned) -> Iterator[str]:
    """What no comparison covers, a sentence each."""
    yield _READING.get(
        asked.request.data.format, "how examples are made: both read them from one file"
    )
    yield (
        "what attention, norms and products of a layer compute: all runs call the model's own "
        "modules, and only what packs, drops, masks, weighs or routes around them is written twice"
    )
    if asked.plan.stack is not None:
        yield (
            f"outputs of layers and their gradients, of which `{asked.plan.stack}` "
            "takes no fingerprints: weights, gradients and losses follow from them"
        )
    if any(changed := tuple(_changed_numerics(asked.plan, proved.plan))):
        yield f"rounding: the proof ran with {', '.join(changed)}"
    kept = (proved.plan.precision, proved.plan.moments)
    if kept != ("float64", "float32"):
        yield (
            f"rounding of {kept[0]} with moments in {kept[1]} beside plain PyTorch, where both are "
            "float64"
        )
    sparsity = asked.request.sparsity
    if sparsity is not None and sparsity.legs > 1:
        yield (
            f"the change of shapes between the {sparsity.legs} legs of `sparsity.schedule` = "
            f"{sparsity.schedule}: the proof holds leg {sparsity.leg}"
        )
    if asked.request.train.tasks:
        yield "scores of `train.tasks`"
    if overflows(proved):
        yield "a loss scale that doubles, after 2,000 steps without an overflow"
    yield "what more steps or a larger size show: drift, leaks, speed and memory"


_READING = {
    "text": "how text becomes tokens: both read the token files",
    "chat": "how conversations become tokens and weights: both read the token files",
    "images": "how files become pixels: both read the prepared images",
    "classes": "how texts become rows of tokens: both read the prepared rows",
}
"""What is read by none of both, by the format of the data."""


def _changed_numerics(asked: Plan, proved: Plan) -> Iterator[str]:
    """What the proof computes otherwise than the plan."""
    for key in ("precision", "moments", "compile"):
        before, after = getattr(asked, key), getattr(proved, key)
        if before != after:
            yield f"`{key}` = {_value(after)} in place of {_value(before)}"


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _times(count: int) -> str:
    return "once" if count == 1 else "never"
