"""Lower bounds on step time, cheap enough to prune plans before they are evaluated.

A stage has all its passes to do. Before the first one a micro-batch passes the stages before it,
and after the last one its gradient passes them backward. If a stage has no room for all that its
live micro-batches keep, it recomputes layers, at least as few as can be enough.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.layer_ops import HELD
from windlass.cost.batched.pipeline.stage_times import ConfigTimes, PassName, host_pace
from windlass.cost.batched.plan_table import LayerConfigTable, PlanTable
from windlass.cost.batched.schedule_index import PipelineShape, ScheduleIndex
from windlass.cost.batched.stage_sums import StagePartition, recompute_by_layer

_ROUNDING = 1e-9
"""Relative rounding error between sums of the same bytes in different orders."""


def min_batch_seconds(
    chain: LayerCosts, shape: PipelineShape, ends: tuple[int, ...], rows: PlanTable
) -> Floats:
    """Lower bound on the step time of each configuration, `[config]`.

    Args:
        chain: costs of layers.
        shape: pipeline shape of all plans.
        ends: first layer of each model chunk, and the number of layers.
        rows: the plans.
    """
    parts = StagePartition(shape, ends, chain.kind_of_layer)
    worked = _worked(parts, ConfigTimes.of(chain, parts, rows), rows)
    return np.asarray(worked.through.max(axis=1) * host_pace(chain, shape, rows))


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Device memory that plans must fit into."""

    budget_bytes: float
    minimizes_recompute: bool
    """Whether more layers may be recomputed, as many as needed."""
    allows_selective: Bools
    """Whether layers can recompute selectively, `[config]`."""


def min_batch_seconds_in_memory(
    chain: LayerCosts,
    shape: PipelineShape,
    ends: tuple[int, ...],
    rows: PlanTable,
    room: MemoryLimit,
) -> Floats:
    """Lower bound on the step time of each plan within a memory limit; infinite if it cannot fit.

    Args:
        chain: costs of layers.
        shape: pipeline shape of all plans.
        ends: first layer of each model chunk, and the number of layers.
        rows: the plans, all with the same recompute.
        room: the memory limit.
    """
    parts = StagePartition(shape, ends, chain.kind_of_layer)
    times = ConfigTimes.of(chain, parts, rows)
    worked, holds = _worked(parts, times, rows), _Holds.of(chain, parts, rows)
    over = _over(chain, parts, rows, holds) - room.budget_bytes * (1 + _ROUNDING)
    more = np.where(over > 0, inf, 0.0)
    if room.minimizes_recompute:
        whole, some = (rows.microbatches * each for each in times.repeated(_inner(chain)))
        more = _again_seconds(rows, holds, over, _Again(whole, some, room.allows_selective))
    states = rows.states(chain)
    waited, after = states.waited[rows.places], states.after[rows.places]
    behind = parts.by_stage(waited + after)[rows.sharding]
    found = (worked.own[rows.config] + more + behind).max(axis=1)
    if shape.schedule != "zero-bubble":
        first = parts.over(waited, *ends[:2]) + parts.by_stage(after)[:, 0]
        back = (worked.through[rows.config] + more).max(axis=1) + first[rows.sharding]
        np.maximum(found, back, out=found)
    return np.asarray(found * host_pace(chain, shape, rows)[rows.config])


@dataclass(frozen=True, slots=True)
class _Worked:
    """Seconds before which a stage is not done, `[config, stage]`."""

    own: Floats
    """With the first micro-batch's way to the stage, and all its passes."""
    through: Floats
    """With the last gradient's way back to the first stage, too.

    Only weight gradients of a split backward may come later than that gradient, so the way back is
    left out there.
    """


def _worked(parts: StagePartition, times: ConfigTimes, rows: PlanTable) -> _Worked:
    shape = parts.shape
    parted = shape.schedule == "zero-bubble"
    forward = times.sums("forward").by_chunk()
    whole: tuple[PassName, ...] = ("backward_input", "backward_weight") if parted else ("backward",)
    first = times.sums(*whole, "sum_first", again=True).by_chunk()
    later = (
        first if shape.microbatches == 1 else times.sums(*whole, "sum_later", again=True).by_chunk()
    )
    passes = rows.microbatches[:, None] * (forward + later) + first - later
    turns = passes.reshape(len(passes), shape.virtual_stages, shape.pipeline).sum(axis=1)
    hops = np.arange(shape.pipeline) * times.message[:, None]
    own = _before(forward, shape) + hops + turns
    return _Worked(own, own if parted else own + _before(later, shape) + hops)


