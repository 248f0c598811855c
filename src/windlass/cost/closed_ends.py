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
import numpy.typing as npt

from windlass.cost.closed_layers import Floats, Ints
from windlass.cost.closed_parts import LayerSums, Parts
from windlass.cost.closed_pipeline import Folded
from windlass.cost.closed_sums import Sums, Term
from windlass.cost.closed_walk import Stops
from windlass.spec.plan import Recompute


@dataclass(frozen=True, slots=True, kw_only=True)
class Loans:
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
class Passed:
    """The last passes of a step, a row for each way to run them."""

    folded: Folded
    layers: LayerSums
    """Seconds of each layer's part of the last micro-batch's pass that adds to gradients."""
    message: Floats
    """Seconds of a message to the next stage."""
    loans: Loans | None
    in_turn: bool
    """Whether a stage that sends or receives does nothing else meanwhile."""
    alike: npt.NDArray[np.bool_]
    """Of each layer but the last whether the next one is alike in all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """Seconds in which a layer's gradient is reduced, by kind; a row for each way to share."""

    links: Floats
    """On the links."""
    waited: Floats
    """Of these, those in which the device does nothing else."""


def ends(parts: Parts, passed: Passed, reductions: Reductions) -> Sums:
    """When the stages of plans of one shape have reduced their gradients.

    Args:
        parts: of all plans.
        passed: their last passes.
        reductions: what they reduce.
    """
    return _Stages(parts, passed, reductions).ends()


class _Stages:
    def __init__(self, parts: Parts, passed: Passed, reductions: Reductions) -> None:
        self._parts, self._passed, self._reductions = parts, passed, reductions
        self._shape, self._folded = parts.shape, passed.folded
        self._waited = parts.by_chunk(reductions.waited)
        self._queued = bool((reductions.links > reductions.waited).any())
        self._links = parts.by_chunk(reductions.links)
        self._none = np.zeros(len(reductions.links))
        self._before = {stops: self._waited_before(stops) for stops in passed.folded.stops}

    def ends(self) -> Sums:
        """All of them."""
        shape = self._shape
        if shape.order == "zero-bubble":
            stages = [list(self._parted(stage)) for stage in range(shape.pipeline)]
        elif shape.micros == 1:
            stages = self._through()
        else:
            stages = [list(self._stage(stage)) for stage in range(shape.pipeline)]
        return Sums.of_terms(stages)

    def _stage(self, stage: int) -> Iterator[Term]:
        """Of a stage whose chunks are reduced behind what they send on, but for the first."""
        pipeline, folded = self._shape.pipeline, self._folded
        chunks = range(stage, self._shape.chunks, pipeline)
        behind = np.cumsum(self._links[:, stage::pipeline], axis=1)
        for turn, chunk in enumerate(chunks if self._queued else chunks[:1]):
            for at, stops in enumerate(folded.stops):
                if np.isneginf(folded.done[chunk, at]).all():
                    continue
                before = self._before[stops]
                if chunk:
                    yield Term(folded.done[chunk, at], before + behind[:, turn])
                else:
                    yield from self._within(0, folded.begun[0, at], before)

    def _waited_before(self, stops: Stops) -> Floats:
        """What a way has waited for in earlier turns of its stages."""
        waited, pipeline = self._waited, self._shape.pipeline
        if self._shape.interleave == 1:
            return self._none
        mean = waited[:, pipeline:-1].mean(axis=1)
        return np.asarray(stops.chunks * mean + stops.last * waited[:, -1])

    def _through(self) -> list[list[Term]]:
        """Of one micro-batch, which goes back through stages that each reduce before they send.

        The last one sends it on behind the gradient of weights that it has borrowed.
        """
        shape, passed = self._shape, self._passed
        last = shape.chunks - 1
        own = passed.layers.by_chunk()
        starts = [Term(self._folded.begun[last, 0], self._none)]
        found: list[list[Term]] = []
        for stage in reversed(range(shape.pipeline)):
            leaving = passed.message if passed.in_turn and stage else 0.0
            found.append(
                [
                    Term(term.passes + leaving, term.exchanges)
                    for start in starts
                    for term in self._within(stage, start.passes, start.exchanges)
                ]
            )
            taking = own[:, stage] + self._extra(stage)
            onward = [
                Term(
                    start.passes + taking + passed.message, start.exchanges + self._waited[:, stage]
                )
                for start in starts
            ]
            loans = passed.loans
            if stage == last and loans is not None and not passed.in_turn:
                handed = starts[0].passes + loans.after + loans.message
                onward.append(Term(handed + passed.message, self._none))
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

    def _parted(self, stage: int) -> Iterator[Term]:
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
    ) -> Iterator[Term]:
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
        for at in self._decisive(low, high):
            through = self._passed.layers.over(at, high)
            queued = parts.over(links, low, at + 1) + parts.over(waited, at + 1, high)
            passes = start + through
            yield Term(passes + extra if at <= max(owner, low) else passes, before + queued)
            if came is not None and loans is not None and at <= owner:
                rest = self._passed.layers.over(at, owner)
                stopped = parts.over(waited, owner + 1, high)
                yield Term(came + loans.taking + rest, before + queued - stopped)

    def _decisive(self, low: int, high: int) -> list[int]:
        """The ends of runs of equal layers of a chunk."""
        if not self._queued:
            return [low]
        found = {low, high - 1}
        loans = self._passed.loans
        for at in range(low, high - 1):
            lent = loans is not None and loans.owner in (at, at + 1)
            if lent or not self._passed.alike[at]:
                found |= {at, at + 1}
        return sorted(found)


def alike(kinds: Ints, patterns: Sequence[Sequence[Recompute]]) -> npt.NDArray[np.bool_]:
    """Of each layer but the last whether the next is of its kind and computed again as it is.

    Args:
        kinds: of each layer.
        patterns: how each layer is computed again, in any of the runs.
    """
    whole = (kinds, *map(np.array, patterns))
    return np.asarray(np.logical_and.reduce([each[:-1] == each[1:] for each in whole]))
