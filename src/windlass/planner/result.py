"""Result of planning: the chosen plan, runners-up, plans that do not fit, and advice."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from windlass.planner.recompute_layers import recompute_layers, show_recompute_layers
from windlass.program import Instruction
from windlass.schema import MemoryClass, Plan, Prediction

EvaluatedPlan = tuple[Plan, Prediction]
"""A plan and what it is predicted to cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that fits and lost."""

    plan: Plan
    prediction: Prediction
    differs: Mapping[str, str]
    """Where it differs from the chosen plan: request key -> its value."""
    run_seconds: float
    """Predicted seconds of all steps and of the compilation before them."""
    slower_seconds: float
    """How much longer its run takes than the chosen plan's."""
    term: str
    """The cost term that loses most of that: a key of `by_term`, or `compile`."""
    term_seconds: float
    """Seconds that this term loses over the whole run; negative if it gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShortage:
    """An offload tier that is too small for what would have to be offloaded to it."""

    tier: str
    needed_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasiblePlan:
    """The plan that comes nearest to fitting in one family.

    A family shares a tensor-parallel degree, precision, mode and recompute.
    """

    plan: Plan
    peak_bytes: int
    over_bytes: int
    by_class: Mapping[MemoryClass, int]
    """Bytes by memory class at the fullest moment."""
    instruction: Instruction
    tiers: tuple[TierShortage, ...] = ()
    """Offload tiers that are too small for the plan."""

    def fullness(self, budget_bytes: int) -> float:
        """Share of its fullest tier that the plan needs, above 1."""
        tiers = (each.needed_bytes / each.capacity_bytes for each in self.tiers)
        return max(self.peak_bytes / budget_bytes, *tiers, 0.0)

    @property
    def largest_class(self) -> MemoryClass:
        """The memory class that takes most at that moment."""
        return max(self.by_class, key=self.by_class.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change to the request that makes it fit."""

    overrides: tuple[str, ...]
    """Overrides as written on the command line: `recompute=full`."""
    plan: Plan
    peak_bytes: int
    cost: float
    """Relative change of predicted seconds a token: 0.28 is 28 % slower, negative is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice on a request that does not fit."""

    budget_bytes: int
    """Device memory budget that was asked for."""
    needed_bytes: int
    """The smallest device memory that would do, all else as asked."""
    nearest: Plan
    """The plan that needs so much."""
    over_bytes: int
    """Bytes by which the nearest plan exceeds the budget."""
    by_class: Mapping[MemoryClass, int]
    """Bytes by memory class at the nearest plan's fullest moment."""
    changes: tuple[Change, ...]
    """Changes that make it fit, cheapest first; none if only more memory helps."""
    state_bytes: int
    """Bytes of weights, gradients and optimizer state, which any plan must hold somewhere."""
    machine_devices: int = 1
    """Devices of the machine that was asked for."""
    nearest_tiers: tuple[TierShortage, ...] = ()
    """Offload tiers that are too small for the nearest plan."""
    tier_shortages: tuple[TierShortage, ...]
    """Offload tiers that could hold the model in phases if they were larger."""
    devices: int | None
    """Devices whose memory that state takes at least; None if the process alone fills one."""
    in_phases: tuple[str, ...] = ()
    """On several devices: what the nearest plan in phases lacks, and what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRank:
    """A plan that a request pins, beside the fastest of all that it could have left open."""

    compared: int
    """Number of plans without the pins."""
    plan: Plan | None
    """The fastest plan without the pins; None if none is faster than the pinned one."""
    best: RunnerUp | None
    """Comparison of the pinned plan with the fastest one, as a runner-up of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """The outcome of planning; exactly one of `plan` and `advice` is set."""

    plan: Plan | None
    prediction: Prediction | None
    """Prediction of the chosen plan."""
    run_seconds: float | None = None
    """Predicted seconds of all steps and of the compilation before them."""
    fastest: RunnerUp | None = None
    """The proved fastest plan, where it is not the chosen one because it leaves no margin."""
    runners_up: tuple[RunnerUp, ...] = ()
    """The next best plans, fastest first."""
    infeasible: tuple[InfeasiblePlan, ...] = ()
    """Plans that do not fit, nearest first."""
    advice: Advice | None = None
    evaluated: int = 0
    """Number of plans that were compared."""
    axes: str = ""
    """Which choices the search had, which ones were pinned, and which ones there are none of."""
    pinned_rank: PinnedRank | None = None
    """Rank of the chosen plan without the request's pins; None on one device or if nothing is
    pinned."""
    sensitivity: Mapping[str, float] = field(default_factory=dict)
    """Share of a step that a 10 % better constant would save, by constant of the machine."""
    larger_batch: Change | None = None
    """The same plan with twice the batch; None where that takes as long a token."""

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.plan is not None


