"""When the masks of a run change: at which steps, how much, and in which legs.

`set` and `rigl` replace some blocks by others in place. `gradual` and `then-dense` change how many
are kept, and so the shapes of all weights: their runs are chains of legs, each planned and
predicted for itself.
"""

from itertools import pairwise
from math import cos, pi
from typing import NamedTuple

from windlass.schema import SparsityRequest


def updates_masks(sparsity: SparsityRequest | None, step: int, steps: int) -> bool:
    """Whether blocks are replaced after a step.

    Args:
        sparsity: of the run; None for a dense one.
    """
    if sparsity is None or not sparsity.changes_masks:
        return False
    return step % sparsity.every == 0 and step < min(steps, sparsity.until * steps)


def drop_share(sparsity: SparsityRequest, step: int, steps: int) -> float:
    """Share of a weight's kept blocks that the update after a step replaces.

    It is `drop / 2 * (1 + cos(pi * step / end))`, with updates up to the step `end`. Source: Evci
    et al. 2020, arXiv:1911.11134, section 3.
    """
    end = sparsity.until * steps
    return sparsity.drop / 2 * (1 + cos(pi * min(1.0, step / end)))


class Leg(NamedTuple):
    """A part of a run whose weights keep their shapes."""

    number: int
    """Counted from 0."""
    first: int
    """Its first step."""
    last: int
    """Its last step; less than `first` in a run too short for the leg."""


def legs(sparsity: SparsityRequest | None, steps: int) -> tuple[Leg, ...]:
    """The legs of a run, which together are all its steps; a single one if no shape changes.

    Args:
        sparsity: of the run; None for a dense one.
    """
    count = sparsity.legs if sparsity is not None else 1
    until = sparsity.until * steps if sparsity is not None else steps
    # The first leg of a short run has a step, because the request describes it.
    ends = [max(1, round(until * number / (count - 1))) for number in range(1, count)]
    ends.append(steps)
    return tuple(
        Leg(number, start + 1, end) for number, (start, end) in enumerate(pairwise([0, *ends]))
    )


def leg_of_step(sparsity: SparsityRequest | None, step: int, steps: int) -> Leg:
    """The leg in which a step runs.

    Args:
        sparsity: of the run; None for a dense one.
    """
    return next(leg for leg in legs(sparsity, steps) if step <= leg.last)


def last_step_of_leg(sparsity: SparsityRequest | None, steps: int) -> int:
    """The last step of a request's leg.

    Args:
        sparsity: as it is asked for; `leg` says in which leg. None for a dense run.
    """
    return legs(sparsity, steps)[sparsity.leg if sparsity is not None else 0].last


def describe_leg(sparsity: SparsityRequest | None, step: int, steps: int) -> str | None:
    """`leg 0 (0.875 absent, steps 1 to 70)`; None for a run with one leg.

    Args:
        sparsity: of the run; None for a dense one.
        step: a step of the leg, counted from 1.
    """
    if sparsity is None or sparsity.legs == 1:
        return None
    leg = leg_of_step(sparsity, step, steps)
    level = level_share(sparsity, leg.number) * sparsity.target_level
    state = f"{level:.3g} absent" if level else "dense"
    return f"leg {leg.number} ({state}, steps {leg.first} to {leg.last})"


def describe_legs(sparsity: SparsityRequest | None, steps: int) -> tuple[str, ...]:
    """Each leg of a run that has steps in words, as `describe_leg`; none for a run with one leg.

    Args:
        sparsity: of the run; None for a dense one.
    """
    words = (
        describe_leg(sparsity, leg.last, steps)
        for leg in legs(sparsity, steps)
        if leg.first <= leg.last
    )
    return tuple(filter(None, words))


def leg_before_others(sparsity: SparsityRequest | None, steps: int) -> str | None:
    """The leg of a request in words, as `describe_leg`; None if the run ends with it.

    Args:
        sparsity: as it is asked for; `leg` says in which leg.
    """
    last = last_step_of_leg(sparsity, steps)
    return describe_leg(sparsity, last, steps) if last < steps else None


def sparsity_of_leg(sparsity: SparsityRequest | None) -> SparsityRequest | None:
    """What the layers of a request's leg are built with; None if they are dense.

    Args:
        sparsity: as it is asked for; `leg` says in which leg.
    """
    share = level_share(sparsity, sparsity.leg) if sparsity is not None else 0.0
    if sparsity is None or share == 0:
        return None
    if share == 1:
        return sparsity
    roles = sparsity.roles and {role: share * level for role, level in sparsity.roles.items()}
    return sparsity.model_copy(update={"level": share * sparsity.target_level, "roles": roles})


def level_share(sparsity: SparsityRequest, leg: int) -> float:
    """Share of the level that is asked for that a leg has: 0 if it is dense.

    Leg k of the n legs of `gradual`, from 0, has `1 - (1 - k / (n - 1))^3`. Source: Zhu & Gupta
    2017, arXiv:1710.01878, equation 1, with an initial sparsity of 0.
    """
    if sparsity.schedule == "gradual":
        return 1 - (1 - leg / (sparsity.legs - 1)) ** 3
    return 0.0 if sparsity.schedule == "then-dense" and leg else 1.0
