"""The score of a model on a task."""

from collections.abc import Mapping
from typing import Any

from pydantic import model_validator

from windlass.document import Document

_FORMER_KEYS = (
    "output_type", "correct", "correct_normalised", "answer_nats", "chance",
)  # fmt: skip
"""Keys of scores that earlier versions kept; their metrics say the same."""


class TaskMetric(Document):
    """One number of a score."""

    name: str
    """In the words of lm-evaluation-harness, such as `acc`, `acc_norm` or `perplexity`; behind a
    filter with its name, such as `exact_match.strict-match`."""
    value: float
    standard_error: float | None = None
    """How far another draw of as many questions may be; None where it is not known."""


class TaskScore(Document):
    """How well a model answers the questions of a task."""

    task: str
    shots: int
    step: int | None = None
    """The step of the checkpoint; None of weights that belong to no run."""
    ema: bool = False
    """Whether averages that the run keeps beside its weights answered (`train.ema`)."""
    chat: bool = False
    """Whether the questions stood in the model's chat template."""
    metrics: tuple[TaskMetric, ...] = ()
    """All numbers of the task, in the order in which they are printed."""
    answers: Mapping[str, tuple[float, ...]] = {}
    """What each question counts in a metric that is a mean over questions, by its name."""

    @model_validator(mode="before")
    @classmethod
    def _without_former_keys(cls, values: Any) -> Any:  # noqa: ANN401  JSON of any kind
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in _FORMER_KEYS}

    def metric(self, name: str) -> float:
        """The value of a metric.

        Raises:
            KeyError: the task has none of that name.
        """
        return {metric.name: metric.value for metric in self.metrics}[name]
