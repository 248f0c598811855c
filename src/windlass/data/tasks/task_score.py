"""The score of a model on a task, from the likelihood of each choice."""

import math
from collections.abc import Sequence
from statistics import fmean

from windlass.data.tasks.task import Task
from windlass.document import Document


class TaskScore(Document):
    """How well a model answers the questions of a task."""

    task: str
    shots: int
    correct: tuple[bool, ...]
    """Whether the right choice was the likeliest one, for each question."""
    correct_normalised: tuple[bool, ...]
    """Whether it was the likeliest one per character."""
    answer_nats: float
    """Mean negative log-likelihood of the right choice, per byte of it."""
    chance: float
    """The accuracy of a guess."""

    @property
    def accuracy(self) -> float:
        """Share of questions whose right choice is the likeliest one."""
        return fmean(self.correct)

    @property
    def accuracy_normalised(self) -> float:
        """The same for the log-likelihood per character, which does not favour short choices."""
        return fmean(self.correct_normalised)

    @property
    def bits_per_byte(self) -> float:
        """Bits that the model needs for a byte of the right choice."""
        return self.answer_nats / math.log(2)


def score_choices(task: Task, log_likelihoods: Sequence[Sequence[float]]) -> TaskScore:
    """The score that some log-likelihoods give.

    Accuracies are `acc` and `acc_norm` of lm-evaluation-harness: the first choice wins a tie, and
    the length of a choice is its number of characters.

    Args:
        task: the questions.
        log_likelihoods: natural logarithm of the probability of each choice of each question.
    """
    plain: list[bool] = []
    normalised: list[bool] = []
    answer, nbytes = 0.0, 0
    for item, values in zip(task.items, log_likelihoods, strict=True):
        per_character = [
            value / len(choice) for value, choice in zip(values, item.choices, strict=True)
        ]
        plain.append(_argmax(values) == item.answer)
        normalised.append(_argmax(per_character) == item.answer)
        answer -= values[item.answer]
        nbytes += len(item.choices[item.answer].encode())
    return TaskScore(
        task=task.name,
        shots=task.shots,
        correct=tuple(plain),
        correct_normalised=tuple(normalised),
        answer_nats=answer / nbytes,
        chance=task.chance,
    )


def standard_error(values: Sequence[float]) -> float:
    """Standard error of a mean over questions: `s / sqrt(n)`, s with `n - 1` below the root.

    Args:
        values: one for each question: whether it was answered rightly, or the share of several
            models that did.
    """
    count, mean = len(values), fmean(values)
    if count < 2:
        return math.nan
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    return math.sqrt(variance / count)


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
