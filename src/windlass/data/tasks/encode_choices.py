"""The choices of a task as tokens."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from windlass.data.tasks.task import Task
from windlass.data.tokenizer import Tokenizer
from windlass.errors import InputErrors

_MAX_MESSAGES = 5


class EncodedChoice(NamedTuple):
    """A choice as tokens, behind the tokens of what a model reads before it."""

    context: tuple[int, ...]
    """At least one token."""
    tokens: tuple[int, ...]
    """At least one token."""


class EncodedTask(NamedTuple):
    """A task whose choices are tokens."""

    task: Task
    choices: list[list[EncodedChoice]]
    """The choices of each question; the windows of a whole text."""


def encode_task(task: Task, tokenizer: Tokenizer, longest: int | None = None) -> EncodedTask:
    """A task as a model reads it.

    Args:
        task: the questions.
        tokenizer: the model's.
        longest: most tokens that the model reads; None if it sets no limit.

    Raises:
        InputErrors: choices without a token of their own, or with more than the model reads.
    """
    encoded = EncodedTask(task, encode_choices(task, tokenizer, longest))
    messages = list(_unscorable(encoded, longest))
    if messages:
        raise InputErrors(messages[:_MAX_MESSAGES])
    return encoded


def _unscorable(encoded: EncodedTask, longest: int | None) -> Iterator[str]:
    """Why choices have no likelihood, a sentence each."""
    for number, choices in enumerate(encoded.choices, start=1):
        where = f"question {number} of task `{encoded.task.name}` has"
        for count in (len(choice.tokens) for choice in choices):
            if not count:
                yield (
                    f"{where} a choice that becomes one token with the end of its context; begin "
                    "it with a space, or set `target_delimiter`"
                )
            elif longest is not None and count > longest:
                yield (
                    f"{where} a choice of {count} tokens, and the model reads {longest}; leave it "
                    "out"
                )


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
