"""Comparisons: a request planned for several machines, and the smallest machine for a model."""

from windlass.document import Document
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction


class MachineForecast(Document):
    """The best plan of a request on one machine; every number is predicted."""

    machine: str
    devices: int
    """Number of devices that the machine has."""
    global_batch: int
    """Sequences per step that the request asks for."""
    plan: Plan | None
    """None if nothing fits, or if the request has no plan on this machine."""
    prediction: Prediction | None
    infeasible_reason: str
    """Why there is no plan; empty if there is one."""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second over all replicas; 0 without a plan."""
        return self.prediction.tokens_per_second if self.prediction else 0.0

    @property
    def slowest_term(self) -> tuple[str, float]:
        """The term that takes most of the step, and its share of the step.

        Raises:
            ValueError: there is no plan.
        """
        if self.prediction is None:
            raise ValueError(f"no plan fits {self.machine}")
        term, seconds = max(self.prediction.by_term.items(), key=lambda item: item[1])
        return term, seconds / self.prediction.step_seconds


class SmallestMachine(Document):
    """The smallest machine of a family that a model fits on; every number is predicted."""

    model: str
    parameters: int
    family: str
    machine: str | None
    """The smallest machine with a plan that fits; None if not even the largest has one."""
    devices: int | None
    """Number of devices that the fastest plan there takes."""
    parallelism: str | None
    """Parallel degrees of that plan, such as `PP=2 TP=8 DP=4`."""
    prediction: Prediction | None
    """Prediction of that plan."""
    machines_tried: tuple[str, ...]
    """The machines that were planned for, smallest first."""
    infeasible_reason: str
    """Why nothing fits the last machine that was refused; empty if none was."""
