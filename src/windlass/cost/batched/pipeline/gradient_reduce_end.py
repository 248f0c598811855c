"""End of gradient reduction on each stage of many plans, as max-plus sums.

Each sum is a number of a plan's passes and one of its sharding, so it is computed once for each. A
    layer's
gradient is reduced after the last pass that adds to it:

- after its stage has sent the gradient of its input. Then all layers of a chunk are reduced one
  after the
  other, and overlapping reductions end last;
- layer by layer within that pass if nothing is sent on, or with a single micro-batch. Reductions
  wait for
  each other: that of layer j ends no earlier than its pass, and than all reductions from there on
      take
  together. Of a row of equal layers one of its two ends decides.

What a device waits for after one chunk also delays the chunks that its stage still has to run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.batched.max_plus import MaxPlus, MaxPlusTerm
from windlass.cost.batched.pipeline.steady_state import StepEnds
from windlass.cost.batched.stage_sums import LayerSums, StagePartition
from windlass.schema import Recompute

_ROUNDING = 1e-14
"""Relative difference between times that are equal but for the order of addition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeightTimes:
    """Times of tied weights on two stages, `[config]`."""

    owner: int
    """Layer that owns the weights."""
    lending: Floats
    """Seconds until they have been sent, from the start of the step."""
    message: Floats
    """Seconds to send their gradient back."""
    after: Floats
    """Seconds until it is sent, from the start of the last pass that adds to it."""
    taking: Floats
    """Seconds to add it to the owner's gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPasses:
    """The last passes of a step, `[config]`."""

    folded: StepEnds
    layers: LayerSums
    """Seconds of each layer in the last micro-batch's pass that adds to gradients."""
    message: Floats
    """Seconds of a message to the next stage."""
    loans: TiedWeightTimes | None
    in_turn: bool
    """Whether a stage that sends or receives does nothing else meanwhile."""
    equal_neighbours: Bools
    """Whether each layer but the last equals the next one in all configs, `[layer]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSeconds:
    """Seconds to reduce a layer's gradient, `[option, kind]`."""

    links: Floats
    """Seconds on the links."""
    waited: Floats
    """The part of it that blocks the device."""


def grad_reduce_end(
    parts: StagePartition, passed: LastPasses, reductions: ReduceSeconds
) -> MaxPlus:
    """End of gradient reduction on each stage, one item a stage.

    Args:
        parts: partition of the layers.
        passed: the last passes.
        reductions: seconds of gradient reduction.
    """
    return _Stages(parts, passed, reductions).reduce_ends()


