"""The near tier at its fullest, for each stage of many plans at once, in place of every moment.

At the fullest moment of a stage a pass of one micro-batch runs through one of its layers while
others are held. So it is enough to look at each layer once for each sort of moment (`held`): what
others hold, what the micro-batch itself holds so far, and what the pass needs. `program.passes`
says the same instruction by instruction.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_held import Held, Moment
from windlass.cost.closed_layers import Floats, Ints
from windlass.cost.closed_levels import Shape
from windlass.cost.closed_ops import HELD
from windlass.cost.closed_places import Places

_FEW = 2
"""Micro-batches of a step in which none comes between the first and the last."""


class Loaned(NamedTuple):
    """Weights that a layer uses and another owns."""

    layer: int
    owner: int
    elements: Floats
    """Of each plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Plans of one shape: the numbers of their passes stacked, a row for each plan."""

    held: Floats
    """Of each name of `HELD`, of each plan, of each kind of layer."""
    widths: Floats
    """Bytes of a micro-batch's tokens, of a gradient and of a weight (columns)."""
    micros: Floats
    """Micro-batches of a step."""
    rows: Floats
    """What looked-up rows of earlier micro-batches take, by kind of layer."""
    shards: Floats
    """In how many a gradient is parted once it is reduced: rts'. Above 1 it is one flat piece."""
    shares: npt.NDArray[np.bool_]
    """Whether replicas share weights, which are whole only while they are used."""


def reduces_early(shape: Shape) -> bool:
    """Whether gradients are reduced already at a fullest moment, in steps of few micro-batches."""
    once = shape.interleave > 1 and shape.micros == shape.pipeline
    return shape.micros <= _FEW or once


def fullest(places: Places, kinds: Ints, columns: Columns, loan: Loaned | None = None) -> Floats:
    """Bytes of activations, gradients and what passes need, at the fullest moment of each stage.

    So are whole weights that come and go; what is always there of weights and optimizer state comes
    to that, and the process itself.

    Args:
        places: of all plans.
        kinds: the kind of each layer of the chain, as `Chain.kinds_as` has it.
        columns: the plans.
        loan: weights that are tied, if any.

    Returns:
        A row for each plan, a column for each stage that `places` keeps.
    """
    return _Fullest(places, kinds, columns, loan).bytes()