def _before(chunks: Floats, shape: PipelineShape) -> Floats:
    """Seconds of the first chunks of the stages before each stage."""
    ways = chunks[:, : shape.pipeline]
    return np.asarray(np.cumsum(ways, axis=1) - ways)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holds:
    """Bytes that a stage holds at one moment, at least, `[config, stage]`.

    In a step of more micro-batches than the shape has, no stage holds less.
    """

    there: Floats
    """Live micro-batches, gradients where there are all of them, and the process."""
    weights: Floats
    """Whole weights while a stage needs them."""
    whole: Floats
    """Bytes freed by each further fully recomputed layer of each chunk."""
    some: Floats
    """Bytes freed by each selectively recomputed layer, one column."""
    outputs: Floats
    """Bytes freed besides by the last layer of a chunk."""
    able: Ints
    """Layers that can be recomputed, `[stage, chunk]`."""

    @classmethod
    def of(cls, chain: LayerCosts, parts: StagePartition, rows: PlanTable) -> "_Holds":
        """Bytes of the configurations of some plans, all with the same recompute."""
        shape, ends, settings = parts.shape, parts.ends, rows.layer_configs
        found = settings.table(chain, "room", _numbers(chain, settings)).at(rows.layer_config)
        own, kept, output, gradients, weights = np.split(found, _columns(chain), axis=1)
        modes = recompute_by_layer(shape, ends, rows.recomputes[int(rows.recompute[0])])
        again = np.array(modes) == "full"
        first, last = np.array(ends[:-1]), np.array(ends[1:]) - 1
        each, inputs = _of_layers(chain.kind_of_layer), _of_layers(chain.kind_of_layer)[first - 1]
        inputs[0] = 0.0
        counts = np.add.reduceat(each, first, axis=0)
        stays = counts - each[last] * again[last, None] + inputs
        keeps = _of_layers(chain.kinds_as(modes), kept.shape[1]) * ~again[:, None]
        held = kept @ np.add.reduceat(keeps, first, axis=0).T + output @ stays.T
        opened, later = _open(shape, counts.sum(axis=1))
        made = parts.by_stage(gradients) * later.any(axis=1)
        there = np.maximum(_by_stage(held, opened), _by_stage(held, later) + made)
        most = np.maximum(opened.sum(axis=1), later.sum(axis=1))
        inner = _inner(chain)
        some = kept[:, inner] - kept[:, chain.variants[inner]]
        able = np.ones(len(again), dtype=np.int64)
        able[[0, -1]] = 0
        side = shape.virtual_stages, shape.pipeline
        return cls(
            there=there + own,
            weights=parts.by_stage(weights),
            whole=most * kept[:, inner].max(axis=1, keepdims=True),
            some=most * some.max(axis=1, keepdims=True),
            outputs=most * output[:, inner].max(axis=1, keepdims=True),
            able=np.add.reduceat(able, first).reshape(side).T,
        )


def _over(chain: LayerCosts, parts: StagePartition, rows: PlanTable, holds: _Holds) -> Floats:
    """Bytes that a stage holds at one moment, at least, `[plan, stage]`."""
    states = rows.states(chain)
    always = parts.by_stage(states.held[rows.places]) + states.staging[rows.places][:, None]
    come_and_go = np.where(rows.pairs[rows.sharding, :1] > 1, holds.weights[rows.config], 0.0)
    return np.asarray(holds.there[rows.config] + always[rows.sharding] + come_and_go)


class _Again(NamedTuple):
    """Seconds to recompute a layer of each chunk in all micro-batches, `[config]`."""

    whole: Floats
    some: Floats
    """Selective recompute."""
    selects: Bools
    """Whether selective recompute is possible."""


