"""Offer: what one machine does for one request, as it is predicted; rows of comparisons."""

from windlass.document import Document
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction


class MachineForecast(Document):
    """The best plan of a request on one machine; every number of it is predicted."""

    machine: str
    devices: int
    """That the machine has."""
    global_batch: int
    """Sequences a step that were asked for."""
    plan: Plan | None
    """None: nothing fits, or the request has no plan there."""
    prediction: Prediction | None
    infeasible_reason: str
    """Why there is no plan; empty if there is one."""

    @property
    def tokens_per_second(self) -> float:
        """Over all replicas; 0 without a plan."""
        return self.prediction.tokens_per_second if self.prediction else 0.0

    @property
    def slowest_term(self) -> tuple[str, float]:
        """The term of the step that takes longest, and its share of the step.

        Raises:
            ValueError: there is no plan.
        """
        if self.prediction is None:
            raise ValueError(f"no plan fits {self.machine}")
        term, seconds = max(self.prediction.by_term.items(), key=lambda each: each[1])
        return term, seconds / self.prediction.step_seconds


class SmallestMachine(Document):
    """What a model needs of a family; every number of it is predicted."""

    model: str
    parameters: int
    family: str
    machine: str | None
    """The smallest on which a plan fits; None: not even the largest."""
    devices: int | None
    """That the fastest plan there takes."""
    parallelism: str | None
    """`p2 t8 r4`."""
    prediction: Prediction | None
    """Of that plan."""
    machines_tried: tuple[str, ...]
    """The machines that it was planned for, smallest first."""
    infeasible_reason: str
    """Why nothing fits the last one that was refused; empty if none was."""
