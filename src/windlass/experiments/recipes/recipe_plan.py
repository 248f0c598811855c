"""What a recipe runs: arms of settings, each with several seeds, as one sweep."""

from collections.abc import Mapping
from typing import Any

from windlass.document import Document
from windlass.schema import Request
from windlass.sweep import SweepRequest

_SEEDS = {"train.seed": "1..1000"}
"""Seeds that the sweep of a recipe could run; it ends after those that are asked for, and goes on
if more are."""


class RecipeLeg(Document):
    """A part of a run in which a step costs the same."""

    steps: int
    flop: float
    """FLOP of one step."""
    predicted_seconds: float
    """Predicted time of one step."""


class RecipeArm(Document):
    """One set of settings that a recipe runs."""

    name: str
    meaning: str
    """What it is, in words that can follow a colon."""
    settings: dict[str, Any]
    """Keys of a request, beside those that all arms share."""
    parameters: int
    legs: tuple[RecipeLeg, ...]

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return sum(leg.steps for leg in self.legs)

    @property
    def flop(self) -> float:
        """FLOP of a run."""
        return self.flop_after(self.steps)

    @property
    def predicted_seconds(self) -> float:
        """Predicted time of a run's steps."""
        return sum(leg.steps * leg.predicted_seconds for leg in self.legs)

    def flop_after(self, step: int) -> float:
        """FLOP of the first steps of a run."""
        total, left = 0.0, step
        for leg in self.legs:
            total += min(left, leg.steps) * leg.flop
            left -= min(left, leg.steps)
        return total


class RecipePlan(Document):
    """A recipe at one scale: everything that it runs."""

    recipe: str
    scale: str
    overrides: tuple[str, ...] = ()
    """What the caller set beside the scale, for all arms."""
    settings: dict[str, Any]
    """Keys of a request that all arms share."""
    arms: tuple[RecipeArm, ...]
    notes: tuple[str, ...] = ()
    """How it compares, a sentence each."""

    @property
    def name(self) -> str:
        """The name of its sweep, and so the group of its runs."""
        return f"{self.recipe}-{self.scale}"

    def sweep(self, seeds: int, jobs: int) -> SweepRequest:
        """Its runs as a sweep: all arms with the first seed, then all with the next.

        So what changes on a machine with the hour falls on all arms alike.

        Args:
            seeds: number of seeds.
            jobs: runs at a time.
        """
        return SweepRequest(
            name=self.name,
            request=self.settings,
            space=_SEEDS,
            arms={arm.name: arm.settings for arm in self.arms},
            objectives=("held_out_loss",),
            sampler="grid",
            trials=seeds * len(self.arms),
            jobs=jobs,
        )

    def predicted_seconds(self, seeds: int) -> float:
        """Predicted time of all steps of all runs, one after another."""
        return seeds * sum(arm.predicted_seconds for arm in self.arms)


def settings_of(overrides: tuple[str, ...]) -> dict[str, Any]:
    """The values of `key=value` overrides by dotted key; `request_of` checks them.

    Raises:
        InputErrors: an override is none.
    """
    words = (f"request.{override}" for override in overrides)
    return SweepRequest.resolve(None, ("name=recipe", "space.train.seed=1..2", *words)).request


def request_of(settings: Mapping[str, Any]) -> Request:
    """The request with some values by dotted key.

    Raises:
        InputErrors: all keys and values that are not valid.
    """
    plain = SweepRequest(name="recipe", space=_SEEDS, request=dict(settings))
    return Request.resolve(None, plain.overrides({}))
