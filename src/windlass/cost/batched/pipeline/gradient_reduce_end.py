"""When the stages of many plans have reduced their gradients, as the largest of a few sums.

Each sum is something of a plan's passes and something of what its replicas exchange, so that it is
found once for each. A layer's gradient is reduced behind the last pass that adds to it:

- once its stage has sent on the gradient of its input. Then all layers of a chunk are reduced
  behind each other, and the sums that go on beside computing end last;
- layer by layer within that pass where nothing is sent on, or of a single micro-batch. Sums wait
  for each other: one of layer j ends no earlier than its pass, and than all sums from there on take
  together. Of a run of equal layers one of its two ends decides.

What a device waits for behind one chunk also holds up the chunks that its stage still has to do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.batched.max_plus import MaxPlus, MaxPlusTerm
from windlass.cost.batched.pipeline.steady_state import StepEnds
from windlass.cost.batched.stage_sums import LayerSums, StagePartition
from windlass.schema.plan import Recompute

_ROUNDING = 1e-14
"""Relative difference of times up to which they are the same, added up in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeightTimes:
    """What tied weights on two stages cost, an element for each way to run the passes."""

    owner: int
    """The layer that owns them."""
    lending: Floats
    """Until they have left, from the begin of the step."""
    message: Floats
    """Seconds in which their gradient goes back."""
    after: Floats
    """Until it does, from the begin of the borrower's last pass that adds to it."""
    taking: Floats
    """To add it to the owner's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastPasses:
    """The last passes of a step, a row for each way to run them."""

    folded: StepEnds
    layers: LayerSums
    """Seconds of each layer's part of the last micro-batch's pass that adds to gradients."""
    message: Floats
    """Seconds of a message to the next stage."""
    loans: TiedWeightTimes | None
    in_turn: bool
    """Whether a stage that sends or receives does nothing else meanwhile."""
    equal_neighbours: Bools
    """Of each layer but the last whether the next one is alike in all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceSeconds:
    """Seconds in which a layer's gradient is reduced, by kind; a row for each way to share."""

    links: Floats
    """On the links."""
    waited: Floats
    """Of these, those in which the device does nothing else."""


def grad_reduce_end(
    parts: StagePartition, passed: LastPasses, reductions: ReduceSeconds
) -> MaxPlus:
    """When the stages of plans of one shape have reduced their gradients.

    Args:
        parts: of all plans.
        passed: their last passes.
        reductions: what they reduce.
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
        """All of them."""
        shape = self._shape
        if shape.schedule == "zero-bubble":
            return MaxPlus.of_terms([list(self._parted(stage)) for stage in range(shape.pipeline)])
        if shape.microbatches == 1:
            return MaxPlus.of_terms(self._through())
        return self._handing_on().beside(self._first()) if shape.chunks > 1 else self._first()

    def _handing_on(self) -> MaxPlus:
        """Of chunks that are reduced behind what they send on: all but the first."""
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
        """For each chunk a number for how many layers of each kind are in it and in those before.

        That is before it on its stage.
        """
        sorts = self._parts.chunk_sort.reshape(self._shape.virtual_stages, -1)
        found, before = [], np.zeros_like(sorts[0])
        for turn, own in enumerate(sorts):
            both = before * (1 + int(sorts.max())) + own
            before = np.unique(both, return_inverse=True)[1]
            found.append(before + turn * len(own))
        return np.concatenate(found)

    def _first(self) -> MaxPlus:
        """Of the chain's first chunk, whose layers are reduced within its pass."""
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
        """What each way (rows) has waited for in earlier turns of its stages."""
        waited, stops = self._waited, self._folded.stops
        if len(stops) == 1:
            return self._none[None]
        mean = waited[:, self._shape.pipeline : -1].mean(axis=1)
        return np.stack([each.chunks * mean + each.last * waited[:, -1] for each in stops])

    def _through(self) -> list[list[MaxPlusTerm]]:
        """Of one micro-batch, which goes back through stages that each reduce before they send.

        The last one sends it on behind the gradient of weights that it has borrowed.
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
        """Seconds of a chunk's last pass in which it hands over or takes over a gradient."""
        loans, passed = self._passed.loans, self._passed
        if loans is None:
            return 0.0
        hands = passed.in_turn * (chunk == self._shape.chunks - 1) * loans.message
        takes = chunk == self._parts.chunk[loans.owner]
        return np.asarray(hands + takes * (loans.taking + passed.in_turn * loans.message))

    def _parted(self, stage: int) -> Iterator[MaxPlusTerm]:
        """Of a stage that ends with the weights' part of its last backward pass."""
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
        """Of a chunk whose layers are reduced within a pass.

        Args:
            chunk: index of the chunk.
            start: when the pass begins.
            before: what its device has waited for on the way there.
            came: when the gradient of lent weights has come, if that may be later than the pass.
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
        """The ends of runs of equal layers of a chunk."""
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
    """Which ways (second axis) may be the longest, whatever each reduction takes.

    What ways wait for goes up evenly with how many inner chunks they have waited for, which every
    other way shares. So one is never the longest that takes at most the mean of those beside it.
    """
    outer = np.asarray(times.max(axis=2) > -np.inf)
    for own, ways in zip(times, outer, strict=True):
        mean = (own[:-4] + own[4:]) * (0.5 + _ROUNDING)
        ways[2:-2] &= (own[2:-2] > mean).any(axis=1)
    return outer


def equal_neighbours(kinds: Ints, patterns: Sequence[Sequence[Recompute]]) -> Bools:
    """Of each layer but the last whether the next is of its kind and computed again as it is.

    Args:
        kinds: of each layer.
        patterns: how each layer is computed again, in any of the runs.
    """
    whole = (kinds, *map(np.array, patterns))
    return np.asarray(np.logical_and.reduce([each[:-1] == each[1:] for each in whole]))