class _Fullest:
    def __init__(self, places: Places, kinds: Ints, columns: Columns, loan: Loaned | None) -> None:
        self._places, self._loan = places, loan
        shape = places.shape
        beyond = columns.micros[:, None] - shape.settled
        self._beyond = beyond if shape.repeats else None
        """Micro-batches after the settled ones."""
        layer, end = places.layer, len(kinds) - 1
        self._again = places.again
        self._flat = columns.shards[:, None] > 1
        self._early = reduces_early(shape)
        self._once = shape.interleave > 1 and shape.micros == shape.pipeline
        """Whether each chunk is through with all micro-batches before the one before it begins."""
        own, before = kinds[layer], kinds[layer - 1]
        held = dict(zip(HELD, columns.held[..., own], strict=True))
        self._output, self._kept = held["output"], held["kept"]
        self._forward_peak, self._backward_peak = held["forward_peak"], held["backward_peak"]
        self._fresh, self._largest = held["fresh"], held["largest"]
        self._rows_only, self._gradients = held["rows_only"] > 0, held["gradients"]
        self._tokens, wide, narrow = np.split(columns.widths, 3, axis=1)
        self._converts = wide != narrow
        self._gradients = self._gradients + columns.rows[:, own]
        self._sums = self._gradients.copy()
        """Gradients that a layer's first backward pass makes: the owner's too, if it is first."""
        self._gone = self._sums * (1 - 1 / columns.shards[:, None])
        """Of a gradient, what is gone once it is reduced."""
        self._whole = held["weights"] * columns.shares[:, None]
        """Weights that are whole only from their first use to their last."""
        self._over = np.zeros_like(self._gradients)
        """What comes to be added to the gradient of weights that were lent."""
        self._place_loan(wide, narrow)
        given = columns.held[HELD.index("output")][:, before]
        self._down = np.where(layer > 0, given, 0.0)
        """The gradient of a layer's input."""
        self._came = np.where(layer < end, self._output, 0.0)
        """The gradient of a layer's output."""
        loads = np.where(places.in_end_chunk, self._tokens, 0.0)
        self._hold = np.where(self._again, 0.0, self._kept)
        last, first = places.is_last & (layer < end), places.is_first
        self._stays = np.where(self._again & last, 0.0, self._output)
        """Of the output, what is left until the backward pass."""
        self._enters = np.where(first, self._down + loads, 0.0)
        """What a micro-batch brings into a chunk: its input and tokens."""
        self._base = places.before(self._hold + self._output) + self._brought()

    def _brought(self) -> Floats:
        return np.asarray(self._places.by_chunk(self._enters)[:, self._places.chunk])

    def _place_loan(self, wide: Floats, narrow: Floats) -> None:
        loan, stage = self._loan, self._places.stage
        if loan is None:
            return
        layer, owner = self._places.of_layers(loan.layer, loan.owner)
        if stage[layer] == stage[owner]:
            self._sums[:, layer] += self._sums[:, owner]
            self._sums[:, owner] = 0.0
        else:
            self._sums[:, layer] += loan.elements * wide[:, 0]
            self._over[:, owner] = loan.elements * wide[:, 0]
            self._gone[:, layer] += loan.elements * wide[:, 0]
            self._whole[:, layer] += loan.elements * narrow[:, 0]

    def bytes(self) -> Floats:
        parted = self._places.moments["first weight"].there.any()
        backwards = self._parted_backwards if parted else self._backwards
        fullest = np.full_like(self._output, -np.inf)
        for nbytes in (*self._forwards(), *backwards()):
            np.maximum(fullest, nbytes, out=fullest)
        found = self._places.most(fullest)
        return found if self._loan is None else np.maximum(found, self._taking_over())

    def _taking_over(self) -> Floats:
        """Where the gradient of weights that were lent is added, all others are reduced."""
        owns = self._over > 0
        sums = np.where(owns, self._sums + self._over, np.maximum(0.0, self._sums - self._gone))
        return self._places.by_stage(sums + np.where(owns, self._whole, 0.0))

    def _stage(self, values: Floats) -> Floats:
        """For each layer the sum over its stage."""
        return np.asarray(self._places.by_stage(values)[:, self._places.stage])

    @cached_property
    def _all(self) -> Floats:
        """Gradients and whole weights of a layer's stage, where no layer is done yet."""
        there = self._whole_stage
        if self._once:  # chunks before this one have no gradient yet
            own = self._places.by_chunk(self._sums)[:, self._places.chunk]
            return np.asarray(there + own + self._places.behind(self._sums))
        return there + self._stage(self._sums)

    @cached_property
    def _whole_stage(self) -> Floats:
        return self._stage(self._whole)

    @cached_property
    def _making_sums(self) -> Floats:
        """The same where a layer's first backward pass begins, and makes its gradient."""
        places, shape = self._places, self._places.shape
        after, behind = places.after(self._sums), places.behind(self._sums)
        there = self._whole_stage + after + behind
        return there - (self._done(after=shape.micros == 1) if self._early else 0.0)

    @cached_property
    def _adding_sums(self) -> Floats:
        """The same where a later one begins, and adds to it."""
        last = self._places.shape.micros == _FEW
        return self._all - (self._done(after=last) if self._early else 0.0)

    def _done(self, *, after: bool) -> Floats:
        """What is gone of layers whose last backward pass comes before."""
        places, gone = self._places, self._gone + self._whole
        done = places.after(gone) if after else np.zeros_like(gone)
        return done + places.behind(gone) if self._once else done

    def _at(self, moment: Moment) -> Iterator[Floats]:
        """What the stage's other micro-batches hold, for each layer at work; -inf where none is.

        None of a sort of moment that no chunk has.
        """
        if self._places.moments[moment].there.any():
            yield self._others(self._places.moments[moment])

    def _others(self, moment: Held) -> Floats:
        """What the stage's other micro-batches hold, for each layer at work; -inf where none is."""
        places = self._places
        each = self._open
        whole = places.held(each, moment.open) - each
        if self._beyond is not None and moment.growth.any():
            whole = whole + self._beyond * places.held(each, moment.growth)
        if moment.parted.any():
            waits = places.by_chunk(self._enters + self._waiting())
            whole = whole + places.held(waits, moment.parted)
        return np.asarray(np.where(moment.there > 0, whole, -np.inf)[:, places.chunk])

    def _waiting(self) -> Floats:
        """What a layer holds between both parts of its backward pass."""
        root = np.where(self._again, self._output + self._stays, self._output)
        return np.asarray(2 * self._kept + root + self._came)

    def _forwards(self) -> Iterator[Floats]:
        needs = self._base + np.maximum(self._forward_peak, self._output + self._hold)
        for others in self._at("first forward"):
            yield others + needs + self._whole_stage
        for others in self._at("forward"):
            yield others + needs + self._all

    def _repeated(self) -> Floats:
        """What a backward pass holds while its layer is computed again; -inf where none is."""
        again = self._base + self._came + np.maximum(self._forward_peak, self._output + self._kept)
        return np.where(self._again, again, -np.inf)

    def _backwards(self) -> Iterator[Floats]:
        own = self._base + self._kept + self._output + self._came
        added = np.maximum(self._backward_peak, self._fresh + self._down)
        made = np.maximum(self._backward_peak, self._making(self._down + self._sums))
        repeated = self._repeated() if self._again.any() else np.array(-np.inf)
        for others in self._at("first backward"):
            yield others + np.maximum(own + made, repeated) + self._making_sums
        for others in self._at("backward"):
            yield others + np.maximum(own + added, repeated) + self._adding_sums
        if self._places.shape.micros == 1:  # whole and in shards while it is reduced
            shard = self._gradients - self._gone
            reduced = np.where(self._flat, self._sums + shard, 0.0)
            yield self._base + self._down + reduced + self._making_sums

    def _making(self, made: Floats) -> Floats:
        """What lies there at the end of a pass that makes gradients."""
        sums = np.where(self._rows_only, 0.0, self._sums)
        at_end = self._fresh + made - sums
        piecewise = self._sums.astype(bool) & (self._flat | self._converts)
        at_end = np.where(piecewise, np.maximum(at_end, made + self._largest), at_end)
        return np.asarray(np.maximum(at_end, made))

    def _parted_backwards(self) -> Iterator[Floats]:
        places, waiting = self._places, self._waiting()
        own = self._base + self._kept + self._output + self._came + places.after(waiting)
        own = own + np.where(self._again, self._stays, 0.0)  # the first output is needed still
        input_ = own + np.maximum(self._backward_peak, self._kept + self._down)
        repeated = self._repeated() if self._again.any() else np.array(-np.inf)
        for others in self._at("first backward"):
            yield others + np.maximum(input_ + self._whole_stage, repeated + self._making_sums)
        for others in self._at("backward"):
            yield others + np.maximum(input_ + self._all, repeated + self._adding_sums)
        own = self._open[:, places.chunk] - places.after(waiting)
        made = np.maximum(self._fresh, self._making(self._sums))
        for others in self._at("first weight"):
            yield others + own + made + self._making_sums
        for others in self._at("weight"):
            yield others + own + self._fresh + self._adding_sums

    @cached_property
    def _open(self) -> Floats:
        """What a micro-batch holds in a chunk before its backward pass begins."""
        return self._places.by_chunk(self._enters + self._hold + self._stays)
