"""Keeps the fastest plans found, of all and of each family, and the smallest that do not fit."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappush, heapreplace
from itertools import product
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost import Floats, Ints, PlanTotals
from windlass.planner.space.open_choices import RECOMPUTE_MODES
from windlass.planner.space.plan_space import PlanBatch
from windlass.schema import PipelineSchedule, Recompute


class Candidate(NamedTuple):
    """One plan of a space, by its row in a batch, with its estimated time and memory."""

    step_seconds: float
    peak_bytes: float
    batch: PlanBatch
    row: int


class PlanFamily(NamedTuple):
    """Traits that distinguish a plan from its near twins."""

    pipeline: int
    tensor: int
    schedule: PipelineSchedule
    recompute: Recompute
    sharding: str
    """State that replicas share: `none`, optimizer `state`, or `weights` too."""
    optimizer_tier: str
    """Tier of the optimizer state."""


_FAMILY_GAP = 0.25
"""Relative gap to the fastest plan up to which a family's fastest plan is reported."""

_SHARDING = ("none", "state", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """Result of a search."""

    best: tuple[Candidate, ...]
    """Plans that fit, fastest first."""
    by_family: tuple[Candidate, ...]
    """The fastest plan that fits of each family, fastest first; among those evaluated."""
    infeasible: tuple[Candidate, ...]
    """The smallest plan of each family in which none fits, smallest first; of those evaluated."""
    evaluated: int
    """Plans whose time and memory were computed."""
    pruned: int
    """Plans that a bound showed to be slower, or not to fit."""
    faster: int = 0
    """Plans that fit and are faster than the given time."""


class TopK:
    """The fastest plans so far.

    Args:
        count: how many are kept.
        within: relative gap to the fastest one up to which plans are kept.
        families: number of families to find; until then `_BEYOND` replaces `within`.
        below: seconds from which on plans do not count; None counts all.
    """

    def __init__(
        self, count: int, *, within: float = inf, families: int = 0, below: float | None = None
    ) -> None:
        self._count, self._below = count, below
        self._within, self._families, self._fastest = within, families, inf
        self.faster = 0
        self._heap: list[tuple[float, int, Candidate]] = []
        self.by_family: dict[PlanFamily, Candidate] = {}
        self.infeasible: dict[PlanFamily, Candidate] = {}
        self._turn = 0
        self.evaluated = 0

    @property
    def last(self) -> float:
        """Seconds of the slowest plan kept; infinite while there is room for more."""
        return -self._heap[0][0] if len(self._heap) == self._count else inf

    @property
    def needed_seconds(self) -> float:
        """Seconds that a plan must stay below to be kept, whatever its family."""
        return self.last if self._below is None else self._below

    @property
    def limit(self) -> float:
        """Seconds from which on plans are left out."""
        if len(self.by_family) < self._families:
            return self._fastest * (1 + _FAMILY_GAP)
        return min(self.needed_seconds, self._fastest * (1 + self._within))

    def add(
        self,
        batch: PlanBatch,
        score: Floats,
        totals: PlanTotals,
        budget_bytes: float,
        *,
        counted: bool = True,
    ) -> None:
        """Adds the fastest plans of a batch.

        Args:
            batch: the plans.
            score: seconds that they are ranked by, `[plan]`; infinite for plans that do not count.
            totals: estimated time and memory of the plans.
            budget_bytes: device memory budget.
            counted: whether the plans are among those that the space counts.
        """
        self.evaluated += counted * len(score)
        in_memory = totals.peak_bytes <= budget_bytes
        fits = in_memory & (totals.offload_fill <= 1) & (score < (self._below or inf))
        self.faster += 0 if self._below is None else int(fits.sum())

        def found(place: np.intp) -> Candidate:
            return Candidate(
                float(score[place]), float(totals.peak_bytes[place]), batch, int(place)
            )

        self._keep(np.flatnonzero(fits & (score < self.last)), score, found)
        traits, of_plan = _families_of(batch)
        fastest = np.array([_seconds(self.by_family.get(trait)) for trait in traits])
        quick = np.flatnonzero(fits & (score < fastest[of_plan]))
        for place in _firsts(quick, of_plan, score):
            self.by_family[traits[of_plan[place]]] = found(place)
        smallest = np.array(
            [
                -inf if each in self.by_family else _bytes(self.infeasible.get(each))
                for each in traits
            ]
        )
        smaller = np.flatnonzero(~in_memory & (totals.peak_bytes < smallest[of_plan]))
        for place in _firsts(smaller, of_plan, totals.peak_bytes):
            self.infeasible[traits[of_plan[place]]] = found(place)

    def _keep(self, able: Ints, score: Floats, found: Callable[[np.intp], Candidate]) -> None:
        """Keeps the fastest of some plans."""
        if able.size > self._count:
            able = able[np.argpartition(score[able], self._count - 1)[: self._count]]
        self._fastest = min(self._fastest, *score[able], inf)
        for place in able:
            self._turn += 1
            item = (-float(score[place]), self._turn, found(place))
            if len(self._heap) < self._count:
                heappush(self._heap, item)
            elif score[place] < self.last:
                heapreplace(self._heap, item)

    def result(self, *, of: int) -> SearchResult:
        """The result after searching this many plans."""
        infeasible = (
            each for trait, each in self.infeasible.items() if trait not in self.by_family
        )
        return SearchResult(
            best=tuple(sorted((each for _, _, each in self._heap), key=_seconds)),
            by_family=tuple(sorted(self.by_family.values(), key=_seconds)),
            infeasible=tuple(sorted(infeasible, key=_bytes)),
            evaluated=self.evaluated,
            pruned=of - self.evaluated,
            faster=self.faster,
        )


def _seconds(found: Candidate | None) -> float:
    return inf if found is None else found.step_seconds


def _bytes(found: Candidate | None) -> float:
    return inf if found is None else found.peak_bytes


def _families_of(batch: PlanBatch) -> tuple[list[PlanFamily], Ints]:
    """The families of a batch's plans, and the index of each plan's family, `[plan]`."""
    table, shape = batch.table, batch.shape
    modes = np.array([RECOMPUTE_MODES.index(each.mode) for each in table.recomputes])
    of_run = (
        table.layer_configs.tensor[table.layer_config] * len(RECOMPUTE_MODES)
        + modes[table.recompute]
    )
    of_pair = table.optimizer_tier * len(_SHARDING) + (table.pairs > 1).sum(axis=1)
    tiers = table.sharding_table.optimizer_tiers
    traits = [
        PlanFamily(shape.pipeline, tensor, shape.schedule, mode, sharding, tier)
        for tensor, mode, tier, sharding in product(
            table.layer_configs.tensors, RECOMPUTE_MODES, tiers, _SHARDING
        )
    ]
    pairs = len(tiers) * len(_SHARDING)
    return traits, np.asarray((of_run * pairs)[table.config] + of_pair[table.sharding])


def _firsts(places: Ints, groups: Ints, values: Floats) -> npt.NDArray[np.intp]:
    """The index of the smallest value of each group, among some indices."""
    least = np.full(int(groups.max()) + 1, inf)
    np.minimum.at(least, groups[places], values[places])
    places = places[values[places] == least[groups[places]]]
    _, first = np.unique(groups[places], return_index=True)
    return np.asarray(places[first])
