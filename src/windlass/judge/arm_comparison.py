"""Compares arms of an experiment, several seeds each, at equal tokens, FLOP and wall time.

The noise of an arm is its band: from the lowest to the highest value of its seeds. One arm is
better than another only if their bands do not meet; otherwise they are equal within noise. With
three seeds each, equal arms are told apart by chance in one case of ten.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

Budget = Literal["tokens", "flop", "seconds"]
"""What arms are given equally much of."""
BUDGETS: tuple[Budget, ...] = ("tokens", "flop", "seconds")
BUDGET_NAMES = {"tokens": "tokens", "flop": "FLOP", "seconds": "wall time"}
_END = 2e-3
"""A curve that ends by so small a share before a budget has used it up."""


class Band(NamedTuple):
    """Lowest, median and highest value of some seeds."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmCurve:
    """Held-out losses of one run, with what it had used of each budget by then."""

    seed: int
    steps: tuple[int, ...]
    tokens: tuple[float, ...]
    flop: tuple[float, ...]
    seconds: tuple[float, ...]
    """Time of the steps alone, without evaluation and saving."""
    losses: tuple[float, ...]
    """Nats per token."""

    def used(self, budget: Budget) -> tuple[float, ...]:
        """What the run had used at each of its losses."""
        return {"tokens": self.tokens, "flop": self.flop, "seconds": self.seconds}[budget]

    def loss_at(self, budget: Budget, amount: float) -> float | None:
        """The loss when an amount was used up, between two losses on the line through both.

        None where the curve begins later, or ends earlier.
        """
        used = self.used(budget)
        if amount < used[0] * (1 - _END) or amount > used[-1] * (1 + _END):
            return None
        return float(np.interp(amount, used, self.losses))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One of the things that are compared, with a run for each seed."""

    name: str
    curves: tuple[ArmCurve, ...]

    def band_at(self, budget: Budget, amount: float) -> Band | None:
        """The losses of all seeds when an amount was used up; None unless all have used it."""
        losses = [curve.loss_at(budget, amount) for curve in self.curves]
        known = [loss for loss in losses if loss is not None]
        return band(known) if known and len(known) == len(losses) else None

    def total(self, budget: Budget) -> Band:
        """What the runs used up in all."""
        return band([curve.used(budget)[-1] for curve in self.curves])


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The arms when each has used up the same."""

    budget: Budget
    amount: float
    """Tokens, FLOP or seconds."""
    seeds: int
    bands: dict[str, Band | None]
    """Losses by arm; None for an arm that has not used so much."""


def compare_arms(arms: Sequence[Arm]) -> tuple[Comparison, ...]:
    """The arms at the tokens, the FLOP and the median wall time of the first arm's whole run."""
    first = arms[0]
    return tuple(
        Comparison(
            budget=budget,
            amount=first.total(budget).middle,
            seeds=min(len(arm.curves) for arm in arms),
            bands={
                # The first arm stands at its own end, where its seeds differ in time alone.
                arm.name: arm.band_at(budget, first.total(budget).middle)
                if arm is not first
                else band([curve.losses[-1] for curve in arm.curves])
                for arm in arms
            },
        )
        for budget in BUDGETS
    )


def relation(one: Band, other: Band) -> Literal["better", "worse", "equal"]:
    """How a loss stands to another one: `equal` if the bands meet."""
    if one.high < other.low:
        return "better"
    return "worse" if one.low > other.high else "equal"


def comparison_sentence(comparison: Comparison) -> str:
    """Who is best at one budget, who equals it within noise, and who is worse and by how much."""
    known = {name: found for name, found in comparison.bands.items() if found is not None}
    ranked = sorted(known, key=lambda name: known[name].middle)
    best, others = ranked[0], ranked[1:]
    equal = [name for name in others if relation(known[best], known[name]) == "equal"]
    worse = [name for name in others if name not in equal]
    parts = [f"At equal {BUDGET_NAMES[comparison.budget]} {best} is best {_loss(known[best])}"]
    if equal:
        names = _listed([f"{name} {_loss(known[name])}" for name in equal])
        verb = "equals" if len(equal) == 1 else "equal"
        parts.append(f"{names} {verb} it within the noise of {comparison.seeds} seeds")
    if worse:
        gaps = [f"{name} by {known[name].middle - known[best].middle:.3f}" for name in worse]
        parts.append(_listed(gaps).replace(" by ", " is worse by ", 1))
    missing = [name for name in comparison.bands if name not in known]
    if missing:
        parts.append(f"{_listed(missing)} did not come so far")
    return "; ".join(parts) + "."


def arm_sentence(comparisons: Sequence[Comparison], arm: str, other: str) -> str:
    """Where one arm is better than another, equal to it within noise, and worse."""
    found: dict[str, list[str]] = {"better": [], "equal": [], "worse": []}
    for comparison in comparisons:
        one, two = comparison.bands[arm], comparison.bands[other]
        if one is not None and two is not None:
            name = f"equal {BUDGET_NAMES[comparison.budget]}"
            found[relation(one, two)].append(name)
    words = {
        "better": f"better than {other} at",
        "equal": f"equal to {other} within noise at",
        "worse": f"worse than {other} at",
    }
    parts = [f"{words[how]} {_listed(names)}" for how, names in found.items() if names]
    return f"{_capital(arm)} is {_listed(parts)}." if parts else ""


def band(values: Sequence[float]) -> Band:
    """Lowest, median and highest of some values, at least one."""
    return Band(min(values), median(values), max(values))


def _loss(found: Band) -> str:
    return f"({found.middle:.3f})"


def _listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, or `a, b and c`."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
