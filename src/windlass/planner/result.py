"""Choice: what a search found, what came next, what did not fit and what would help."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from windlass.planner.search.extrapolate import PeakMemory
from windlass.program.instruction import Instruction
from windlass.schema.plan import Plan
from windlass.schema.prediction import MemoryClass, Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A plan that fits and lost."""

    plan: Plan
    prediction: Prediction
    differs: Mapping[str, str]
    """Where it differs from the chosen plan: key -> its value there."""
    run_seconds: float
    """Predicted: all steps and the compilation before them."""
    slower_seconds: float
    """How much longer its run takes than the chosen plan's."""
    term: str
    """The term of the prediction that loses most of that: a key of `by_term`, or `compile`."""
    term_seconds: float
    """What that term loses over the whole run; negative where it gains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InfeasiblePlan:
    """The plan that comes nearest to fitting, of one family.

    A family is of one number of slices, precision, mode and recompute.
    """

    plan: Plan
    peak_bytes: int
    over_bytes: int
    by_class: Mapping[MemoryClass, int]
    """At the fullest moment."""
    index: int
    """Of the instruction that runs at that moment."""
    instruction: Instruction
    lift: "Change | None" = None
    """The cheapest single change that makes it fit, where one was looked for."""

    @property
    def largest_class(self) -> MemoryClass:
        """What takes most at that moment."""
        return max(self.by_class, key=self.by_class.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change to the request that makes it fit."""

    overrides: tuple[str, ...]
    """As written on the command line: `recompute=full`."""
    plan: Plan
    peak_bytes: int
    cost: float
    """Relative change of predicted seconds a token: 0.28 is 28 % slower, negative is faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShortage:
    """A tier beyond the near one that is too small for what would have to wait there."""

    tier: str
    needed_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What would help where nothing fits."""

    near_bytes: int
    """Budget of the near tier that was to be kept."""
    needed_bytes: int
    """The smallest near tier that would do, all else as asked."""
    over_bytes: int
    by_class: Mapping[MemoryClass, int]
    """What the nearest plan holds at its fullest moment."""
    changes: tuple[Change, ...]
    """Changes that make it fit, cheapest first; none if only more memory helps."""
    state_bytes: int
    """Weights, gradients and optimizer state: what any cut must still hold somewhere."""
    far: tuple[TierShortage, ...]
    """Tiers in which the model could wait its turn, were they larger."""
    devices: int | None
    """How many devices' memory that state takes at least; None if the process alone fills one."""
    in_phases: tuple[str, ...] = ()
    """On several devices: what the plan in phases that comes nearest lacks, and what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedRank:
    """Where a plan that a request names stands among all that it could have left open."""

    faster: int
    """Plans that are faster and fit, by the closed form."""
    plans: int
    """Of so many."""
    plan: Plan | None
    """The fastest of all; None if it is the named one."""
    best: RunnerUp | None
    """What the named plan loses against it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningResult:
    """The outcome of a search; exactly one of `plan` and `advice` is there."""

    plan: Plan | None
    prediction: Prediction | None
    """Of the chosen plan."""
    run_seconds: float | None = None
    """Predicted: all steps and the compilation before them."""
    runners_up: tuple[RunnerUp, ...] = ()
    """The next best, fastest first."""
    refused: tuple[InfeasiblePlan, ...] = ()
    """What does not fit, nearest first."""
    advice: Advice | None = None
    weighed: int = 0
    """How many plans were compared."""
    standing: PinnedRank | None = None
    """Of a plan that the request names a part of, on several devices."""
    sensitive: Mapping[str, float] = field(default_factory=dict)
    """By constant of the machine: the share of a step that one 10 % better would save."""

    @property
    def fits(self) -> bool:
        """Whether any plan fits."""
        return self.plan is not None


def differences(plan: Plan, other: Plan) -> dict[str, str]:
    """Where another plan differs, as a request would write it: key -> the other's value."""
    pairs: dict[str, tuple[object, object]] = {
        "parallel.pipeline": (plan.parallel.pipeline, other.parallel.pipeline),
        "parallel.tensor": (plan.parallel.tensor, other.parallel.tensor),
        "parallel.data": (plan.parallel.data, other.parallel.data),
        "sharding.parameters": (plan.sharding.parameters, other.sharding.parameters),
        "sharding.optimizer": (plan.sharding.optimizer, other.sharding.optimizer),
        "offload.optimizer": (plan.offload.optimizer, other.offload.optimizer),
        "parallel.schedule": (plan.parallel.schedule, other.parallel.schedule),
        "parallel.virtual_stages": (plan.parallel.virtual_stages, other.parallel.virtual_stages),
        "precision": (plan.precision, other.precision),
        "compile": (str(plan.compile).lower(), str(other.compile).lower()),
        "recompute": (plan.recompute, other.recompute),
        "recompute_layers": (_recomputed(plan), _recomputed(other)),
        "batch.micro": (plan.batch.micro, other.batch.micro),
        "phases": (len(plan.stages[0].phases), len(other.stages[0].phases)),
        "train.sequence": (plan.batch.sequence, other.batch.sequence),
    }
    return {key: str(theirs) for key, (ours, theirs) in pairs.items() if ours != theirs}


def _recomputed(plan: Plan) -> str:
    """`5`, or `5 3 0` of several stages: how many layers run again; `all` where all do."""
    if all(stage.recompute_layers is None for stage in plan.stages):
        return "all"
    return " ".join(
        "0" if stage.recompute == "none" else str(stage.recompute_layers or "all")
        for stage in plan.stages
    )


def run_seconds(prediction: Prediction, steps: int) -> float:
    """Predicted seconds of a run of `steps`, compilation included."""
    return prediction.step_seconds * steps + prediction.compile_seconds


def runner_up(
    best: tuple[Plan, Prediction], other: tuple[Plan, Prediction], steps: int
) -> RunnerUp:
    """What a plan loses over a run of so many steps against the chosen one."""
    (plan, prediction), (loser, slower) = best, other
    losses = {
        term: steps * (slower.by_term.get(term, 0.0) - prediction.by_term.get(term, 0.0))
        for term in {**prediction.by_term, **slower.by_term}
    }
    losses["compile"] = slower.compile_seconds - prediction.compile_seconds
    term = max(losses, key=losses.__getitem__)
    seconds = run_seconds(slower, steps)
    return RunnerUp(
        plan=loser,
        prediction=slower,
        differs=differences(plan, loser),
        run_seconds=seconds,
        slower_seconds=seconds - run_seconds(prediction, steps),
        term=term,
        term_seconds=losses[term],
    )


def infeasible_plan(plan: Plan, memory: PeakMemory, near_bytes: int) -> InfeasiblePlan:
    """By how much a plan does not fit, and when."""
    return InfeasiblePlan(
        plan=plan,
        peak_bytes=memory.peak_bytes,
        over_bytes=memory.peak_bytes - near_bytes,
        by_class=memory.by_class,
        index=memory.index,
        instruction=memory.instruction,
    )
