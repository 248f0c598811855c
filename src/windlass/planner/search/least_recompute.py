"""Least recompute: as few recomputed layers on each stage as let a plan fit.

What a stage holds depends on its own layers only, and a step grows with each layer that is
recomputed. So of plans that differ only in these numbers the one with each stage's smallest is the
fastest. Each stage takes the quicker of two ways: as few full layers as fit, or selective recompute
of as few as fit, then full recompute of as few as fit.

By the clock's bytes, which are never above a program's, no plan of the same kind that fits is
faster than what is found. By its programs a plan is settled.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from windlass.cost import ArrayClock, Bools, Floats, Ints, PlanColumns
from windlass.planner.space.plan_space import PlanSpace
from windlass.program import offloaded_bytes_by_tier
from windlass.schema import Plan

StageBytes = Callable[[PlanColumns], Floats]
"""Bytes that each stage holds, `[plan, stage]`."""


class LeastRecompute(NamedTuple):
    """Plans with as little recompute on each stage as fits."""

    columns: PlanColumns
    fits: Bools
    """Whether a plan fits then, `[plan]`."""
    plain_bytes: Floats
    """Bytes of the fullest stage if nothing is recomputed, `[plan]`."""
    least_bytes: Floats
    """Bytes of the fullest stage as it is now, or with all recomputed if it does not fit."""


def with_least_recompute(
    columns: PlanColumns, holds: StageBytes, clock: ArrayClock, budget_bytes: float, ways: Bools
) -> LeastRecompute:
    """The plans with as little recompute on each stage as fits, each stage in its quicker way.

    Args:
        columns: plans that recompute nothing.
        holds: bytes of their stages.
        clock: prices passes.
        budget_bytes: device memory budget.
        ways: whether full and whether selective recompute are possible, `[2, plan]`.
    """
    plain = holds(columns)
    nbytes, seconds = plain.copy(), np.where(plain <= budget_bytes, 0.0, np.inf)
    counts = np.zeros((*plain.shape, 2), dtype=np.int64)
    able = columns.recomputable.reshape(-1, columns.shape.pipeline).max(axis=0)
    over = ~np.isfinite(seconds).all(axis=1)
    for selects, able_to in enumerate(ways & over):
        # Both ways end with all layers recomputed: where that is too much, it is so both times.
        possible = able_to & (~ways[0] | np.isfinite(seconds).all(axis=1)) if selects else able_to
        if possible.any():
            some = columns.select(possible)
            steps, tried = _fewest(some, holds, budget_bytes, able, plain[possible], bool(selects))
            taken = np.full(tried.shape, np.inf)
            if (tried <= budget_bytes).all(axis=1).any():
                _, passes, _ = clock.stage_seconds(_recomputing(some, steps, able, bool(selects)))
                taken = np.where(tried <= budget_bytes, passes, np.inf)
            better = (taken < seconds[possible]) & (plain[possible] > budget_bytes)
            none = ~np.isfinite(taken) & ~np.isfinite(seconds[possible])
            better |= none & (tried < nbytes[possible])
            for known, new in (
                (counts, _counts(steps, able, bool(selects))), (nbytes, tried), (seconds, taken)
            ):  # fmt: skip
                own = known[possible]
                own[better] = new[better]
                known[possible] = own
    chunks = np.arange(columns.shape.chunks) % columns.shape.pipeline
    return LeastRecompute(
        columns=replace(columns, full=counts[:, chunks, 0], selective=counts[:, chunks, 1]),
        fits=np.asarray(np.isfinite(seconds).all(axis=1)),
        plain_bytes=plain.max(axis=1),
        least_bytes=nbytes.max(axis=1),
    )


def _fewest(
    columns: PlanColumns,
    holds: StageBytes,
    budget_bytes: float,
    able: Ints,
    plain_bytes: Floats,
    selects: bool,
) -> tuple[Ints, Floats]:
    """The fewest steps of a way with which each stage fits, and its bytes, `[plan, stage]`.

    The search assumes that more recompute needs no more memory. Between none and one step that may
    be wrong, because recompute needs room to run in; so none is tried first.
    """
    last = np.broadcast_to((1 + selects) * able, plain_bytes.shape)
    fits = plain_bytes <= budget_bytes
    low, high = np.where(fits, 0, np.minimum(1, last)), np.where(fits, 0, last)
    under, over = low - 1, plain_bytes
    nbytes = np.where(fits, plain_bytes, holds(_recomputing(columns, high, able, selects)))
    # A plan of which a stage does not fit with all recomputed keeps all recomputed.
    low = np.where((nbytes > budget_bytes).any(axis=1, keepdims=True), high, low)
    while (low < high).any():
        # Bytes fall about evenly from step to step: where the line meets the budget is tried first.
        share = (over - budget_bytes) / np.maximum(over - nbytes, 1.0)
        middle = under + np.ceil(share * (high - under)).astype(np.int64)
        middle = np.clip(middle, low, np.maximum(low, high - 1))
        tried = holds(_recomputing(columns, middle, able, selects))
        fits = tried <= budget_bytes
        high, nbytes = np.where(fits, middle, high), np.where(fits, tried, nbytes)
        under, over = np.where(fits, under, middle), np.where(fits, over, tried)
        low = np.where(fits, low, np.minimum(middle + 1, high))
    return low, nbytes


def _recomputing(
    columns: PlanColumns,
    steps: Ints,
    able: Ints,
    selects: bool,
) -> PlanColumns:
    """The plans with each stage at its step of a way."""
    chunks = np.arange(columns.shape.chunks) % columns.shape.pipeline
    counts = _counts(steps, able, selects)[:, chunks]
    return replace(columns, full=counts[..., 0], selective=counts[..., 1])


def _counts(steps: Ints, able: Ints, selects: bool) -> Ints:
    """Full and selective layers of a model chunk at each step, `[plan, stage, 2]`."""
    if not selects:
        return np.stack([steps, np.zeros_like(steps)], axis=-1)
    return np.stack([np.maximum(0, steps - able), np.minimum(steps, able)], axis=-1)


def fits_tiers(plan: Plan, space: PlanSpace) -> bool:
    """Whether offload tiers have room for what each stage of a plan offloads."""
    tiers = {tier.name: tier.capacity_bytes for tier in space.machine.device.tiers}
    return all(
        sum(classes.values()) <= tiers[name]
        for stage in range(plan.parallel.pipeline)
        for name, classes in offloaded_bytes_by_tier(plan, space.graph, stage).items()
    )


def most_sharing(columns: PlanColumns, config: Ints) -> Bools:
    """Whether replicas share all optimizer state, and parameters all or not at all, `[plan]`.

    One of these needs least memory: what is sharded in part is gathered as well.
    """
    count = int(config.max()) + 1
    most = np.zeros(count, dtype=np.int64)
    np.maximum.at(most, config, columns.optimizer)
    shared = columns.optimizer == most[config]
    least, all_ = np.full(count, np.iinfo(np.int64).max), np.zeros(count, dtype=np.int64)
    np.minimum.at(least, config[shared], columns.parameters[shared])
    np.maximum.at(all_, config[shared], columns.parameters[shared])
    at_ends = (columns.parameters == least[config]) | (columns.parameters == all_[config])
    return np.asarray(shared & at_ends)
