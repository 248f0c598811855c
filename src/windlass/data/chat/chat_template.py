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
    """Messages that are answers, which a template without marks must not change once others
    follow."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Start and end of each answer, in characters and in order: of what the template marks as
    generated or, without marks, of what each turn adds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may name."""

    name: str
    """Where it comes from, for people."""
    source: str
    special_tokens: Mapping[str, str]
    """Text of `bos_token`, `eos_token` and so on, as far as the tokenizer has them."""
    limits: TemplateLimits = field(default_factory=TemplateLimits)
    """What it may take to render."""

    @property
    def fingerprint(self) -> str:
        """Hash of all that a conversation's text depends on."""
        content = json.dumps([self.source, dict(self.special_tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def marks_answers(self) -> bool:
        """Whether it has `{% generation %}` blocks around what a model should learn to say."""
        return _process(self.source, self.limits).marks_answers

    def save(self, folder: Path) -> None:
        """Writes the template and its special tokens, for `find_chat_template`.

        Args:
            folder: where the tokenizer's file is.

        Raises:
            StorageError: the disk is full or not writable.
        """
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
            messages: the turns.
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
            **self.special_tokens, "documents": None, "add_generation_prompt": generation_prompt,
        }  # fmt: skip
        answers = _process(self.source, self.limits).render(
            [each._asdict() | shared for each in conversations]
        )
        return [_rendered(answer) for answer in answers]


def _rendered(answer: Mapping[str, Any]) -> Rendered | TemplateFault:
    if "fault" in answer:
        return TemplateFault(answer["fault"])
    if "changed" in answer:
        return TemplateFault(
            f"it renders message {answer['changed']} in another way once others follow, so that "
            "its answer cannot be told; mark answers in the template with `{% generation %}` and "
            "`{% endgeneration %}`"
        )
    return Rendered(answer["text"], tuple((start, end) for start, end in answer["answers"]))


@lru_cache(maxsize=8)
def _process(source: str, limits: TemplateLimits) -> TemplateProcess:
    return TemplateProcess(source, limits)
