"""The clock folded to passes: when the stages of many plans of one order are done, all at once.

A step of many micro-batches repeats itself: from `Shape.settled` on each takes as long as the last.
Both steps between which it is measured are one until they part.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.pipeline.dependency_levels import DependencyLevel, dependency_levels
from windlass.cost.batched.pipeline.level_simulator import (
    FirstPassTimes,
    LevelSimulator,
    PassDurations,
    ReduceCount,
)
from windlass.cost.batched.schedule_index import PipelineShape


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnds:
    """Seconds from the begin of a step, apart from what devices wait for behind their passes.

    An array of three: a chunk or stage, how much of that lies on the way (`stops`; minus infinity
    where no way has so much), and a plan. The end is the largest over all ways.
    """

    stops: tuple[ReduceCount, ...]
    begun: Floats
    """When the last backward pass of the chain's first chunk, and of its last one, begins."""
    done: Floats
    """When that has ended, and where things are done in turn what it hands on has left."""
    end: Floats
    """When all passes of a stage have ended."""
    sent: Floats
    """When the last message of a stage has left."""
    firsts: FirstPassTimes

    def beyond(self, other: "StepEnds", times: Floats, place: Ints) -> "StepEnds":
        """Further than from here to `other`, of more plans than were folded.

        Args:
            other: of more micro-batches.
            times: as often as that, for each plan.
            place: of each plan among those that were folded.
        """

        def further(low: Floats, high: Floats) -> Floats:
            found = np.full((*low.shape[:2], len(place)), -np.inf)
            for at, ways in enumerate(low.max(axis=2) > -np.inf):
                own = low[at, ways]
                more = (high[at, ways] - own)[:, place]
                more *= times
                found[at, ways] = np.add(more, own[:, place], out=more)
            return found

        return StepEnds(
            stops=self.stops,
            begun=further(self.begun, other.begun),
            done=further(self.done, other.done),
            end=further(self.end, other.end),
            sent=further(self.sent, other.sent),
            firsts=self.firsts,
        )


def simulate_levels(
    shape: PipelineShape, durations: PassDurations, micros: Floats, place: Ints
) -> StepEnds:
    """When the stages are done with all passes of a step, gradients not yet reduced.

    Args:
        shape: of all plans.
        durations: a row for each chunk in the order of the chain.
        micros: micro-batches of each plan, where steps repeat themselves.
        place: of each of those plans among the durations.

    Returns:
        Of the plans if steps repeat themselves, else of the durations; first passes always of
        these.
    """
    if not shape.repeats:
        levels = dependency_levels(shape)
        return _folded(LevelSimulator(shape, durations, levels.places), levels.all)
    settled = shape.settled
    short, long = (
        dependency_levels(shape._replace(microbatches=count))
        for count in (settled, settled + shape.pipeline)
    )
    walk = LevelSimulator(shape, durations, long.places)
    both = walk.over(long.all[: long.settled]).copy()
    longer = _folded(walk, long.all[long.settled :])
    walk.state = both
    shorter = _folded(walk, short.all[long.settled :])
    return shorter.beyond(longer, (micros - settled) / shape.pipeline, place)


def _folded(walk: LevelSimulator, levels: Sequence[DependencyLevel]) -> StepEnds:
    """What is found at the end of some levels."""
    state = walk.over(levels)
    return StepEnds(
        stops=walk.stops,
        begun=state.begun,
        done=state.done,
        end=state.now,
        sent=state.sent,
        firsts=FirstPassTimes(
            begun=np.maximum(state.free, state.met), free=state.free, came=state.met
        ),
    )
