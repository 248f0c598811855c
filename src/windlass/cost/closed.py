"""Closed: seconds and bytes of many plans at once, without a program.

The clock plays a program of thousands of instructions; here the same is added up from numbers of
each kind of layer, as arrays over plans:

- a step is its passes, folded to stages (`closed_pipeline`); before them weights are gathered,
  behind each stage's last one gradients are reduced, then come norm, updates and what follows them;
- the near tier is fullest in one of a few moments (`closed_peak`).

Plans whose layers take turns in the near tier are `closed_streamed`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_away import Lent, UnderWay, first_passes, held_up
from windlass.cost.closed_ends import Loans, Passed, Reductions, alike, ends
from windlass.cost.closed_layers import Chain, Floats, PassNumbers
from windlass.cost.closed_levels import Shape
from windlass.cost.closed_peak import peak_bytes
from windlass.cost.closed_pipeline import Durations, LoanBack, fold
from windlass.cost.closed_places import Parts, layers_again
from windlass.cost.closed_rows import Rows, Run
from windlass.cost.closed_ways import Block


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of each plan, all predicted."""

    step_seconds: Floats
    peak_bytes: Floats
    """Of the near tier, on the fullest stage."""
    far_full: Floats
    """Share of the tier beyond that its state takes, on the fullest stage; up to 1 it fits."""


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
    stops = bool(shared.reductions.waited.any())
    taken = _Taken(chain, parts, rows, numbers, stops=stops)
    return Totals(
        step_seconds=_step(parts, taken, shared, rows, clips=chain.base.clip),
        peak_bytes=peak_bytes(chain, shape, ends, rows, shared.held),
        far_full=shared.far_full[rows.pair],
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
    states = [chain.states(block) for block in blocks]
    held = [each.held.sum(axis=1) / shape.pipeline + each.staging for each in states]
    return np.concatenate(held)


def _again(parts: Parts, runs: Sequence[Run]) -> npt.NDArray[np.bool_]:
    """Which layers (columns) of which runs (rows) are computed again."""
    kinds = {run.again for run in runs}
    known = {again: layers_again(parts.shape, parts.ends, again) for again in kinds}
    return np.array([known[run.again] for run in runs])


def _loans(
    chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
) -> Loans | None:
    """What the first tied weights cost; None if they are not on two stages."""
    if not chain.tied:
        return None
    layer, owner = chain.tied[0]
    if parts.stage[owner] == parts.stage[layer]:
        return None
    settings = [run.setting for run in rows.runs]
    each_byte, each_message = chain.message_ways(settings, parts.shape.pipeline)
    lent = np.array([chain.lent_elements(each.tensor) for each in settings])
    widths = np.array([(each.weight_bytes, each.gradient_bytes) for each in numbers])
    lending, message = (lent[:, None] * widths * each_byte[:, None] + each_message[:, None]).T
    once = parts.shape.micros == 1
    parted = parts.shape.order == "zero-bubble"
    after = [
        (each.backward_weight if parted else each.backward)[layer]
        + (each.sum_first if once else each.sum_later)[layer]
        for each in numbers
    ]
    taking = [chain.take_over_seconds(each.tensor, each.precision, each.sums) for each in settings]
    return Loans(
        owner=owner,
        lending=lending,
        message=message,
        after=np.array(after),
        taking=np.array(taking),
    )


class _Taken:
    """Seconds of passes, a row for each of `Rows.runs`."""

    def __init__(
        self,
        chain: Chain,
        parts: Parts,
        rows: Rows,
        numbers: tuple[PassNumbers, ...],
        *,
        stops: bool,
    ) -> None:
        shape = parts.shape
        in_turn = chain.machine.rule == "bulk-synchronous"
        loans = _loans(chain, parts, rows, numbers)
        again = _again(parts, rows.runs)

        def layers(name: str) -> Floats:
            return np.stack([getattr(each, name) for each in numbers])

        parted = shape.order == "zero-bubble"
        repeated = np.where(again, layers("forward"), 0.0)
        backward = repeated + layers("backward_input" if parted else "backward")
        weight = layers("backward_weight") if parted else np.zeros_like(backward)
        sums = (layers("sum_later"), layers("sum_first"))
        adding = [(weight if parted else backward) + each for each in sums]
        by_chunk = [parts.by_chunk(each).T for each in (backward, weight, *adding)]
        load = np.zeros((shape.chunks, len(numbers)))
        load[[0, -1]] = np.array([each.load_seconds for each in numbers])
        ways = chain.message_ways([run.setting for run in rows.runs], shape.pipeline)
        self.message = np.array([each.output[0] for each in numbers]) * ways[0] + ways[1]
        self.forward = parts.by_chunk(layers("forward"))
        folded = fold(
            shape,
            Durations(
                forward=self.forward.T,
                backward=by_chunk[0] if parted else by_chunk[2],
                backward_first=by_chunk[0] if parted else by_chunk[3],
                weight=by_chunk[2] if parted else by_chunk[1],
                weight_first=by_chunk[3] if parted else by_chunk[1],
                load=load,
                message=self.message,
                lending=np.zeros(len(numbers)) if loans is None else loans.lending,
                lender=0 if loans is None else int(parts.stage[loans.owner]),
                loan=None if loans is None or parted else _way_back(loans, parts),
                stops=stops,
                in_turn=in_turn,
            ),
            np.array([each.micros for each in rows.runs]),
        )
        self.came = first_passes(layers("forward"), load[0], self.message, parts.chunk)
        self.lent = None if loans is None else Lent(chain.tied[0][0], loans.owner, loans.lending)
        self.passed = Passed(
            folded=folded,
            layers=adding[int(shape.micros == 1)],
            message=self.message,
            loans=loans,
            in_turn=in_turn,
            alike=alike(chain.sorts, again),
        )


def _way_back(loans: Loans, parts: Parts) -> LoanBack:
    return LoanBack(
        message=loans.message,
        after=loans.after,
        taking=loans.taking,
        owner=int(parts.chunk[loans.owner]),
    )


class _Shared:
    """Seconds and bytes of what replicas share, a row for each pair of all blocks, by stage."""

    def __init__(self, chain: Chain, parts: Parts, rows: Rows) -> None:
        states = [chain.states(block) for block in rows.blocks]

        def layers(name: str) -> Floats:
            return np.concatenate([getattr(each, name) for each in states])

        def pairs(name: str) -> Floats:
            return np.concatenate([getattr(each, name) for each in states])[:, None]

        self.held = parts.by_stage(layers("held")) + pairs("staging")
        self.far_full = (parts.by_stage(layers("far")) / pairs("far_capacity")).max(axis=1)
        self.under_way, self.gathers = layers("under_way"), layers("gather")
        self.goes_on = np.asarray(self.under_way.any(axis=1))
        """Whether updates go on beside the next step."""
        self.gather = parts.by_stage(layers("gather"))
        self.reductions = Reductions(links=layers("reduce"), waited=layers("waited"))
        self.after = parts.by_stage(layers("after"))
        self.norm = np.zeros_like(self.after)
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
            self.norm = np.where(nbytes > 0, nbytes / rate + launches, 0.0)
            self.after += self.norm


def _step(parts: Parts, taken: _Taken, shared: _Shared, rows: Rows, *, clips: bool) -> Floats:
    """When the last stage has updated its weights."""
    reduced = ends(parts, taken.passed, shared.reductions).of(rows.run, rows.pair)
    reduced += _late(taken, shared, rows)
    after = shared.after[rows.pair]
    if clips:  # the norm waits for all stages
        reduced = reduced.max(axis=1, keepdims=True)
        done = reduced[:, 0] + after.max(axis=1)
    else:
        done = (reduced + after).max(axis=1)
    return np.asarray(done + _held_up(parts, taken, shared, rows, reduced - done[:, None]))


def _held_up(parts: Parts, taken: _Taken, shared: _Shared, rows: Rows, ended: Floats) -> Floats:
    """By how much updates under way hold up a step more than gathering weights does.

    Args:
        parts: of all plans.
        taken: seconds of passes.
        shared: what replicas share.
        rows: the plans.
        ended: when passes had ended on each stage, from the begin of the next step.
    """
    late = np.zeros(rows.count)
    going = np.flatnonzero(shared.goes_on[rows.pair])
    if going.size:
        pair, run = rows.pair[going], rows.run[going]
        updates = UnderWay(
            seconds=shared.under_way[pair],
            gather=shared.gathers[pair],
            begin=shared.norm[pair] + ended[going],
        )
        lent = taken.lent and taken.lent._replace(seconds=taken.lent.seconds[run])
        waits = held_up(parts.chunk, parts.stage, taken.came[run], updates, lent)
        known = _late(taken, shared, replace(rows, run=run, pair=pair))[:, 0]
        late[going] = np.maximum(waits - known, 0.0)
    return late


def _late(taken: _Taken, shared: _Shared, rows: Rows) -> Floats:
    """By how much gathering and lending weights hold up the first passes."""
    forward = taken.forward[:, : shared.gather.shape[1]] + taken.message[:, None]
    came = np.cumsum(forward, axis=1) - forward
    gather = shared.gather[rows.pair] - came[rows.run]
    return np.asarray(np.maximum(gather.max(axis=1), 0.0)[:, None])
