"""Closed: seconds and bytes of many plans at once, without a program.

The clock plays a program of thousands of instructions; here the same is added up from numbers of
each kind of layer, as arrays over plans:

- a step is its passes, folded to stages (`closed_pipeline`); before them weights are gathered,
  behind each stage's last one gradients are reduced, then come norm, updates and what follows them;
- the near tier is fullest in one of a few moments (`closed_memory`).

Plans whose layers take turns in the near tier are `closed_streamed`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_held import held
from windlass.cost.closed_layers import Block, Chain, Floats, Ints, PassNumbers, Setting
from windlass.cost.closed_memory import Columns, Loaned, fullest, reduces_early
from windlass.cost.closed_pipeline import Durations, Shape, fold
from windlass.cost.closed_places import Layout, Parts, Places, sorts_of


class Run(NamedTuple):
    """What the passes of a plan depend on."""

    setting: Setting
    again: bool
    """Whether layers are recomputed."""
    micros: int
    """Micro-batches of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of each plan, all predicted."""

    step_seconds: Floats
    peak_bytes: Floats
    """Of the near tier, on the fullest stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Plans of one shape: where each stands in tables in which what they share is once."""

    runs: tuple[Run, ...]
    blocks: tuple[Block, ...]
    pairs: Ints
    """rts and rts' (columns) of all pairs of all blocks in turn."""
    run: Ints
    """Of each plan."""
    pair: Ints
    """Of each plan."""

    @property
    def count(self) -> int:
        """How many plans there are."""
        return len(self.run)

    def only(self, chosen: npt.NDArray[np.bool_]) -> "Rows":
        """Some of the plans, with the runs that they need."""
        runs, run = np.unique(self.run[chosen], return_inverse=True)
        return replace(
            self, runs=tuple(self.runs[at] for at in runs), run=run, pair=self.pair[chosen]
        )

    def one(self, place: int) -> "Rows":
        """One of the plans."""
        return self.only(np.arange(self.count) == place)

    @classmethod
    def of(cls, families: Sequence[tuple[Block, Sequence[Run]]]) -> "Rows":
        """Plans that run in each of some ways with each pair of a block, for several blocks."""
        counts = np.array([len(block.pairs) for block, _ in families])
        firsts = np.concatenate([[0], np.cumsum(counts)])
        runs = [run for _, able in families for run in able]
        of_run = [at for at, (_, able) in enumerate(families) for _ in able]
        each = counts[of_run]
        run = np.repeat(np.arange(len(runs)), each)
        within = np.arange(len(run)) - np.repeat(np.cumsum(each) - each, each)
        return cls(
            runs=tuple(runs),
            blocks=tuple(block for block, _ in families),
            pairs=np.array([pair for block, _ in families for pair in block.pairs]),
            run=run,
            pair=within + np.repeat(firsts[of_run], each),
        )


def closed(chain: Chain, shape: Shape, ends: tuple[int, ...], rows: Rows) -> Totals:
    """Seconds of a step and bytes of the near tier, of plans of one shape.

    Args:
        chain: its layers and their prices.
        shape: of all plans.
        ends: first layer of each chunk, and the chain's length.
        rows: the plans.

    Raises:
        KeyError: the machine states no rate, or no link, that a plan needs.
    """
    parts = Parts(shape, ends)
    numbers = tuple(chain.passes(each.setting) for each in rows.runs)
    shared = _Shared(chain, parts, rows)
    taken = _Taken(chain, parts, rows, numbers)
    return Totals(
        step_seconds=_step(taken, shared, rows, clips=chain.base.clip),
        peak_bytes=_peak_bytes(chain, shape, ends, rows, numbers, shared.held),
    )


