"""The score of a model on a task."""

import math
from statistics import fmean
from typing import Literal

from windlass.document import Document

OutputType = Literal["multiple_choice", "loglikelihood", "loglikelihood_rolling"]
"""What a task asks of a model, in the words of lm-evaluation-harness: which of several choices it
finds likeliest, how likely a target is after a context, or how likely whole texts are."""


class TaskMetric(Document):
    """One number of a score."""

    name: str
    """`acc`, `acc_norm`, `bits_per_byte`, `perplexity`, `word_perplexity` or `byte_perplexity`."""
    value: float
    standard_error: float | None = None
    """How far another draw of as many questions may be; None where it is not known."""


class TaskScore(Document):
    """How well a model answers the questions of a task."""

    task: str
    output_type: OutputType = "multiple_choice"
    shots: int
    step: int | None = None
    """The step of the checkpoint; None of weights that belong to no run."""
    ema: bool = False
    """Whether averages that the run keeps beside its weights answered (`train.ema`)."""
    correct: tuple[bool, ...]
    """Whether the right choice was the likeliest one, for each question; of a target, whether each
    of its tokens was the likeliest one. Empty for whole texts."""
    correct_normalised: tuple[bool, ...]
    """Whether it was the likeliest one per character; only of several choices."""
    answer_nats: float
    """Mean negative log-likelihood of what is right, per byte of it."""
    chance: float
    """The accuracy of a guess."""
    metrics: tuple[TaskMetric, ...] = ()
    """All numbers of the task, in the order in which they are printed."""

    @property
    def accuracy(self) -> float:
        """Share of questions whose right choice is the likeliest one; NaN for whole texts."""
        return fmean(self.correct) if self.correct else math.nan

    @property
    def accuracy_normalised(self) -> float:
        """The same for the log-likelihood per character, which does not favour short choices."""
        return fmean(self.correct_normalised) if self.correct_normalised else math.nan

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for a byte of what is right."""
        return self.answer_nats / math.log(2)
