"""Steps of optimizers whose updates read sums over whole weights, pass by pass."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import ClassVar, Protocol

from torch import Tensor

from windlass.runtime.optimizer_state.factored_moment import FactoredMoment
from windlass.runtime.optimizers.adafactor import AdafactorStep
from windlass.runtime.optimizers.lamb import LambStep
from windlass.runtime.optimizers.updates import Chunk, Hyperparameters, Scratch
from windlass.schema import OptimizerLaw


class WeightStep(Protocol):
    """One step of one weight, which sees all of it in each of several passes."""

    reads_gradient: ClassVar[tuple[bool, ...]]
    """Whether each pass reads gradients."""

    def visit(self, index: int, chunk: Chunk, gradient: Tensor) -> None:
        """Sees a chunk in a pass, counted from 0; the last pass updates it.

        The gradient is in the master's precision and may be overwritten if no later pass reads it.
        """

    def own_sums(self) -> Tensor:
        """`Float[n]`: what the chunks of a pass add up to, handed over."""

    def take(self, index: int, sums: Tensor) -> None:
        """Goes on with what a pass summed over the whole weight."""


def step_type(law: OptimizerLaw) -> type[AdafactorStep] | type[LambStep]:
    """The steps of an optimizer that reads sums over whole weights."""
    return AdafactorStep if law.factored else LambStep


def weight_step(
    law: OptimizerLaw,
    hyper: Hyperparameters,
    factors: FactoredMoment | None,
    scratch: Scratch,
    *,
    decays: bool,
) -> WeightStep:
    """A step of one weight.

    Args:
        factors: second moment by rows and columns; None if the weight has none.
    """
    if law.factored:
        return AdafactorStep(hyper, factors, scratch)
    return LambStep(hyper, scratch, scales=decays)


def whole_weight_passes(
    law: OptimizerLaw, new_step: Callable[[str], WeightStep]
) -> Iterator[Callable[[Chunk], None]]:
    """The passes of a step where one rank has whole weights, each called with every chunk."""
    steps: dict[str, tuple[int, WeightStep]] = {}

    def visit(index: int, chunk: Chunk) -> None:
        before, step = steps.get(chunk.name) or (0, new_step(chunk.name))
        if before < index:
            step.take(before, step.own_sums())
        steps[chunk.name] = index, step
        step.visit(index, chunk, chunk.gradient)

    return (partial(visit, index) for index in range(len(step_type(law).reads_gradient)))
