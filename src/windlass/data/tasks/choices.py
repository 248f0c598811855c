"""A choice as tokens, and how likely a model finds it."""

from typing import NamedTuple


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
