"""The score of a model on a task, from the likelihood of each choice."""

import math
import re
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.data.tasks.task import Task
from windlass.schema import TaskMetric, TaskScore

_RESAMPLES, _CHUNK = 100_000, 1_000
"""Draws of a bootstrap, and how many share a seed, as in lm-evaluation-harness."""
_WHITE_SPACE = re.compile(r"\s+")


class ChoiceLikelihood(NamedTuple):
    """How likely a model finds a choice."""

    nats: float
    """Natural logarithm of its probability."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest one."""


def score_choices(
    task: Task,
    likelihoods: Sequence[Sequence[ChoiceLikelihood]],
    *,
    step: int | None = None,
    bootstrap: bool = True,
) -> TaskScore:
    """The score that some log-likelihoods give.

    All metrics but the `bits_per_byte` of choices and targets are those of lm-evaluation-harness:
    the first choice wins a tie, and the length of a choice is its number of characters.

    Args:
        task: the questions.
        likelihoods: of each choice of each question; a whole text has one for each window.
        step: the step of the checkpoint that gave them.
        bootstrap: whether the standard error of a perplexity is drawn, which takes a second.
    """
    answers = [_answer(task, index, row) for index, row in enumerate(likelihoods)]
    texts = [item.choices[item.answer] for item in task.items]
    nbytes = sum(len(text.encode()) for text in texts)
    correct, normalised = _correct(task, likelihoods)
    score = TaskScore(
        task=task.name,
        output_type=task.output_type,
        shots=task.shots,
        step=step,
        correct=correct,
        correct_normalised=normalised,
        answer_nats=-math.fsum(answers) / nbytes,
        chance=task.chance,
    )
    return score.model_copy(update={"metrics": tuple(_metrics(score, answers, texts, bootstrap))})


def _answer(task: Task, index: int, row: Sequence[ChoiceLikelihood]) -> float:
    """The log-likelihood of what is right."""
    if task.output_type == "loglikelihood_rolling":
        return sum(window.nats for window in row)
    return row[task.items[index].answer].nats


def _correct(
    task: Task, likelihoods: Sequence[Sequence[ChoiceLikelihood]]
) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Whether each question was answered rightly, also per character."""
    if task.output_type == "loglikelihood_rolling":
        return (), ()
    if task.output_type == "loglikelihood":
        return tuple(one.is_greedy for (one,) in likelihoods), ()
    plain: list[bool] = []
    normalised: list[bool] = []
    for item, row in zip(task.items, likelihoods, strict=True):
        per_character = [
            one.nats / len(choice) for one, choice in zip(row, item.choices, strict=True)
        ]
        plain.append(_argmax([one.nats for one in row]) == item.answer)
        normalised.append(_argmax(per_character) == item.answer)
    return tuple(plain), tuple(normalised)


def _metrics(
    score: TaskScore, answers: Sequence[float], texts: Sequence[str], bootstrap: bool
) -> Iterator[TaskMetric]:
    """The numbers that are printed."""
    if score.correct:
        yield _share("acc", score.correct)
    if score.correct_normalised:
        yield _share("acc_norm", score.correct_normalised)
    yield TaskMetric(name="bits_per_byte", value=score.bits_per_byte)
    if score.output_type == "loglikelihood":
        error = _bootstrap(answers) if bootstrap else None
        yield TaskMetric(name="perplexity", value=_exp(-fmean(answers)), standard_error=error)
    if score.output_type == "loglikelihood_rolling":
        words = sum(len(_WHITE_SPACE.split(text)) for text in texts)
        yield TaskMetric(name="byte_perplexity", value=_exp(score.answer_nats))
        yield TaskMetric(name="word_perplexity", value=_exp(-math.fsum(answers) / words))


def _share(name: str, values: Sequence[bool]) -> TaskMetric:
    error = standard_error(values) if len(values) > 1 else None
    return TaskMetric(name=name, value=fmean(values), standard_error=error)


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


def _bootstrap(values: Sequence[float]) -> float | None:
    """Standard error of a perplexity `exp(-mean(values))`, by resampling; None for one value.

    The draws are those of `bootstrap_stderr` of lm-evaluation-harness 0.4: Python's Mersenne
    Twister, seeded with the number of the chunk, which numpy's old generator is too.
    """
    if len(values) < 2:
        return None
    array = np.array(values)
    chunks = [_resampled(array, seed) for seed in range(_RESAMPLES // _CHUNK)]
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.exp(-np.concatenate(chunks)).std(ddof=1))


def _resampled(values: npt.NDArray[np.float64], seed: int) -> npt.NDArray[np.float64]:
    """Means of resamples, `Float[resample]`."""
    # A list is a key of the generator, as in Python's own; a number alone would be another one.
    twister = np.random.RandomState([seed])
    draws = twister.random_sample((_CHUNK, len(values)))
    means: npt.NDArray[np.float64] = values[(draws * len(values)).astype(np.int64)].mean(axis=1)
    return means


def _exp(exponent: float) -> float:
    """The exponential; infinity where it is beyond the largest number."""
    try:
        return math.exp(exponent)
    except OverflowError:
        return math.inf


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