class _Stages:
    def __init__(
        self, parts: StagePartition, passed: LastPasses, reductions: ReduceSeconds
    ) -> None:
        self._parts, self._passed, self._reductions = parts, passed, reductions
        self._shape, self._folded = parts.shape, passed.folded
        self._waited = parts.by_chunk(reductions.waited)
        self._queued = bool((reductions.links > reductions.waited).any())
        self._links = parts.by_chunk(reductions.links)
        self._none = np.zeros(len(reductions.links))
        self._before = self._waited_before()

    def reduce_ends(self) -> MaxPlus:
        """End of gradient reduction on all stages."""
        shape = self._shape
        if shape.schedule == "zero-bubble":
            return MaxPlus.of_terms([list(self._parted(stage)) for stage in range(shape.pipeline)])
        if shape.microbatches == 1:
            return MaxPlus.of_terms(self._through())
        return self._handing_on().beside(self._first()) if shape.chunks > 1 else self._first()

    def _handing_on(self) -> MaxPlus:
        """Sums of chunks that are reduced after what they send on: all but the first."""
        pipeline, turns = self._shape.pipeline, self._shape.virtual_stages
        done = self._folded.done[: None if self._queued else pipeline]
        chunk, way = np.nonzero(_outer(done))
        chunk, way = chunk[chunk > 0], way[chunk > 0]
        behind = np.cumsum(self._links.reshape(-1, turns, pipeline), axis=1)
        kinds = self._alike_so_far()[chunk] * len(self._before) + way
        order = np.argsort(kinds, kind="stable")
        chunk, way = chunk[order], way[order]
        _, first, shared = np.unique(kinds[order], return_index=True, return_inverse=True)
        queued = behind.reshape(len(behind), -1)[:, chunk[first]].T
        return MaxPlus(
            passes=done[chunk, way],
            exchanges=self._before[way[first]] + queued,
            shared=shared,
            things=chunk % pipeline,
        )

    def _alike_so_far(self) -> Ints:
        """A number that chunks share if they and earlier ones hold as many layers of each kind."""
        sorts = self._parts.chunk_sort.reshape(self._shape.virtual_stages, -1)
        found, before = [], np.zeros_like(sorts[0])
        for turn, own in enumerate(sorts):
            both = before * (1 + int(sorts.max())) + own
            before = np.unique(both, return_inverse=True)[1]
            found.append(before + turn * len(own))
        return np.concatenate(found)

    def _first(self) -> MaxPlus:
        """Sums of the first chunk, whose layers are reduced within its pass."""
        begun = self._folded.begun[0]
        ways = np.flatnonzero(_outer(self._folded.begun[:1])[0])
        within = MaxPlus.of_terms([list(self._within(0, np.zeros_like(begun[0]), self._none))])
        passes, exchanges = within.passes, within.exchanges[within.shared]
        passes = (begun[ways][:, None] + passes).reshape(-1, passes.shape[1])
        exchanges = (self._before[ways][:, None] + exchanges).reshape(-1, exchanges.shape[1])
        return MaxPlus(
            passes=passes,
            exchanges=exchanges,
            shared=np.arange(len(passes)),
            things=np.zeros(len(passes), dtype=np.int64),
        )

    def _waited_before(self) -> Floats:
        """Seconds that each path has waited in earlier turns of its stages, `[path, option]`."""
        waited, stops = self._waited, self._folded.stops
        if len(stops) == 1:
            return self._none[None]
        mean = waited[:, self._shape.pipeline : -1].mean(axis=1)
        return np.stack([each.chunks * mean + each.last * waited[:, -1] for each in stops])

    def _through(self) -> list[list[MaxPlusTerm]]:
        """Sums of a single micro-batch, whose stages each reduce before they send.

        The last stage sends on after the gradient of its tied weights.
        """
        shape, passed = self._shape, self._passed
        last = shape.chunks - 1
        own = passed.layers.by_chunk()
        starts = [MaxPlusTerm(self._folded.begun[1, 0], self._none)]
        found: list[list[MaxPlusTerm]] = []
        for stage in reversed(range(shape.pipeline)):
            leaving = passed.message if passed.in_turn and stage else 0.0
            found.append(
                [
                    MaxPlusTerm(term.passes + leaving, term.exchanges)
                    for start in starts
                    for term in self._within(stage, start.passes, start.exchanges)
                ]
            )
            taking = own[:, stage] + self._extra(stage)
            onward = [
                MaxPlusTerm(
                    start.passes + taking + passed.message, start.exchanges + self._waited[:, stage]
                )
                for start in starts
            ]
            loans = passed.loans
            if stage == last and loans is not None and not passed.in_turn:
                handed = starts[0].passes + loans.after + loans.message
                onward.append(MaxPlusTerm(handed + passed.message, self._none))
            starts = onward
        return found[::-1]

    def _extra(self, chunk: int) -> Floats | float:
        """Seconds of a chunk's last pass in which it sends or adds a tied gradient."""
        loans, passed = self._passed.loans, self._passed
        if loans is None:
            return 0.0
        hands = passed.in_turn * (chunk == self._shape.chunks - 1) * loans.message
        takes = chunk == self._parts.chunk[loans.owner]
        return np.asarray(hands + takes * (loans.taking + passed.in_turn * loans.message))

    def _parted(self, stage: int) -> Iterator[MaxPlusTerm]:
        """Sums of a stage that ends with its last weight-gradient pass."""
        passed, folded, loans = self._passed, self._folded, self._passed.loans
        weight = passed.layers.by_chunk()
        came = None
        if loans is not None and stage == self._parts.chunk[loans.owner]:
            begun = folded.end[-1, 0] - weight[:, -1] + loans.after
            came = begun if passed.in_turn else np.maximum(begun, folded.sent[-1, 0])
            came = came + loans.message
        yield from self._within(stage, folded.end[stage, 0] - weight[:, stage], self._none, came)

    def _within(
        self, chunk: int, start: Floats, before: Floats, came: Floats | None = None
    ) -> Iterator[MaxPlusTerm]:
        """Sums of a chunk whose layers are reduced within a pass.

        Args:
            chunk: index of the chunk.
            start: start of the pass.
            before: seconds that its device has waited before.
            came: arrival of the tied weights' gradient, if that may be later than the pass.
        """
        low, high = self._parts.ends[chunk : chunk + 2]
        links, waited = self._reductions.links, self._reductions.waited
        loans, parts = self._passed.loans, self._parts
        owner = loans.owner if loans is not None and loans.owner < high else -1
        extra = self._extra(chunk)
        layers = np.array(self._decisive(low, high))
        through = self._passed.layers.over_each(layers, high)
        queued = parts.counts(low, layers + 1) @ links.T + parts.counts(layers + 1, high) @ waited.T
        for at, own, queue in zip(layers.tolist(), through, queued, strict=True):
            passes = start + own
            yield MaxPlusTerm(passes + extra if at <= max(owner, low) else passes, before + queue)
            if came is not None and loans is not None and at <= owner:
                rest = self._passed.layers.over(at, owner)
                stopped = parts.over(waited, owner + 1, high)
                yield MaxPlusTerm(came + loans.taking + rest, before + queue - stopped)

    def _decisive(self, low: int, high: int) -> list[int]:
        """The ends of rows of equal layers of a chunk."""
        if not self._queued:
            return [low]
        found = {low, high - 1}
        loans = self._passed.loans
        for at in range(low, high - 1):
            lent = loans is not None and loans.owner in (at, at + 1)
            if lent or not self._passed.equal_neighbours[at]:
                found |= {at, at + 1}
        return sorted(found)


def _outer(times: Floats) -> Bools:
    """Which paths may be the longest, whatever each reduction takes, `[chunk, path]`.

    The wait of paths grows evenly with the number of inner chunks they have waited for, by twos. So
    a path is never the longest if it takes at most the mean of those beside it.
    """
    outer = np.asarray(times.max(axis=2) > -np.inf)
    for own, ways in zip(times, outer, strict=True):
        mean = (own[:-4] + own[4:]) * (0.5 + _ROUNDING)
        ways[2:-2] &= (own[2:-2] > mean).any(axis=1)
    return outer


def equal_neighbours(kinds: Ints, patterns: Sequence[Sequence[Recompute]]) -> Bools:
    """Whether each layer but the last equals the next one in kind and recompute, `[layer]`.

    Args:
        kinds: kind of each layer.
        patterns: recompute mode of each layer, for each recompute configuration.
    """
    whole = (kinds, *map(np.array, patterns))
    return np.asarray(np.logical_and.reduce([each[:-1] == each[1:] for each in whole]))
