"""Renders conversations through a tokenizer's own Jinja template."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from windlass.atomic_files import atomic_write
from windlass.data.chat.template_process import TemplateFault, TemplateLimits, TemplateProcess
from windlass.schema import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE

Message = Mapping[str, Any]
"""A turn: its `role`, its `content`, and what else a template may read (`Any`: any JSON)."""


class Conversation(NamedTuple):
    """A conversation to render."""

    messages: Sequence[Message]
    tools: Sequence[object] | None = None
    """What the model may call, as JSON schemas."""
    turns: Sequence[int] = ()
    """Messages that are answers."""
    documents: Sequence[object] | None = None
    """What the model may read, for templates of retrieval."""
    variables: Mapping[str, object] = {}
    """Further variables of the template, which go before its own."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Start and end of each answer, in characters and in order: of what the template marks as
    generated or, without marks, of what each turn adds."""
    dropped: frozenset[int] = frozenset()
    """Turns of which a part is left out as others follow, such as thoughts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may name."""

    name: str
    """Where it comes from, for people."""
    source: str
    special_tokens: Mapping[str, str]
    """Text of `bos_token`, `eos_token` and so on, as far as the tokenizer has them."""
    variables: Mapping[str, object] = field(default_factory=dict)
    """Further variables of the template, such as `enable_thinking`."""
    date: str | None = None
    """Day that `strftime_now` tells, such as `2025-12-31`; None is today."""
    added_tokens: tuple[str, ...] = ()
    """Texts of the tokenizer's added tokens, within which no answer ends."""
    limits: TemplateLimits = field(default_factory=TemplateLimits)
    """What it may take to render."""

    @property
    def fingerprint(self) -> str:
        """Hash of all that a conversation's text depends on."""
        parts: list[object] = [self.source, dict(self.special_tokens), dict(self.variables)]
        if tells_date(self.source):
            parts.append(self.date)
        content = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def compile(self) -> None:
        """Tells whether it is a template.

        Raises:
            TemplateFault: it is none.
            DataError: the package transformers is missing.
        """
        _process(self.limits).render(self.source, ())

    def save(self, folder: Path) -> None:
        """Writes the template and its special tokens, for `find_chat_template`."""
        atomic_write(folder / CHAT_TEMPLATE_FILE, self.source)
        tokens = json.dumps(dict(self.special_tokens), indent=2, sort_keys=True)
        atomic_write(folder / SPECIAL_TOKENS_FILE, f"{tokens}\n")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[object] | None = None,
        *,
        generation_prompt: bool = False,
    ) -> Rendered:
        """The text of a conversation.

        Args:
            tools: what the model may call, as JSON schemas.
            generation_prompt: ends with what comes before an answer.

        Raises:
            TemplateFault: the template has a mistake, or refuses the conversation.
            TemplateLimitFault: it takes too much time or memory.
        """
        (rendered,) = self.render_all(
            [Conversation(messages, tools)], generation_prompt=generation_prompt
        )
        if isinstance(rendered, TemplateFault):
            raise rendered
        return rendered

    def render_all(
        self, conversations: Sequence[Conversation], *, generation_prompt: bool = False
    ) -> list[Rendered | TemplateFault]:
        """The texts of conversations, or why there is none.

        Args:
            conversations: all that are rendered at once, which is faster.
            generation_prompt: each ends with what comes before an answer.

        Raises:
            TemplateLimitFault: one of them takes too much time or memory.
        """
        shared = {
            **self.special_tokens, **self.variables, "add_generation_prompt": generation_prompt,
        }  # fmt: skip
        answers = _process(self.limits).render(
            self.source,
            [_arguments(each, shared, self.added_tokens) for each in conversations],
            self.date,
        )
        return [_rendered(answer) for answer in answers]


def tells_date(source: str) -> bool:
    """Whether a template asks for the date."""
    return "strftime_now" in source


def _arguments(
    conversation: Conversation, shared: Mapping[str, object], added_tokens: tuple[str, ...]
) -> Mapping[str, object]:
    """What the worker renders a conversation from; a row's variables go before all others."""
    return {
        **shared, **conversation.variables, "messages": conversation.messages,
        "turns": conversation.turns, "tools": conversation.tools,
        "documents": conversation.documents, "added_tokens": added_tokens,
    }  # fmt: skip


def _rendered(answer: Mapping[str, Any]) -> Rendered | TemplateFault:
    if "fault" in answer:
        return TemplateFault(answer["fault"])
    if "ambiguous" in answer:
        return TemplateFault(
            f"it renders message {answer['ambiguous']} in another way once others follow, so that "
            "its answer cannot be told; mark answers in the template with `{% generation %}` and "
            "`{% endgeneration %}`"
        )
    answers = tuple((start, end) for start, end in answer["answers"])
    return Rendered(answer["text"], answers, frozenset(answer["dropped"]))


@lru_cache(maxsize=8)
def _process(limits: TemplateLimits) -> TemplateProcess:
    return TemplateProcess(limits)
