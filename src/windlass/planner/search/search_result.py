"""What a search found: the fastest plans, the fastest of each family, and what does not fit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from windlass.cost import Floats, PlanColumns
from windlass.planner.result import EvaluatedPlan, run_seconds
from windlass.schema import Plan, Recompute


class Family(NamedTuple):
    """Traits that distinguish a plan from its near twins."""

    pipeline: int
    tensor: int
    schedule: str
    precision: str
    compiled: bool
    recompute: str
    optimizer_tier: str
    sharding: int
    """Whether replicas share optimizer state, 1, and parameters too, 2."""


PricedRow = tuple[float, PlanColumns, int]
"""Seconds or bytes of a plan, and where it is."""


@dataclass(slots=True)
class SearchResult:
    """What a search found."""

    best: list[EvaluatedPlan] = field(default_factory=list)
    """Plans that fit, fastest first; the first is the fastest of all."""
    fitting: list[tuple[float, Plan]] = field(default_factory=list)
    """Plans that fit by their programs, with the clock's seconds of a step."""
    near: dict[Family, PricedRow] = field(default_factory=dict)
    """The fastest plan of each family, by the clock, of those that it priced."""
    misfits: dict[Family, PricedRow] = field(default_factory=dict)
    """The smallest plan of each family that does not fit, by the clock, of those looked at."""
    priced: int = 0
    """Plans whose step the clock priced."""

    def keep_near(self, columns: PlanColumns, seconds: Floats) -> None:
        """Keeps the fastest plan of each family.

        Args:
            columns: plans that fit by the clock's bytes.
            seconds: their steps, `[plan]`.
        """
        _keep_least(self.near, columns, seconds)

    def keep_misfits(
        self,
        columns: PlanColumns,
        nbytes: Floats,
        budget_bytes: float,
        recompute: Recompute | None = None,
    ) -> None:
        """Keeps the smallest plan of each family that does not fit.

        Args:
            columns: plans, some of which may not fit.
            nbytes: what their fullest stages hold, `[plan]`.
            budget_bytes: device memory budget.
            recompute: how a request names their recompute; None means as they have it.
        """
        over = np.flatnonzero(nbytes > budget_bytes)
        if over.size:
            _keep_least(self.misfits, columns.select(over), nbytes[over], recompute)


def run_rank(item: EvaluatedPlan, steps: int) -> tuple[float, bool, int, int]:
    """Sort key: faster first; then no offload, less device memory, the larger micro-batch.

    Args:
        item: a plan that fits.
        steps: steps of the run; runs that differ by rounding only are equally fast.
    """
    plan, prediction = item
    seconds = float(f"{run_seconds(prediction, steps):.9e}")
    return seconds, plan.offloads, prediction.peaks[0].peak_bytes, -plan.batch.micro


def _keep_least(
    known: dict[Family, PricedRow],
    columns: PlanColumns,
    values: Floats,
    recompute: Recompute | None = None,
) -> None:
    for row, family in enumerate(_families(columns, recompute)):
        if values[row] < known.get(family, (inf,))[0]:
            known[family] = float(values[row]), columns, row


def _families(columns: PlanColumns, recompute: str | None = None) -> Iterator[Family]:
    """The family of each plan; with a recompute mode that is given or its own."""
    shape, configs = columns.shape, columns.configs
    modes = np.where(
        columns.full.any(axis=1),
        "full",
        np.where(columns.selective.any(axis=1), "selective", "none"),
    )
    rows = (columns.config, columns.parameters, columns.optimizer, modes)
    for config, parameters, optimizer, mode in zip(*(each.tolist() for each in rows), strict=True):
        layer = configs[config]
        yield Family(
            shape.pipeline, layer.tensor, shape.schedule, layer.precision, layer.compiled,
            recompute or mode, layer.optimizer_tier, (parameters > 1) + (optimizer > 1),
        )  # fmt: skip
