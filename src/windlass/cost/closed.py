"""Closed: seconds and bytes of many plans at once, without a program.

The clock plays a program of thousands of instructions; here the same is added up from numbers of
each kind of layer, as arrays over plans:

- a step is its passes, folded to stages (`closed_pipeline`); before them weights are gathered,
  behind each stage's last one gradients are reduced, then come norm, updates and what follows them;
- the near tier is fullest in one of a few moments (`closed_peak`).

Plans whose layers take turns in the near tier are `closed_streamed`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_layers import Block, Chain, Floats, PassNumbers
from windlass.cost.closed_levels import Shape
from windlass.cost.closed_peak import peak_bytes
from windlass.cost.closed_pipeline import Durations, fold
from windlass.cost.closed_places import Parts, layers_again
from windlass.cost.closed_rows import Rows, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of each plan, all predicted."""

    step_seconds: Floats
    peak_bytes: Floats
    """Of the near tier, on the fullest stage."""


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
        peak_bytes=peak_bytes(chain, shape, ends, rows, shared.held),
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


def _again(parts: Parts, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
    """Which layers (columns) of which runs (rows) are computed again."""
    kinds = {run.again for run in runs}
    known = {again: layers_again(parts.shape, parts.ends, again) for again in kinds}
    return np.array([known[run.again] for run in runs])


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
