"""The choices of a task as tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from windlass.data.tasks.task import Task
from windlass.data.tokenizer import Tokenizer


class EncodedChoice(NamedTuple):
    """A choice as tokens, behind the tokens of what a model reads before it."""

    context: tuple[int, ...]
    """At least one token."""
    tokens: tuple[int, ...]
    """At least one token."""


def encode_choices(
    task: Task, tokenizer: Tokenizer, longest: int | None = None
) -> list[list[EncodedChoice]]:
    """The choices of each question as tokens, in the order of the questions.

    Prompt and choice are tokenized together, as in training, and divided where the tokens of the
    prompt alone end. White space at the end of a prompt goes to the choice, as words begin with it.
    Source: `_encode_pair` of lm-evaluation-harness 0.4, which does the same.

    Args:
        task: the questions; the likelihood of a whole text is the sum over its windows.
        tokenizer: the model's.
        longest: most tokens that the model reads; None if it sets no limit.
    """
    if task.output_type == "loglikelihood_rolling":
        return [
            list(_windows(tokenizer.encode(item.choices[0]), tokenizer.end_of_text, longest))
            for item in task.items
        ]
    return [
        [
            _encoded(tokenizer, task.prompt(item), task.target_delimiter + choice)
            for choice in item.choices
        ]
        for item in task.items
    ]


def _encoded(tokenizer: Tokenizer, prompt: str, choice: str) -> EncodedChoice:
    bare = prompt.rstrip()
    context = tokenizer.encode(bare)
    whole = tokenizer.encode(bare + prompt[len(bare) :] + choice)
    # A prompt of nothing is the beginning of a text, which an end of text stands before.
    before = context or [tokenizer.end_of_text]
    return EncodedChoice(tuple(before), tuple(whole[len(context) :]))


def _windows(
    tokens: Sequence[int], end_of_text: int, longest: int | None
) -> Iterator[EncodedChoice]:
    """A text in windows that together predict each of its tokens once.

    The last window has as much context as the model reads, the others one token. Source:
    `get_rolling_token_windows` of lm-evaluation-harness 0.4, at a context of one token.
    """
    row = (end_of_text, *tokens)
    size = longest or len(tokens)
    for first in range(1, len(row), size):
        last = min(first + size, len(row))
        begin = max(last - 1 - size, 0)
        yield EncodedChoice(row[begin:first], row[first:last])
