"""Renders conversations through a tokenizer's own Jinja template, in a sandbox."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from windlass.atomic_files import atomic_write
from windlass.data.chat.template_sandbox import TemplateSandbox, Turns
from windlass.schema import CHAT_TEMPLATE_FILE, SPECIAL_TOKENS_FILE

Message = Mapping[str, Any]
"""A turn: its `role`, its `content`, and what else a template may read (`Any`: any JSON)."""

_START, _END = "\ufdd0", "\ufdd1"
"""Around what a `generation` block renders: two of the code points that Unicode keeps free for use
within a program, and that no text may hold."""
_MARK = re.compile(f"[{_START}{_END}]")


class TemplateFault(Exception):  # noqa: N818  a reason, which the caller places
    """Why a template does not compile, or does not render a conversation."""


class Rendered(NamedTuple):
    """A rendered conversation."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """Start and end of what the template marks as generated, in characters and in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A Jinja template and the special tokens that it may name."""

    name: str
    """Where it comes from, for people."""
    source: str
    special_tokens: Mapping[str, str]
    """Text of `bos_token`, `eos_token` and so on, as far as the tokenizer has them."""

    @property
    def fingerprint(self) -> str:
        """Hash of all that a conversation's text depends on."""
        content = json.dumps([self.source, dict(self.special_tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def marks_answers(self) -> bool:
        """Whether it has `{% generation %}` blocks around what a model should learn to say."""
        return _compiled(self.source).marks_answers

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
        """
        template = _compiled(self.source).template
        try:
            text = template.render(
                messages=messages, tools=tools, documents=None,
                add_generation_prompt=generation_prompt, **self.special_tokens,
                **Turns().variables(),
            )  # fmt: skip
        except TemplateError as error:
            raise TemplateFault(str(error) or type(error).__name__) from None
        except Exception as error:  # noqa: BLE001  a template may fail in any way
            raise TemplateFault(f"{type(error).__name__}: {error}") from None
        return _without_marks(text)


class _Compiled(NamedTuple):
    template: Template
    marks_answers: bool


@lru_cache(maxsize=8)
def _compiled(source: str) -> _Compiled:
    """Compiles a template, which cannot change what it is given nor reach Python's internals.

    White space, `break` and `continue`, `tojson` and `raise_exception` are as in transformers.
    `strftime_now` is missing: the same data would be another text on another day.
    """
    environment = TemplateSandbox(
        {"tojson": _to_json},
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlocks, loopcontrols],
    )
    environment.globals["raise_exception"] = _raise_exception
    try:
        marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        return _Compiled(environment.from_string(source), marks)
    except TemplateSyntaxError as error:
        raise TemplateFault(f"line {error.lineno}: {error.message}") from None


def _without_marks(text: str) -> Rendered:
    """Takes the marks out of a text and returns where they were."""
    found = list(_MARK.finditer(text))
    # Each mark before it has taken one character out.
    starts = [match.start() - index for index, match in enumerate(found)]
    answers = tuple(
        (start, end)
        for (first, start), (_, end) in pairwise(zip(found, starts, strict=True))
        if first.group() == _START and start < end
    )
    return Rendered(_MARK.sub("", text), answers)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML's escapes, which Jinja's own filter puts in."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`, which transformers has around answers."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own form

    def parse(self, parser: Parser) -> nodes.Node:
        """The block as a call that puts marks around it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:  # noqa: ANN401  a macro of Jinja's
        return f"{_START}{caller()}{_END}"