def differences(plan: Plan, other: Plan) -> dict[str, str]:
    """Where another plan differs, as a request would write it: key -> the other plan's value."""
    ours, theirs = request_values(plan), request_values(other)
    return {key: value for key, value in theirs.items() if value != ours[key]}


def request_values(plan: Plan) -> dict[str, str]:
    """What a request can name of a plan."""
    parallel, sharding = plan.parallel, plan.sharding
    values: dict[str, object] = {
        "parallel.pipeline": parallel.pipeline,
        "parallel.tensor": parallel.tensor,
        "parallel.data": parallel.data,
        "parallel.context": parallel.context or 1,
        "parallel.expert": parallel.expert_degree,
        "sharding.parameters": sharding.parameters,
        "sharding.reshard": str(bool(sharding.reshard)).lower(),
        "sharding.optimizer": sharding.optimizer,
        "offload.optimizer": plan.offload.optimizer,
        "parallel.schedule": parallel.schedule,
        "parallel.virtual_stages": parallel.virtual_stages,
        "precision": plan.precision,
        "compile": str(plan.compile).lower(),
        "loss": plan.loss or "plain",
        "attention": plan.attention or "flash",
        "recompute": plan.recompute,
        "recompute_layers": show_recompute_layers(recompute_layers(plan)),
        "batch.micro": plan.batch.micro,
        "phases": plan.phase_count,
        "train.sequence": plan.batch.sequence,
    }
    return {key: str(value) for key, value in values.items()}


def best_of_families(best: Plan, ranked: Iterable[Plan]) -> tuple[Plan, ...]:
    """The first plan of each family that lost: with another precision, mode, degree, schedule, ...

    Args:
        ranked: plans from which to take them, the fastest first.
    """
    chosen = _family(best)
    first: dict[str, Plan] = {}
    for plan in ranked:
        for trait, value in _family(plan).items():
            if value != chosen[trait]:
                first.setdefault(trait, plan)
    return tuple(dict.fromkeys(first.values()))


def _family(plan: Plan) -> dict[str, object]:
    """The traits by which a user tells plans apart."""
    return {
        "precision": plan.precision,
        "compile": plan.compile,
        "loss": plan.loss,
        "attention": plan.attention,
        "recompute": plan.recompute,
        "phases": plan.is_offloaded("parameters"),
        "optimizer": plan.offload.optimizer,
        "pipeline": plan.parallel.pipeline,
        "tensor": plan.parallel.tensor,
        "schedule": plan.parallel.schedule,
        "sharding": (plan.sharding.parameters > 1, plan.sharding.optimizer > 1),
        "micro-batch": plan.batch.micro,
    }


def runner_up(best: EvaluatedPlan, other: EvaluatedPlan, steps: int) -> RunnerUp:
    """A plan's loss against the chosen one over a run of this many steps."""
    (plan, prediction), (loser, loser_prediction) = best, other
    losses = {
        term: steps * (loser_prediction.by_term.get(term, 0.0) - prediction.by_term.get(term, 0.0))
        for term in {**prediction.by_term, **loser_prediction.by_term}
    }
    losses["compile"] = loser_prediction.compile_seconds - prediction.compile_seconds
    term = max(losses, key=losses.__getitem__)
    seconds = run_seconds(loser_prediction, steps)
    return RunnerUp(
        plan=loser,
        prediction=loser_prediction,
        differs=differences(plan, loser),
        run_seconds=seconds,
        slower_seconds=seconds - run_seconds(prediction, steps),
        term=term,
        term_seconds=losses[term],
    )


def run_seconds(prediction: Prediction, steps: int) -> float:
    """Predicted seconds of a run of `steps`, including compilation."""
    return prediction.step_seconds * steps + prediction.compile_seconds


def with_budget(prediction: Prediction, budget_bytes: int) -> Prediction:
    """The prediction with another capacity of device memory, which is the first tier."""
    device, *others = prediction.peaks
    device = device.model_copy(update={"capacity_bytes": budget_bytes})
    return prediction.model_copy(update={"peaks": (device, *others)})
