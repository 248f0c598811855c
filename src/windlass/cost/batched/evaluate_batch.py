"""Evaluates many plans at once: step time and peak memory without their programs.

The simulator plays a program of thousands of instructions; here the same is computed from numbers
    of each
layer kind, as arrays over plans:

- a step is its passes, combined to stages (`pipeline`); before them weights are gathered, after
  each
  stage's last one gradients are reduced, then come grad norm, updates and what follows them;
- device memory is fullest in one of a few moments (`memory.peak`).

Plans in phases have no closed form: `planner.search.phase_bounds` bounds them.
"""

from dataclasses import dataclass

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.memory.peak import peak_bytes, stage_bytes as bytes_of_stages
from windlass.cost.batched.pipeline.deferred_update_delay import PendingUpdates, update_delay
from windlass.cost.batched.pipeline.gradient_reduce_end import ReduceSeconds, grad_reduce_end
from windlass.cost.batched.pipeline.stage_times import ConfigTimes, PassName, StageTimes, host_pace
from windlass.cost.batched.pipeline.weight_gather_delay import gather_delay
from windlass.cost.batched.plan_table import PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.cost.batched.stage_sums import StagePartition


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTotals:
    """Predicted time and memory, `[plan]`."""

    step_seconds: Floats
    peak_bytes: Floats
    """Device memory on the fullest stage."""
    offload_fill: Floats
    """Share of the offload tier that state takes on the fullest stage; up to 1 it fits."""


