"""Closed: seconds and bytes of many plans at once, without a program.

The clock plays a program of thousands of instructions; here the same is added up from numbers of
each kind of layer, as arrays over plans:

- a step is its passes, folded to stages (`closed_pipeline`); before them weights are gathered,
  behind each stage's last one gradients are reduced, then come norm, updates and what follows them;
- the near tier is fullest in one of a few moments (`closed_memory`).

Plans whose layers take turns in the near tier are `closed_streamed`'s.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_layers import Chain, Floats, PassNumbers, Setting, Sharing, StateNumbers
from windlass.cost.closed_memory import Columns, Loaned, Parts, fullest, reduces_early
from windlass.cost.closed_pipeline import Durations, Shape, fold

Ints = npt.NDArray[np.int64]


class Run(NamedTuple):
    """What the passes of a plan depend on."""

    setting: Setting
    again: bool
    """Whether layers are recomputed."""


class Hold(NamedTuple):
    """What a plan's activations and gradients depend on."""

    run: int
    """Index of its `Run`."""
    shares: bool
    """Whether replicas share weights."""
    shards: int
    """In how many a gradient is parted once it is reduced: rts', or 2 for any more where that makes
    no difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Of each plan, all predicted."""

    step_seconds: Floats
    peak_bytes: Floats
    """Of the near tier, on the fullest stage."""
    stage_bytes: Floats
    """Of each stage (columns)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Plans of one shape: where each stands in three tables, in which what they share is once."""

    runs: tuple[Run, ...]
    holds: tuple[Hold, ...]
    sharings: tuple[Sharing, ...]
    run: Ints
    hold: Ints
    sharing: Ints

    @property
    def count(self) -> int:
        """How many plans there are."""
        return len(self.run)

    def only(self, chosen: npt.NDArray[np.bool_]) -> "Rows":
        """Some of the plans, with the tables that they need."""
        runs, run = np.unique(self.run[chosen], return_inverse=True)
        holds, hold = np.unique(self.hold[chosen], return_inverse=True)
        sharings, sharing = np.unique(self.sharing[chosen], return_inverse=True)
        now = {int(old): new for new, old in enumerate(runs)}
        return Rows(
            runs=tuple(self.runs[at] for at in runs),
            holds=tuple(self.holds[at]._replace(run=now[self.holds[at].run]) for at in holds),
            sharings=tuple(self.sharings[at] for at in sharings),
            run=run,
            hold=hold,
            sharing=sharing,
        )


class Tables:
    """Makes `Rows` of one shape, plan family by plan family.

    Args:
        shape: of all plans.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._early = reduces_early(shape)
        self._runs: dict[Run, int] = {}
        self._holds: dict[Hold, int] = {}
        self._sharings: dict[Sharing, int] = {}
        self._found: list[tuple[Ints, Ints, Ints]] = []

    def add(self, run: Run, sharings: Sequence[Sharing]) -> None:
        """One way to run layers with each of some ways to share their state."""
        at = self._runs.setdefault(run, len(self._runs))
        holds = [
            Hold(at, each.weights > 1, each.optimizer if self._early else min(2, each.optimizer))
            for each in sharings
        ]
        self._found.append(
            (
                np.full(len(sharings), at),
                np.array([self._holds.setdefault(each, len(self._holds)) for each in holds]),
                np.array([self._sharings.setdefault(s, len(self._sharings)) for s in sharings]),
            )
        )

    def rows(self) -> Rows:
        """All that was added."""
        run, hold, sharing = (np.concatenate(each) for each in zip(*self._found, strict=True))
        return Rows(
            runs=tuple(self._runs),
            holds=tuple(self._holds),
            sharings=tuple(self._sharings),
            run=run,
            hold=hold,
            sharing=sharing,
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
    states = tuple(chain.states(each) for each in rows.sharings)
    shared = _Shared(chain, parts, rows, states)
    stage_bytes = _stage_bytes(chain, parts, rows, numbers)[rows.hold]
    stage_bytes = stage_bytes + shared.held[rows.sharing]
    taken = _Taken(chain, parts, rows, numbers)
    return Totals(
        step_seconds=_step(taken, shared, rows, clips=chain.base.clip),
        peak_bytes=stage_bytes.max(axis=1),
        stage_bytes=stage_bytes,
    )


def _stage_bytes(
    chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
) -> Floats:
    """What comes and goes on each stage (columns) at its fullest, for each of `Rows.holds`."""
    runs = [rows.runs[each.run] for each in rows.holds]
    columns = Columns(
        numbers=tuple(numbers[each.run] for each in rows.holds),
        rows=np.stack([chain.rows(each.setting, parts.shape.micros) for each in runs]),
        again=np.array([each.again for each in runs]),
        shards=np.array([each.shards for each in rows.holds], dtype=np.float64),
        shares=np.array([each.shares for each in rows.holds]),
    )
    device = chain.machine.device
    held = np.array([device.process_bytes(compiled=each.setting.compiled) for each in runs])
    loan = None
    if chain.tied:
        lent = np.array([chain.lent_elements(each.setting.tensor) for each in runs])
        loan = Loaned(*chain.tied[0], lent)
    return np.asarray(fullest(parts, columns, loan) + held[:, None])


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
    found = []
    for each, number in zip(rows.runs, numbers, strict=True):
        lent = chain.lent_elements(each.setting.tensor)
        weights, gradients = (
            chain.message_seconds(each.setting, pipeline, lent * nbytes)
            for nbytes in (number.weight_bytes, number.gradient_bytes)
        )
        summed = number.sum_first if parts.shape.micros == 1 else number.sum_later
        whole, weight = number.backward[layer], number.backward_weight[layer]
        handing = gradients + summed[layer]
        taking = chain.take_over_seconds(each.setting, lent)
        found.append((weights, handing + whole, handing + weight, taking))
    lending, handing, handing_weight, taking = np.array(found).T
    return _Loans(
        lender=lender,
        lending=lending,
        handing=handing,
        handing_weight=handing_weight,
        taking=taking,
    )


class _Taken:
    """Seconds of passes, a row for each of `Rows.runs`."""

    def __init__(
        self, chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
    ) -> None:
        self.shape = shape = parts.shape
        self.loans = loans = _loans(chain, parts, rows, numbers)
        layer = np.arange(parts.layers)
        inner = (layer > 0) & (layer < parts.layers - 1)
        again = np.array([[each.again] for each in rows.runs]) & inner

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
        self.message = np.array(
            [
                chain.message_seconds(each.setting, shape.pipeline, float(number.output[0]))
                for each, number in zip(rows.runs, numbers, strict=True)
            ]
        )
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
                in_turn=chain.machine.rule == "bulk-synchronous",
            ),
        )
        self.ready, self.end = folded.ready.T, folded.end.T
        once = int(shape.micros == 1)
        self.last, self.last_weight = backward[once].copy(), weight[once]
        """Of the last micro-batch's backward pass."""
        self.last[:, parts.chunk[chain.tied[0][1] if chain.tied else 0]] += loans.taking


