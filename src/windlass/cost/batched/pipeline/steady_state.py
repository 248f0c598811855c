"""Steady state: the ends of all stages of many plans, extrapolated from a few micro-batches.

A step of many micro-batches repeats itself: from `PipelineShape.settled` on each takes as long as
the last. The two steps between which that is measured are simulated as one until they differ.
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
    """Times in a step, without blocking reductions after passes.

    Arrays are `[chunk or stage, path, plan]`; a path is given by the reductions that lie on it
    (`stops`), minus infinity if there is none. The end is the largest over all paths.
    """

    stops: tuple[ReduceCount, ...]
    begun: Floats
    """Start of the last backward pass of the first chunk, and of the last one."""
    done: Floats
    """End of that pass, or of its message on a bulk-synchronous machine."""
    end: Floats
    """End of all passes of a stage."""
    sent: Floats
    """Time at which the last message of a stage has left."""
    firsts: FirstPassTimes

    def beyond(self, other: "StepEnds", times: Floats, place: Ints) -> "StepEnds":
        """Extrapolation from here to `other` and further, for more plans than were simulated.

        Args:
            other: ends of more micro-batches.
            times: multiple of the distance to `other`, `[plan]`.
            place: index of each plan among those simulated.
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
    """Ends of all passes of a step, before gradients are reduced.

    Args:
        shape: pipeline shape of all plans.
        durations: durations of passes, `[chunk, config]`.
        micros: micro-batches of each plan, if steps repeat themselves.
        place: index of each of those plans among the durations.

    Returns:
        Ends of the plans if steps repeat themselves, else of the durations; first passes always of
        the latter.
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
    """The ends after some levels."""
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