def evaluate_batch(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> PlanTotals:
    """Seconds of a step and peak device memory of plans of one pipeline shape.

    Args:
        chain: costs of its layers.
        shape: pipeline shape of all plans.
        ends: first layer of each model chunk, and the number of layers.
        rows: the plans.

    Raises:
        KeyError: the machine states no rate, or no link, that a plan needs.
    """
    parts = StagePartition(shape, ends, chain.kind_of_layer)
    shared = _Shared(chain, parts, rows)
    return PlanTotals(
        step_seconds=_seconds(chain, parts, shared, rows),
        peak_bytes=peak_bytes(chain, parts, rows, shared.held),
        offload_fill=shared.far_full[rows.sharding],
    )


def step_seconds(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> Floats:
    """Seconds of a step alone, as in `evaluate_batch`."""
    parts = StagePartition(shape, ends, chain.kind_of_layer)
    return _seconds(chain, parts, _Shared(chain, parts, rows), rows)


def stage_bytes(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> Floats:
    """Peak device memory, `[plan, stage]`, as in `evaluate_batch`."""
    parts = StagePartition(shape, ends, chain.kind_of_layer)
    return bytes_of_stages(chain, parts, rows, _Shared(chain, parts, rows).held)


def stage_seconds(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> Floats:
    """Seconds of all passes of a micro-batch, `[plan, stage]`."""
    forward, backward = _chunk_seconds(chain, shape, ends, rows)
    turns = (forward + backward).reshape(len(forward), shape.virtual_stages, shape.pipeline)
    return np.asarray(turns.sum(axis=1)[rows.config])


def _chunk_seconds(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> tuple[Floats, Floats]:
    """Seconds of the forward and of the whole backward pass, `[config, chunk]`."""
    times = ConfigTimes.of(chain, StagePartition(shape, ends, chain.kind_of_layer), rows)
    parted = shape.schedule == "zero-bubble"
    backward: tuple[PassName, ...] = (
        ("backward_input", "backward_weight") if parted else ("backward",)
    )
    return times.sums("forward").by_chunk(), times.sums(*backward, again=True).by_chunk()


def _seconds(
    chain: LayerCosts, parts: StagePartition, shared: "_Shared", rows: PlanTable
) -> Floats:
    taken = StageTimes(chain, parts, rows, stops=bool(shared.reductions.waited.any()))
    found = _step(parts, taken, shared, rows, clips=chain.base.clip)
    return found * host_pace(chain, parts.shape, rows)[rows.config]


class _Shared:
    """Seconds and bytes of shared state, `[sharding, ...]`.

    Except for gathers and reductions they are summed over the stages of each sort.
    """

    def __init__(self, chain: LayerCosts, parts: StagePartition, rows: PlanTable) -> None:
        states = rows.states(chain)

        def layers(name: str) -> Floats:
            return np.asarray(getattr(states, name)[rows.places])

        self.held = parts.by_sort(layers("held")) + layers("staging")[:, None]
        far = parts.by_sort(layers("far")) / layers("far_capacity")[:, None]
        self.far_full = far.max(axis=1)
        self.under_way, self.gather = layers("under_way"), layers("gather")
        self.goes_on = np.asarray(self.under_way.any(axis=1))
        """Whether updates overlap with the next step, `[sharding]`."""
        self.alike = ExchangeKinds.of(chain, rows)
        reduced = rows.places[self.alike.pairs]
        self.reductions = ReduceSeconds(links=states.reduce[reduced], waited=states.waited[reduced])
        """Seconds of gradient reduction of each kind of exchange."""
        self.after = parts.by_sort(layers("after"))
        self.norm = np.zeros_like(self.after)
        if chain.base.clip:
            nbytes = parts.by_sort(layers("norm_bytes"))
            launches = parts.by_sort(layers("norm_launches"))
            rate = chain.norm_rates(rows.blocks, nbytes)
            self.norm = np.where(nbytes > 0, nbytes / rate + launches, 0.0)
            self.after += self.norm


def _step(
    parts: StagePartition, taken: StageTimes, shared: _Shared, rows: PlanTable, *, clips: bool
) -> Floats:
    """End of the last stage's update, `[plan]`."""
    reduced = grad_reduce_end(parts, taken.passed, shared.reductions)
    alike, run = shared.alike, taken.place[rows.config]
    if clips:  # the grad norm waits for all stages
        found = reduced.of_plans(taken.place[alike.run], alike.share)[alike.place]
        found += shared.after.max(axis=1)[rows.sharding]
    else:
        updated = reduced.spread(alike.shares).with_things(shared.after.T[parts.sort])
        found = updated.of_plans(run, rows.sharding)
    late = np.zeros(rows.count)
    gather = shared.gather[alike.pairs]
    if gather.any():  # before the first passes
        lates = gather_delay(parts, taken.passed.folded.firsts, gather)
        late = lates.of_plans(taken.first[alike.run], alike.share)[alike.place]
    going = np.flatnonzero(shared.goes_on[rows.sharding])
    if going.size:
        some = rows.config[going], rows.sharding[going]
        ended = None
        if not clips:
            ended = reduced.of(run[going], alike.shares[some[1]]) - found[going]
        late[going] = np.maximum(late[going], _held_up(parts, taken, shared, some, ended))
    return np.asarray(found + late)


def _held_up(
    parts: StagePartition,
    taken: StageTimes,
    shared: _Shared,
    plans: tuple[Ints, Ints],
    ended: Floats | None,
) -> Floats:
    """Delay of a step by updates that are still running.

    Args:
        parts: partition of the layers.
        taken: seconds of passes.
        shared: costs of shared state.
        plans: config and sharding index of each plan whose updates overlap.
        ended: end of the passes relative to the next step's start, `[stage, plan]`; None if all end
            together, and the grad norm and updates of the slowest follow.
    """
    going = np.flatnonzero(shared.goes_on)
    run, pair = taken.first[plans[0]], np.searchsorted(going, plans[1])
    begin = shared.norm[going]
    if ended is None:
        begin = begin - shared.after[going].max(axis=1)[:, None]
    updates = PendingUpdates(
        seconds=shared.under_way[going], gather=shared.gather[going], begin=begin
    )
    waits = update_delay(parts, updates, taken.firsts, taken.lent)
    if ended is None:
        return waits.of_plans(run, pair)
    return np.asarray((waits.of(run, pair) + ended).max(axis=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeKinds:
    """Sharding options that communicate alike, and the combinations of configs with them."""

    pairs: Ints
    """One sharding index of each kind, `[kind]`."""
    shares: Ints
    """Kind of each sharding index, `[sharding]`."""
    run: Ints
    """Config of each combination, `[combination]`."""
    share: Ints
    """Kind of each combination, `[combination]`."""
    place: Ints
    """Combination of each plan, `[plan]`."""

    @classmethod
    def of(cls, chain: LayerCosts, rows: PlanTable) -> "ExchangeKinds":
        """The kinds of some plans."""
        numbers, counts = rows.sharding_table.exchanging(chain, rows.shared)
        own, kinds = numbers[rows.places], counts[rows.shared]
        firsts = np.cumsum(kinds) - kinds
        shares = own + np.repeat(firsts, rows.sharding_table.counts[rows.shared])
        pairs = np.zeros(kinds.sum(), dtype=np.int64)
        pairs[shares[::-1]] = np.arange(len(shares))[::-1]
        block = np.searchsorted(rows.shared, rows.block)
        of_run = kinds[block]
        begins = np.cumsum(of_run) - of_run
        run = np.repeat(np.arange(len(block)), of_run)
        return cls(
            pairs=pairs,
            shares=shares,
            run=run,
            share=np.arange(len(run)) + np.repeat(firsts[block] - begins, of_run),
            place=begins[rows.config] + own[rows.sharding],
        )
