"""Closed: seconds and bytes of many plans at once, without a program.

The clock plays a program of thousands of instructions; here the same is added up from numbers of
each kind of layer, as arrays over plans:

- a step is its passes, folded to stages (`closed_pipeline`); around them weights are gathered first,
  gradients reduced behind each stage's last pass, then norm, updates and what follows them;
- the near tier is fullest in one of a few moments (`closed_memory`).

Plans whose layers take turns in the near tier are `closed_streamed`'s.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_layers import Chain, Floats, PassNumbers, Setting, Sharing, StateNumbers
from windlass.cost.closed_memory import Columns, Loaned, Parts, fullest, reduces_early
from windlass.cost.closed_pipeline import Durations, Folded, Shape, fold
from windlass.spec.graph import Precision

Ints = npt.NDArray[np.int64]


class Row(NamedTuple):
    """What plans of one shape and stages may differ in; a plan for each."""

    tensor: int
    precision: Precision
    compiled: bool
    micro: int
    again: bool
    """Whether layers are recomputed."""
    replicas: int
    weights: int
    """rts"""
    optimizer: int
    """rts'"""


class _Pass(NamedTuple):
    """What of a row its passes depend on."""

    setting: Setting
    again: bool
    shares: bool
    """Whether replicas share weights."""
    shards: int
    """Of a gradient, once it is reduced: rts', or 2 for any more where it makes no difference."""


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
    """Plans as two tables and where each plan stands in them, so that what plans share is once."""

    passes: tuple[_Pass, ...]
    sharings: tuple[Sharing, ...]
    of_pass: Ints
    of_sharing: Ints

    @classmethod
    def of(cls, rows: list[Row], shape: Shape) -> "Rows":
        """The tables of a list of plans of one shape."""
        passes: dict[_Pass, int] = {}
        sharings: dict[Sharing, int] = {}
        sums, parted, early = shape.micros > 1, shape.pipeline > 1, reduces_early(shape)
        at = np.empty((2, len(rows)), dtype=np.int64)
        for index, row in enumerate(rows):
            tensor, precision, compiled, micro, again, replicas, weights, optimizer = row
            setting = Setting(tensor, precision, compiled, micro, sums, parted, replicas)
            shards = optimizer if early else min(2, optimizer)
            one = _Pass(setting, again, weights > 1, shards)
            other = Sharing(tensor, precision, sums, replicas, weights, optimizer)
            at[0, index] = passes.setdefault(one, len(passes))
            at[1, index] = sharings.setdefault(other, len(sharings))
        return cls(
            passes=tuple(passes), sharings=tuple(sharings), of_pass=at[0], of_sharing=at[1]
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
    numbers = tuple(chain.passes(each.setting) for each in rows.passes)
    states = tuple(chain.states(each) for each in rows.sharings)
    taken = _Taken(chain, parts, rows, numbers)
    shared = _Shared(chain, parts, rows, states)
    columns = Columns(
        numbers=numbers,
        rows=np.stack([chain.rows(each.setting, shape.micros) for each in rows.passes]),
        again=np.array([each.again for each in rows.passes]),
        shards=np.array([each.shards for each in rows.passes], dtype=np.float64),
        shares=np.array([each.shares for each in rows.passes]),
    )
    held = np.array(
        [chain.machine.device.process_bytes(compiled=p.setting.compiled) for p in rows.passes]
    )
    loan = _loan(chain, rows.passes[0].setting.tensor)
    moving = fullest(parts, columns, loan) + held[:, None]
    stage_bytes = moving[rows.of_pass] + shared.held[rows.of_sharing]
    return Totals(
        step_seconds=_step(taken, shared, rows, clips=chain.base.clip),
        peak_bytes=stage_bytes.max(axis=1),
        stage_bytes=stage_bytes,
    )


def _loan(chain: Chain, tensor: int) -> Loaned | None:
    if not chain.tied:
        return None
    layer, owner = chain.tied[0]
    return Loaned(layer=layer, owner=owner, elements=chain.lent_elements(tensor))


class _Taken:
    """Seconds of passes, a row for each of `Rows.passes`."""

    def __init__(
        self, chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
    ) -> None:
        self.shape = shape = parts.shape
        layer = np.arange(parts.layers)
        inner = (layer > 0) & (layer < parts.layers - 1)
        again = np.array([[each.again] for each in rows.passes]) & inner

        def chunks(name: str) -> Floats:
            return np.stack([getattr(each, name) for each in numbers])

        forward, sums = chunks("forward"), (chunks("sum_later"), chunks("sum_first"))
        repeated = np.where(again, forward, 0.0)
        if shape.order == "zero-bubble":
            inputs = parts.by_chunk(repeated + chunks("backward_input"))
            backward = (inputs, inputs)
            weight = tuple(parts.by_chunk(chunks("backward_weight") + each) for each in sums)
        else:
            whole = repeated + chunks("backward")
            backward = (parts.by_chunk(whole + sums[0]), parts.by_chunk(whole + sums[1]))
            weight = (np.zeros_like(backward[0]), np.zeros_like(backward[0]))
        load = np.zeros_like(backward[0])
        load[:, [0, -1]] = np.array([[each.load_seconds] for each in numbers])
        self.message = np.array(
            [
                chain.message_seconds(
                    each.setting, shape.pipeline, float(number.output[0])
                )
                for each, number in zip(rows.passes, numbers, strict=True)
            ]
        )
        self.forward = parts.by_chunk(forward)
        durations = Durations(
            forward=self.forward.T,
            backward=backward[0].T,
            backward_first=backward[1].T,
            weight=weight[0].T,
            weight_first=weight[1].T,
            load=load.T,
            message=self.message,
        )
        folded = fold(shape, durations)
        self.folded = Folded(ready=folded.ready.T, end=folded.end.T)
        self.last = backward[1 if shape.micros == 1 else 0].copy()
        """Of the pass that a stage ends with, unless its order parts backward passes."""
        self.load = load
        self._weight = weight[1 if shape.micros == 1 else 0]
        self._loans(chain, parts, rows, numbers)

    def _loans(
        self, chain: Chain, parts: Parts, rows: Rows, numbers: tuple[PassNumbers, ...]
    ) -> None:
        """What messages of tied weights and their gradients hold up."""
        self.lending = np.zeros(len(numbers))
        """By how much the first message has to wait for weights that are lent."""
        self.handing = np.zeros(len(numbers))
        """From the begin of the last stage's last pass until a lent weight's gradient has left."""
        self.came = np.zeros(len(numbers))
        """When that gradient is added, where the order parts backward passes."""
        if not chain.tied or self.shape.pipeline == 1:
            return
        layer, owner = chain.tied[0]
        if parts.stage[layer] == parts.stage[owner]:
            return
        owner_chunk = parts.chunk[owner]
        for at, (each, number) in enumerate(zip(rows.passes, numbers, strict=True)):
            lent = chain.lent_elements(each.setting.tensor)
            weights, gradients = (
                chain.message_seconds(
                    each.setting, self.shape.pipeline, lent * nbytes
                )
                for nbytes in (number.weight_bytes, number.gradient_bytes)
            )
            self.lending[at] = max(0.0, weights - self.forward[at, 0] - self.load[at, 0])
            summed = number.sum_first if self.shape.micros == 1 else number.sum_later
            self.handing[at] = gradients + number.backward[layer] + summed[layer]
            taking = chain.take_over_seconds(each.setting, lent)
            self.last[at, owner_chunk] += taking
            head = number.backward_weight[layer] + summed[layer] + gradients
            self.came[at] = self.folded.end[at, -1] - self._weight[at, -1] + head + taking
            self.folded.end[at, parts.stage[owner]] += taking


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
        self.owner = int(parts.stage[owner])
        """The stage that lends weights, the first if none does."""
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
    after = shared.after[rows.of_sharing]
    if clips:  # the norm waits for all stages
        return np.asarray(ends.max(axis=1) + after.max(axis=1))
    return np.asarray((ends + after).max(axis=1))


def _ends(taken: _Taken, shared: _Shared, rows: Rows) -> Floats:
    """When each stage (columns) of each plan (rows) has reduced its gradients.

    Each stage reduces a layer's gradient behind the last pass that adds to it, before it sends the
    gradient of its input on: so what the stages behind it reduce holds a stage up too.
    """
    shape, message = taken.shape, taken.message[rows.of_pass][:, None]
    late = _late(taken, shared, rows)
    reduce = shared.reduce_chunks[rows.of_sharing]
    if shape.order == "zero-bubble":
        ends = taken.folded.end[rows.of_pass] + reduce
        came = taken.came[rows.of_pass] + shared.reduce_lent[rows.of_sharing]
        ends[:, shared.owner] = np.maximum(ends[:, shared.owner], came)
        return np.asarray(ends + late)
    own = taken.last[rows.of_pass] + reduce
    through = np.cumsum(own, axis=1) + message * np.arange(shape.chunks)
    path = taken.folded.ready[rows.of_pass] + through
    path[:, -1] += np.maximum(0.0, taken.handing[rows.of_pass] - own[:, -1])
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
    gather = shared.gather[rows.of_sharing] - came[rows.of_pass]
    gather[:, 0] += taken.lending[rows.of_pass]
    return np.asarray(np.maximum(gather.max(axis=1), 0.0)[:, None])