def least_seconds(chain: Chain, shape: Shape, ends: tuple[int, ...], runs: Sequence[Run]) -> Floats:
    """What no plan of each run can be faster than.

    A stage has all its passes to do; before the first a micro-batch comes through the stages before
    it, and behind the last its gradient goes back through them. Only the weights' parts of parted
    backward passes may come later than that gradient, so that there its way back is left out.
    """
    parts = Parts(shape, ends)
    numbers = [chain.passes(each.setting) for each in runs]
    forward = np.stack([each.forward for each in numbers])
    again = forward * _again(parts, runs)
    if shape.order == "zero-bubble":
        backward = again + np.stack([e.backward_input + e.backward_weight for e in numbers])
        way = parts.by_chunk(forward)
    else:
        backward = again + np.stack([each.backward for each in numbers])
        way = parts.by_chunk(forward + backward)
    way = way[:, : shape.pipeline]
    micros = np.array([[each.micros] for each in runs])
    through = np.cumsum(way, axis=1) - way + micros * parts.by_stage(forward + backward)
    return np.asarray(through.max(axis=1))


def least_bytes(chain: Chain, shape: Shape, blocks: Sequence[Block]) -> Floats:
    """What no plan of each pair needs less of: the state of an even share of the layers."""
    held = np.concatenate([chain.states(block).held.sum(axis=1) for block in blocks])
    return held / shape.pipeline


def _alike(chain: Chain, shape: Shape, runs: Sequence[Run]) -> Ints:
    """A number for each run that those of the same memory share.

    How many replicas there are does not matter, nor how many micro-batches, but for an order that
    holds all of them, and for rows that are looked up in each.
    """
    grows = shape.repeats and shape.order == "gpipe"
    known: dict[object, int] = {}
    found = []
    for setting, again, micros in runs:
        rows = chain.rows_bytes(setting.tensor, setting.micro, micros)
        key = (setting[:5], again, rows, micros if grows else 0)
        found.append(known.setdefault(key, len(known)))
    return np.array(found)


