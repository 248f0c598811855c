"""Questions about Python code, made of held-out text: nothing is drawn, so they never change."""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from windlass.atomic_files import atomic_write
from windlass.errors import DataError


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


_CONTEXT_LINES = 4
_CONTEXT_CHARACTERS = 180
"""Most characters of a context, so that three of them fit into the sequence of a small model."""
_LINE = (10, 56)
"""Fewest and most characters of a line that is asked for, without its indentation."""
CODE_CHOICES = 4
"""Choices of each question."""
_ALIKE = 0.35
"""Largest relative difference in length between the choices of a question."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A line of code with the lines before it."""

    document: int
    context: str
    indentation: str
    line: str
    """Without its indentation."""
    order: str
    """A hash of all this, by which questions are picked."""


class CodeTask(NamedTuple):
    """Questions of one kind."""

    name: str
    questions: tuple[Question, ...]
    examples: tuple[Question, ...]
    """Solved ones of few-shot scoring."""


def code_tasks(
    texts: Iterable[str], *, items: int = 200, examples: int = 4
) -> tuple[CodeTask, ...]:  # fmt: skip
    """Two tasks made of Python sources.

    `next-line` asks which of four lines follows some lines of a function; the other three stand in
    other files, at the same indentation, and are about as long. `last-name` asks which of four
    names ends a line; the other three stand in the same file.

    Args:
        texts: sources that no model was trained on, a file each.
        items: questions of each task.
        examples: solved questions of each task, from other places.

    Raises:
        DataError: the texts have too few lines of that kind.
    """
    documents = list(texts)
    places = sorted(_places(documents), key=lambda place: place.order)
    made = {
        "next-line": _next_lines(places, items + examples),
        "last-name": _last_names(places, documents, items + examples),
    }
    for name, questions in made.items():
        if len(questions) < items + examples:
            raise DataError(
                f"{len(documents)} held-out texts give {len(questions)} questions of task "
                f"`{name}`, which needs {items + examples}; hold out more text (`data.held_out`)"
            )
    return tuple(
        CodeTask(name, tuple(questions[examples:]), tuple(questions[:examples]))
        for name, questions in made.items()
    )


def _places(documents: Sequence[str]) -> Iterable[_Place]:
    """All lines of functions that can be asked for, each with the lines before it."""
    for number, text in enumerate(documents):
        lines = [line.rstrip() for line in text.expandtabs().splitlines() if line.strip()]
        start, quoted = None, False
        for index, line in enumerate(lines):
            was_quoted, quoted = quoted, quoted ^ (line.count('"""') % 2 == 1)
            if not quoted and line.lstrip().startswith(("def ", "async def ")):
                start = index
                continue
            if start is None or index - start < 2 or was_quoted or not _is_code(line):
                continue
            before = "\n".join(lines[max(start, index - _CONTEXT_LINES) : index])
            bare = line.lstrip()
            if len(before) <= _CONTEXT_CHARACTERS and _LINE[0] <= len(bare) <= _LINE[1]:
                yield _Place(
                    document=number,
                    context=before,
                    indentation=line[: len(line) - len(bare)],
                    line=bare,
                    order=_hash(before + line),
                )


def _is_code(line: str) -> bool:
    """Whether a line is an indented one of code, as far as a glance tells."""
    bare = line.lstrip()
    return bare != line and line.isascii() and bare[0] not in "#\"')]}" and '"""' not in bare


def _next_lines(places: Sequence[_Place], count: int) -> list[Question]:
    by_indentation: dict[str, list[_Place]] = defaultdict(list)
    for place in places:
        by_indentation[place.indentation].append(place)
    items: list[Question] = []
    for place in places:
        if len(items) == count:
            break
        # Places are in the order of their hashes: the next ones are as good as drawn.
        others = by_indentation[place.indentation]
        first = others.index(place)
        rotated = [*others[first + 1 :], *others[:first]]
        lines = [other.line for other in rotated if other.document != place.document]
        item = _item(place, place.context, f"\n{place.indentation}", place.line, lines)
        items += [item] if item is not None else []
    return items


def _last_names(places: Sequence[_Place], documents: Sequence[str], count: int) -> list[Question]:
    items: list[Question] = []
    for place in places:
        if len(items) == count:
            break
        names = list(_NAME.finditer(place.line))
        if len(names) < 2:
            continue
        last, head = names[-1], place.line[: names[-1].start()]
        if not head.rstrip(" ."):
            continue
        known = sorted(set(_NAME.findall(documents[place.document])), key=_hash)
        context = f"{place.context}\n{place.indentation}{head}"
        space = context[len(context.rstrip()) :]
        item = _item(place, context.rstrip(), space, last.group(), known)
        items += [item] if item is not None else []
    return items


def _item(
    place: _Place, context: str, before: str, right: str, candidates: Iterable[str]
) -> Question | None:
    """A question with the first candidates that are about as long as the right choice.

    Args:
        place: where it comes from, which decides on the order of the choices.
        before: what each choice begins with.
        candidates: wrong ones, and the right one again, in the order of preference.
    """
    wrong: list[str] = []
    for text in candidates:
        alike = abs(len(text) - len(right)) <= _ALIKE * max(len(text), len(right))
        if alike and text != right and text not in wrong:
            wrong.append(text)
        if len(wrong) == CODE_CHOICES - 1:
            break
    else:
        return None
    answer = int(place.order[:8], 16) % CODE_CHOICES
    choices = [*wrong[:answer], right, *wrong[answer:]]
    return Question(
        context=context, choices=tuple(before + text for text in choices), answer=answer
    )


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()


class EncodedChoice(NamedTuple):
    """A choice as tokens, behind the tokens of what a model reads before it."""

    context: tuple[int, ...]
    """At least one token."""
    tokens: tuple[int, ...]
    """At least one token."""


class ChoiceLikelihood(NamedTuple):
    """How likely a model finds a choice."""

    nats: float
    """Natural logarithm of its probability."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest one."""