def _again_seconds(rows: PlanTable, holds: _Holds, over: Floats, again: _Again) -> Floats:
    """Seconds in which a stage recomputes enough layers, `[plan, stage]`.

    Args:
        rows: the plans.
        holds: what configurations hold.
        over: bytes that are too much, `[plan, stage]`.
        again: seconds of recompute.
    """
    run = rows.config
    over = np.where(over > 0, np.maximum(over - holds.outputs[run], 1.0), 0.0)
    whole, some = (np.maximum(each[run], 1.0) for each in (holds.whole, holds.some))
    all_, most = holds.able.sum(axis=1), holds.able.max(axis=1)

    def of_chunks(steps: Floats) -> Floats:
        return np.asarray(np.minimum(steps[..., None], holds.able).sum(axis=-1))

    steps = np.ceil(over / whole)
    seconds = np.where(steps > most, inf, again.whole[run, None] * of_chunks(steps))
    if not again.selects.any():
        return seconds
    few = np.ceil(over / some)
    rest = np.ceil(np.maximum(0.0, over - most * some) / np.maximum(whole - some, 1.0))
    longer = np.maximum(0.0, again.whole - again.some)[run, None] * of_chunks(rest)
    longer += again.some[run, None] * np.where(few > most, all_, of_chunks(few))
    able = again.selects[run, None] & (rest <= most)
    return np.where(able, np.minimum(seconds, longer), seconds)


def _inner(chain: LayerCosts) -> Ints:
    """Indices of the layer kinds that can be recomputed."""
    return np.unique(chain.kind_of_layer[1:-1] if chain.layers > 2 else chain.kind_of_layer)


def _open(shape: PipelineShape, layers: Floats) -> tuple[Floats, Floats]:
    """Live micro-batches, `[stage, chunk]`, at two moments.

    At the first backward pass, when there are no gradients yet, and when all gradients exist and
    none is reduced; each time where most layers are live whose weights are all still in use. Zero
    if there is no such moment.
    """
    turns = ScheduleIndex(shape.schedule, shape.pipeline, shape.virtual_stages, shape.microbatches)
    cycle = shape.pipeline * shape.virtual_stages
    begun, reduced = cycle - shape.pipeline + 1, turns.count - cycle + shape.pipeline
    sizes = layers.reshape(shape.virtual_stages, 1, shape.pipeline).swapaxes(1, 2)
    found = []
    for low, high in ((0, 1), (begun, min(begun + cycle, reduced))):
        if low >= high:
            found.append(np.zeros((shape.pipeline, shape.virtual_stages)))
            continue
        before = turns.before_backward(np.arange(low, high)[None])
        there = np.stack(
            [
                turns.through(before.forward, chunk)
                - turns.through(before.backward, shape.virtual_stages - 1 - chunk)
                for chunk in range(shape.virtual_stages)
            ]
        )
        fullest = (there * sizes).sum(axis=0).argmax(axis=1)
        found.append(there[:, np.arange(shape.pipeline), fullest].T.astype(np.float64))
    return found[0], found[1]


def _by_stage(chunks: Floats, counts: Floats) -> Floats:
    """Bytes of this many micro-batches of each chunk, `[config, stage]`."""
    turns = chunks.reshape(len(chunks), counts.shape[1], counts.shape[0])
    return np.asarray(np.einsum("ncs,sc->ns", turns, counts))


def _of_layers(kinds: Ints, count: int | None = None) -> Floats:
    """One-hot kinds of layers, `[layer, kind]`."""
    return np.eye(int(kinds.max()) + 1 if count is None else count)[kinds]


_NUMBERS = ("saved", "output", "gradients", "weights")


def _columns(chain: LayerCosts) -> list[int]:
    """Where each group of numbers begins in a row of `_numbers`."""
    kinds = len(chain.variants)
    kept = int(max(chain.variants.max() + 1, kinds))
    return [1, 1 + kept, 1 + kept + kinds, 1 + kept + 2 * kinds]


def _numbers(chain: LayerCosts, settings: LayerConfigTable) -> Callable[[Ints], Floats]:
    """Finds bytes of the process, and by layer kind what it saves, outputs and consists of."""
    device, kinds = chain.machine.device, len(chain.variants)

    def of(places: Ints) -> Floats:
        held = chain.passes(settings.at(places)).held
        kept, *others = (held[:, HELD.index(name)] for name in _NUMBERS)
        compiled = settings.compiled[places]
        own = np.where(compiled, *(device.process_bytes(compiled=each) for each in (True, False)))
        return np.concatenate([own[:, None], kept, *(each[:, :kinds] for each in others)], axis=1)

    return of
