"""Closed: seconds and bytes of many plans at once, without a program.

The clock plays a program of thousands of instructions; here the same is added up from numbers of
each kind of layer, as arrays over plans:

- a step is its passes, folded to stages (`closed_pipeline`); before them weights are gathered,
  behind each stage's last one gradients are reduced, then come norm, updates and what follows them;
- the near tier is fullest in one of a few moments (`closed_peak`).

Plans whose layers take turns in the near tier have no closed form: `search.podphases` bounds them.
"""

from dataclasses import dataclass

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.memory.peak import peak_bytes
from windlass.cost.batched.memory.peak import stage_bytes as bytes_of_stages
from windlass.cost.batched.pipeline.deferred_update_delay import PendingUpdates, update_delay
from windlass.cost.batched.pipeline.gradient_reduce_end import ReduceSeconds, grad_reduce_end
from windlass.cost.batched.pipeline.stage_times import ConfigTimes, PassName, StageTimes, host_pace
from windlass.cost.batched.pipeline.weight_gather_delay import gather_delay
from windlass.cost.batched.plan_table import PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.cost.batched.stage_sums import StagePartition


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTotals:
    """Of each plan, all predicted."""

    step_seconds: Floats
    peak_bytes: Floats
    """Of the near tier, on the fullest stage."""
    offload_fill: Floats
    """Share of the tier beyond that its state takes, on the fullest stage; up to 1 it fits."""


def evaluate_batch(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> PlanTotals:
    """Seconds of a step and bytes of the near tier, of plans of one shape.

    Args:
        chain: its layers and their prices.
        shape: of all plans.
        ends: first layer of each chunk, and the chain's length.
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
    """Seconds of a step alone, as in `closed`."""
    parts = StagePartition(shape, ends, chain.kind_of_layer)
    return _seconds(chain, parts, _Shared(chain, parts, rows), rows)


def stage_bytes(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> Floats:
    """Bytes of the near tier that each stage (columns) of each plan (rows) needs, as `closed`."""
    parts = StagePartition(shape, ends, chain.kind_of_layer)
    return bytes_of_stages(chain, parts, rows, _Shared(chain, parts, rows).held)


def stage_seconds(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> Floats:
    """Seconds of all passes of a micro-batch on each stage (columns) of each plan (rows)."""
    forward, backward = _chunk_seconds(chain, shape, ends, rows)
    turns = (forward + backward).reshape(len(forward), shape.virtual_stages, shape.pipeline)
    return np.asarray(turns.sum(axis=1)[rows.config])


def _chunk_seconds(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> tuple[Floats, Floats]:
    """Seconds of the forward and of the whole backward pass of each chunk (columns) of each run."""
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
    """Seconds and bytes of what replicas share, a row for each pair of all blocks.

    But for gathers and reductions they are summed over the stages of each sort (columns).
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
        """Whether updates go on beside the next step."""
        self.alike = ExchangeKinds.of(chain, rows)
        reduced = rows.places[self.alike.pairs]
        self.reductions = ReduceSeconds(links=states.reduce[reduced], waited=states.waited[reduced])
        """Of each way to share that exchanges in another way."""
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
    """When the last stage has updated its weights."""
    reduced = grad_reduce_end(parts, taken.passed, shared.reductions)
    alike, run = shared.alike, taken.place[rows.config]
    if clips:  # the norm waits for all stages
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
    """By how much updates under way hold up a step.

    Args:
        parts: of all plans.
        taken: seconds of passes.
        shared: what replicas share.
        plans: run and pair of each of those whose updates go on.
        ended: when passes had ended on each stage (rows), from the begin of the next step; None
            where all end together, and norm and updates of the slowest follow.
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
    """Kinds of pairs, all of a block in turn, and runs with all of their block's kinds."""

    pairs: Ints
    """Of each kind a pair that is of it."""
    shares: Ints
    """Of each pair its kind."""
    run: Ints
    """Of each run with a kind."""
    share: Ints
    """Of each run with a kind: the kind."""
    place: Ints
    """Of each plan its place among those."""

    @classmethod
    def of(cls, chain: LayerCosts, rows: PlanTable) -> "ExchangeKinds":
        """Those of some plans."""
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