def _again(parts: Parts, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
    """Which layers (columns) of which runs (rows) are computed again."""
    layer = np.arange(parts.layers)
    inner = (layer > 0) & (layer < parts.layers - 1)
    return np.array([[each.again] for each in runs]) & inner


def _peak_bytes(
    chain: Chain,
    shape: Shape,
    ends: tuple[int, ...],
    rows: Rows,
    numbers: tuple[PassNumbers, ...],
    always: Floats,
) -> Floats:
    """What is held at the fullest moment of the fullest stage of each plan.

    Of rts and rts' it matters whether they are above 1, and only in a few shapes how far.

    Args:
        chain: of layers.
        shape: of the plans.
        ends: first layer of each chunk, and the chain's length.
        rows: the plans.
        numbers: of each run.
        always: what is there at any moment, a row for each pair, by stage.
    """
    weights, optimizer = rows.pairs[rows.pair].T
    shards = optimizer if reduces_early(shape) else np.minimum(optimizer, 2)
    alike = _alike(chain, shape, rows.runs)
    sorts = (alike[rows.run] * (1 + int(shards.max())) + shards) * 2 + (weights > 1)
    _, first, sort = np.unique(sorts, return_index=True, return_inverse=True)
    run = rows.run[first]
    runs = [rows.runs[at] for at in run]
    columns = Columns(
        held=np.stack([chain.held(each.setting._replace(replicas=1)) for each in runs], axis=1),
        widths=np.array(
            [(n.token_bytes, n.gradient_bytes, n.weight_bytes) for n in (numbers[at] for at in run)]
        ),
        micros=np.array([each.micros for each in runs]),
        rows=np.stack(
            [chain.rows(each.setting.tensor, each.setting.micro, each.micros) for each in runs]
        ),
        again=np.array([each.again for each in runs]),
        shards=shards[first].astype(np.float64),
        shares=weights[first] > 1,
    )
    loan = None
    if chain.tied:
        lent = np.array([chain.lent_elements(each.setting.tensor) for each in runs])
        loan = Loaned(*chain.tied[0], lent)
    alone = (0, chain.layers - 1, *(chain.tied[0] if chain.tied else ()))
    layout = Layout(ends, sorts_of(chain.of, alone))
    places = Places(shape, layout, held(shape, tuple(np.diff(ends))))
    there = fullest(places, chain.of, columns, loan)
    device = chain.machine.device
    there += np.array([[device.process_bytes(compiled=each.setting.compiled)] for each in runs])
    return _largest_sum(there[sort], always[:, places.stages][rows.pair])


def _largest_sum(ones: Floats, others: Floats) -> Floats:
    return np.asarray((ones + others).max(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loans:
    """What tied weights on two stages cost, an element for each of `Rows.runs`."""

    lender: int
    """The stage that owns them; 0 if none are lent."""
    lending: Floats
    """Until they have left, from the begin of the step."""
    handing: Floats
    """Until their gradient has left, from the begin of the borrower's last backward pass."""
    handing_weight: Floats
    """The same from the begin of the weights' part of that pass, where it is parted."""
    taking: Floats
    """To add it to the owner's."""


def _loans(chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]) -> _Loans:
    none = np.zeros(len(numbers))
    layer, owner = chain.tied[0] if chain.tied else (0, 0)
    lender, pipeline = int(parts.stage[owner]), parts.shape.pipeline
    if lender == parts.stage[layer]:
        return _Loans(lender=0, lending=none, handing=none, handing_weight=none, taking=none)
    settings = [run.setting for run in rows.runs]
    each_byte, each_message = chain.message_ways(settings, pipeline)
    lent = np.array([chain.lent_elements(each.tensor) for each in settings])
    widths = np.array([(each.weight_bytes, each.gradient_bytes) for each in numbers])
    weights, gradients = (lent[:, None] * widths * each_byte[:, None] + each_message[:, None]).T
    once = parts.shape.micros == 1
    summed = [(each.sum_first if once else each.sum_later)[layer] for each in numbers]
    whole = [(each.backward[layer], each.backward_weight[layer]) for each in numbers]
    backward, weight = np.array(whole).T + np.array(summed)
    return _Loans(
        lender=lender,
        lending=weights,
        handing=gradients + backward,
        handing_weight=gradients + weight,
        taking=np.array([chain.take_over_seconds(e.tensor, e.precision, e.sums) for e in settings]),
    )


class _Taken:
    """Seconds of passes, a row for each of `Rows.runs`."""

    def __init__(
        self, chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
    ) -> None:
        self.shape = shape = parts.shape
        self.in_turn = chain.machine.rule == "bulk-synchronous"
        self.loans = loans = _loans(chain, parts, rows, numbers)
        again = _again(parts, rows.runs)

        def layers(name: str) -> Floats:
            return np.stack([getattr(each, name) for each in numbers])

        repeated = np.where(again, layers("forward"), 0.0)
        sums = (layers("sum_later"), layers("sum_first"))
        if shape.order == "zero-bubble":
            backward = [parts.by_chunk(repeated + layers("backward_input"))] * 2
            weight = [parts.by_chunk(layers("backward_weight") + each) for each in sums]
        else:
            backward = [parts.by_chunk(repeated + layers("backward") + each) for each in sums]
            weight = [np.zeros_like(backward[0])] * 2
        load = np.zeros_like(backward[0])
        load[:, [0, -1]] = np.array([[each.load_seconds] for each in numbers])
        ways = chain.message_ways([run.setting for run in rows.runs], shape.pipeline)
        self.message = np.array([each.output[0] for each in numbers]) * ways[0] + ways[1]
        self.forward = parts.by_chunk(layers("forward"))
        folded = fold(
            shape,
            Durations(
                forward=self.forward.T,
                backward=backward[0].T,
                backward_first=backward[1].T,
                weight=weight[0].T,
                weight_first=weight[1].T,
                load=load.T,
                message=self.message,
                lending=loans.lending,
                lender=loans.lender,
                in_turn=self.in_turn,
            ),
            np.array([each.micros for each in rows.runs]),
        )
        self.ready, self.end = folded.ready.T, folded.end.T
        once = int(shape.micros == 1)
        self.last, self.last_weight = backward[once].copy(), weight[once]
        """Of the last micro-batch's backward pass."""
        self.last[:, parts.chunk[chain.tied[0][1] if chain.tied else 0]] += loans.taking


class _Shared:
    """Seconds and bytes of what replicas share, a row for each pair of all blocks, by stage."""

    def __init__(self, chain: Chain, parts: Parts, rows: Rows) -> None:
        states = [chain.states(block) for block in rows.blocks]

        def layers(name: str) -> Floats:
            return np.concatenate([getattr(each, name) for each in states])

        self.held = parts.by_stage(layers("held"))
        self.gather = parts.by_stage(layers("gather"))
        reduce = layers("reduce")
        self.reduce_chunks = parts.by_chunk(reduce)
        self.reduce_lent = reduce[:, chain.tied[0][1] if chain.tied else 0]
        self.after = parts.by_stage(layers("after"))
        if chain.base.clip:
            nbytes = parts.by_stage(layers("norm_bytes"))
            counts = np.cumsum([0, *(len(block.pairs) for block in rows.blocks)])
            rate = np.concatenate(
                [
                    chain.norm_rates(block, nbytes[low:high])
                    for block, (low, high) in zip(rows.blocks, pairwise(counts), strict=True)
                ]
            )
            launches = parts.by_stage(layers("norm_launches"))
            self.after += np.where(nbytes > 0, nbytes / rate + launches, 0.0)


def _step(taken: _Taken, shared: _Shared, rows: Rows, *, clips: bool) -> Floats:
    """When the last stage has updated its weights."""
    ends = _ends(taken, shared, rows)
    after = shared.after[rows.pair]
    if clips:  # the norm waits for all stages
        return np.asarray(ends.max(axis=1) + after.max(axis=1))
    return np.asarray((ends + after).max(axis=1))


def _ends(taken: _Taken, shared: _Shared, rows: Rows) -> Floats:
    """When each stage (columns) of each plan (rows) has reduced its gradients.

    Each stage reduces its gradients behind the last pass that adds to them, once it has sent the
    gradient of its input on; of a single micro-batch before it does so, so that what the stages
    behind it reduce holds a stage up too.
    """
    shape, message = taken.shape, taken.message[rows.run][:, None]
    late = _late(taken, shared, rows)
    reduce = shared.reduce_chunks[rows.pair]
    if shape.order == "zero-bubble":
        ends = taken.end[rows.run] + reduce
        if taken.loans.lender != shape.pipeline - 1:
            lent = taken.end[:, -1] - taken.last_weight[:, -1] + taken.loans.handing_weight
            came = lent[rows.run] + shared.reduce_lent[rows.pair]
            owner = np.maximum(ends[:, taken.loans.lender], came)
            ends[:, taken.loans.lender] = owner + taken.loans.taking[rows.run]
        return np.asarray(ends + late)
    early = reduce if shape.micros == 1 else np.zeros_like(reduce)
    own = taken.last[rows.run] + early
    through = np.cumsum(own, axis=1) + message * np.arange(shape.chunks)
    path = taken.ready[rows.run] + through
    path[:, -1] += np.maximum(0.0, taken.loans.handing[rows.run] - own[:, -1])
    if shape.interleave > 1:
        path += _behind(reduce, shape.pipeline)
    longest = np.maximum.accumulate(path[:, ::-1], axis=1)[:, ::-1]
    if taken.in_turn and shape.micros > 1:  # a stage that sends does not reduce meanwhile
        longest[:, 1:] += message
    return np.asarray((longest - (through - own) + late + reduce - early)[:, : shape.pipeline])


def _behind(values: Floats, pipeline: int) -> Floats:
    """For each chunk (columns) the sum over later ones of its stage."""
    turns = values.reshape(values.shape[0], -1, pipeline)
    later = np.cumsum(turns[:, ::-1], axis=1)[:, ::-1] - turns
    return np.asarray(later.reshape(values.shape))


def _late(taken: _Taken, shared: _Shared, rows: Rows) -> Floats:
    """By how much gathering and lending weights hold up the first passes."""
    forward = taken.forward[:, : taken.shape.pipeline] + taken.message[:, None]
    came = np.cumsum(forward, axis=1) - forward
    gather = shared.gather[rows.pair] - came[rows.run]
    return np.asarray(np.maximum(gather.max(axis=1), 0.0)[:, None])
