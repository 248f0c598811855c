"""Ranked: by how much a plan that fits lost and in which term, and by how much one does not fit."""

from windlass.search.choice import Refusal, RunnerUp, differences
from windlass.search.weigh import Memory
from windlass.spec.plan import Plan
from windlass.spec.prediction import Prediction


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


def refusal(plan: Plan, memory: Memory, near_bytes: int) -> Refusal:
    """By how much a plan does not fit, and when."""
    return Refusal(
        plan=plan,
        peak_bytes=memory.peak_bytes,
        over_bytes=memory.peak_bytes - near_bytes,
        by_class=memory.by_class,
        index=memory.index,
        instruction=memory.instruction,
    )
