"""Questions with several choices, as a task file of lm-evaluation-harness."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from windlass.atomic_files import atomic_write


class Question(NamedTuple):
    """A text, and the texts that may follow it, one of which does."""

    context: str
    choices: tuple[str, ...]
    """Each holds the space or line end that it begins with."""
    answer: int
    """Position of the right choice."""


def save_questions(
    name: str, questions: Sequence[Question], folder: Path, *, examples: Sequence[Question] = ()
) -> Path:
    """Writes a task as a YAML file with JSON lines beside it, and returns the YAML file.

    Args:
        questions: what is asked.
        folder: receives the files.
        examples: solved questions of few-shot scoring, of which the first ones count.
    """
    files: dict[str, str] = {}
    for split, each in (("test", questions), ("train", examples)):
        if each:
            path = folder.absolute() / f"{name}.{split}.jsonl"
            atomic_write(path, "".join(json.dumps(one._asdict()) + "\n" for one in each))
            files[split] = str(path)
    task = {
        "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files},
        "output_type": "multiple_choice", "test_split": "test",
        "doc_to_text": "{{context}}", "doc_to_choice": "choices", "doc_to_target": "answer",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    if examples:
        task |= {"fewshot_split": "train", "fewshot_config": {"sampler": "first_n"}}
    path = folder / f"{name}.yaml"
    # JSON is YAML too.
    atomic_write(path, json.dumps(task, indent=2) + "\n")
    return path


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