class _Shared:
    """Seconds and bytes of what replicas share, a row for each of `Rows.sharings`, by stage."""

    def __init__(
        self, chain: Chain, parts: Parts, rows: Rows, states: tuple[StateNumbers, ...]
    ) -> None:
        def stages(name: str) -> Floats:
            return parts.by_stage(np.stack([getattr(each, name) for each in states]))

        self.held = stages("weights") + stages("optimizer")
        self.gather = stages("gather")
        owner = chain.tied[0][1] if chain.tied else 0
        self.reduce_lent = np.array([each.reduce[owner] for each in states])
        self.reduce_chunks = parts.by_chunk(np.stack([each.reduce for each in states]))
        self.after = stages("update") + stages("spread")
        if chain.base.clip:
            nbytes = stages("norm_bytes")
            rate = np.stack(
                [
                    chain.norm_rates(each, own)
                    for each, own in zip(rows.sharings, nbytes, strict=True)
                ]
            )
            norm = np.where(nbytes > 0, nbytes / rate + stages("norm_launches"), 0.0)
            self.after += norm


def _step(taken: _Taken, shared: _Shared, rows: Rows, *, clips: bool) -> Floats:
    """When the last stage has updated its weights."""
    ends = _ends(taken, shared, rows)
    after = shared.after[rows.sharing]
    if clips:  # the norm waits for all stages
        return np.asarray(ends.max(axis=1) + after.max(axis=1))
    return np.asarray((ends + after).max(axis=1))


def _ends(taken: _Taken, shared: _Shared, rows: Rows) -> Floats:
    """When each stage (columns) of each plan (rows) has reduced its gradients.

    Each stage reduces a layer's gradient behind the last pass that adds to it, before it sends the
    gradient of its input on: so what the stages behind it reduce holds a stage up too.
    """
    shape, message = taken.shape, taken.message[rows.run][:, None]
    late = _late(taken, shared, rows)
    reduce = shared.reduce_chunks[rows.sharing]
    if shape.order == "zero-bubble":
        ends = taken.end[rows.run] + reduce
        if taken.loans.lender != shape.pipeline - 1:
            lent = taken.end[:, -1] - taken.last_weight[:, -1] + taken.loans.handing_weight
            came = lent[rows.run] + shared.reduce_lent[rows.sharing]
            owner = np.maximum(ends[:, taken.loans.lender], came)
            ends[:, taken.loans.lender] = owner + taken.loans.taking[rows.run]
        return np.asarray(ends + late)
    own = taken.last[rows.run] + reduce
    through = np.cumsum(own, axis=1) + message * np.arange(shape.chunks)
    path = taken.ready[rows.run] + through
    path[:, -1] += np.maximum(0.0, taken.loans.handing[rows.run] - own[:, -1])
    if shape.interleave > 1:
        path += _behind(reduce, shape.pipeline)
    longest = np.maximum.accumulate(path[:, ::-1], axis=1)[:, ::-1]
    return np.asarray((longest - (through - own) + late)[:, : shape.pipeline])


def _behind(values: Floats, pipeline: int) -> Floats:
    """For each chunk (columns) the sum over later ones of its stage."""
    turns = values.reshape(values.shape[0], -1, pipeline)
    later = np.cumsum(turns[:, ::-1], axis=1)[:, ::-1] - turns
    return np.asarray(later.reshape(values.shape))


def _late(taken: _Taken, shared: _Shared, rows: Rows) -> Floats:
    """By how much gathering and lending weights hold up the first passes."""
    forward = taken.forward[:, : taken.shape.pipeline] + taken.message[:, None]
    came = np.cumsum(forward, axis=1) - forward
    gather = shared.gather[rows.sharing] - came[rows.run]
    return np.asarray(np.maximum(gather.max(axis=1), 0.0)[:, None])
