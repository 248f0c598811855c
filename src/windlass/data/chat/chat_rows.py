"""Rows of conversations as documents: rendered text, and the answers in it that are learned."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from windlass.data.chat.chat_template import ChatTemplate, Conversation, Message, Rendered
from windlass.data.chat.template_process import TemplateFault, TemplateLimitFault
from windlass.data.readers import Row, TargetSpan, TextDocument, UnreadableDocument
from windlass.errors import DataError, did_you_mean, shorten

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERING_ROLE, SYSTEM_ROLE = "assistant", "system"
_MOST_WEIGHT = 1000
_COLUMNS = ("messages", "tools", "prompt", "completion")


_BATCH_ROWS = 64
"""Rows that are rendered at once: a message to another process takes as long as a short one."""


class _RowFault(Exception):  # noqa: N818  a reason, which the caller places
    """Why a row is no conversation."""


@dataclass(frozen=True, slots=True)
class ChatRows:
    """Each row is a conversation in `messages`, or a `prompt` with its `completion`.

    Answers are the turns of the assistant, up to and with the mark of their end: what the template
    marks as generated or, without such marks, what a turn adds to the conversation rendered up to
    it. A `weight` says how much an answer counts: 0 leaves it out. A prompt and a completion are
    two texts, which follow each other and an end of text, or two lists of messages, of which the
    second is learned.
    """

    template: ChatTemplate
    reads_text: bool = False

    def columns(self, names: Sequence[str]) -> tuple[str, ...] | str:
        """The columns of a conversation, or that there are none."""
        if "messages" in names or {"prompt", "completion"} <= set(names):
            return tuple(name for name in _COLUMNS if name in names)
        fields = ", ".join(f"`{name}`" for name in names) or "none"
        return (
            f"no `messages`, and no `prompt` with `completion`; fields are {fields}; rename yours, "
            "or read text with `data.format=text`"
        )

    def documents(
        self, items: Iterable[Row | TextDocument | UnreadableDocument]
    ) -> Iterator[TextDocument | UnreadableDocument]:
        """The rendered conversation of each row, or why it cannot be learned.

        Raises:
            DataError: the template takes too much time or memory.
        """
        waiting = iter(items)
        while batch := list(islice(waiting, _BATCH_ROWS)):
            parsed = [self._parsed(item) if isinstance(item, Row) else item for item in batch]
            rendered = iter(self._rendered([p for p in parsed if isinstance(p, _Parsed)]))
            for each in parsed:
                yield self._document(each, next(rendered)) if isinstance(each, _Parsed) else each

    def document(
        self, name: str, where: str, row: Mapping[str, object]
    ) -> TextDocument | UnreadableDocument:
        """The rendered conversation of one row, as in `documents`."""
        return next(self.documents([Row(name, where, row)]))

    def _parsed(self, row: Row) -> "_Parsed | TextDocument | UnreadableDocument":
        """A row before it is rendered; a prompt and its completion are a text already."""
        try:
            prompt, completion = row.values.get("prompt"), row.values.get("completion")
            is_text = isinstance(prompt, str) and isinstance(completion, str)
            if is_text and row.values.get("messages") is None:
                return self._completed(row, str(prompt), str(completion))
            return _Parsed(row, *_conversation(row.values))
        except _RowFault as fault:
            return UnreadableDocument(message=f"{row.where}: {fault}")

    def _completed(
        self, row: Row, prompt: str, completion: str
    ) -> TextDocument | UnreadableDocument:
        """The document of a prompt and its completion."""
        if not completion:
            raise _RowFault("`completion` is empty, so there is no answer to learn")
        text = f"{prompt}{completion}{self.template.special_tokens['eos_token']}"
        return _text_document(row, text, [TargetSpan(len(prompt), len(text))])

    def _rendered(self, rows: Sequence["_Parsed"]) -> list[Rendered | TemplateFault]:
        """Renders all rows at once or, if one takes too much, each by itself to find that."""
        try:
            return self.template.render_all([each.conversation for each in rows])
        except TemplateLimitFault as fault:
            if len(rows) > 1:
                return [rendered for row in rows for rendered in self._rendered([row])]
            raise DataError(
                f"{rows[0].row.where}: the chat template {self.template.name}: {fault}; correct "
                "it, or name another one as `data.chat_template`"
            ) from None

    def _document(
        self, parsed: "_Parsed", rendered: Rendered | TemplateFault
    ) -> TextDocument | UnreadableDocument:
        row, (messages, _, turns), learned = parsed
        by = f"{row.where}: the chat template {self.template.name}"
        if isinstance(rendered, TemplateFault):
            return UnreadableDocument(message=f"{by}: {rendered}")
        if len(rendered.answers) != len(turns):
            return UnreadableDocument(
                message=f"{by} marks {len(rendered.answers)} answers of a conversation with "
                f"{len(turns)}"
            )
        spans = zip(turns, rendered.answers, strict=True)
        targets = [TargetSpan(*span, learned[turn]) for turn, span in spans if turn in learned]
        if all(span.start == span.end for span in targets):
            return UnreadableDocument(message=f"{by} renders nothing of its answer")
        return _text_document(row, rendered.text, targets, _system_prompt(messages))


class _Parsed(NamedTuple):
    """A row whose conversation is still to be rendered."""

    row: Row
    conversation: Conversation
    learned: Mapping[int, float]
    """Weight of each message that is learned."""


def _text_document(
    row: Row, text: str, targets: list[TargetSpan], system: str | None = None
) -> TextDocument | UnreadableDocument:
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError:
        return UnreadableDocument(message=f"{row.where}: holds half a surrogate pair")
    return TextDocument(
        name=row.name, text=text, nbytes=nbytes, targets=tuple(targets), system=system
    )


def _system_prompt(messages: Sequence[Message]) -> str:
    """What stands before a user's first message; empty if nothing does."""
    first = messages[0]
    content = first.get("content")
    return content if first["role"] == SYSTEM_ROLE and isinstance(content, str) else ""


def _conversation(row: Mapping[str, object]) -> tuple[Conversation, Mapping[int, float]]:
    """The conversation of a row, and the weight of each message that is learned."""
    prompt, completion, context = row.get("prompt"), row.get("completion"), 0
    if row.get("messages") is not None:
        messages = _messages(row["messages"], "messages")
    elif isinstance(prompt, list) and isinstance(completion, list):
        messages = _messages(prompt, "prompt") + _messages(completion, "completion")
        context = len(prompt)
    else:
        raise _RowFault(
            f"`prompt` is {_kind(prompt)} and `completion` {_kind(completion)}; both should be "
            "texts, or both lists of messages"
        )
    tools = row.get("tools")
    if isinstance(tools, str):  # tables hold them as JSON, since each has fields of its own
        tools = _json_list(tools)
    if tools is not None and not isinstance(tools, list):
        raise _RowFault(f"`tools` is {_kind(tools)}, not a list")
    turns = [i for i, m in enumerate(messages) if m["role"] == ANSWERING_ROLE]
    weights = {turn: _weight(messages[turn]) for turn in turns if turn >= context}
    learned = {turn: weight for turn, weight in weights.items() if weight}
    if not learned:
        raise _RowFault(
            f"no answer: none of its {len(messages) - context} messages has the role "
            f"`{ANSWERING_ROLE}` and a weight above 0"
        )
    return Conversation(messages, tools, turns), learned


def _weight(message: Message) -> float:
    """How much an answer counts; of one that is only read, axolotl writes `"train": false`."""
    return 0.0 if message.get("train") is False else float(message.get("weight", 1))


def _messages(value: object, field: str) -> list[Message]:
    """The messages of a field; all that is wrong with them is one fault."""
    if not isinstance(value, list) or not value:
        raise _RowFault(f"`{field}` is {_kind(value)}, not a list of messages")
    faults = [
        f"message {index}{fault}"
        for index, message in enumerate(value)
        for fault in _message_faults(message)
    ]
    if faults:
        raise _RowFault("; ".join(faults))
    # Tables give every message all fields, None where it has none.
    return [{key: item for key, item in each.items() if item is not None} for each in value]


def _message_faults(message: object) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f" is {_kind(message)}, not an object with `role` and `content`"
        return
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield " has no `role`"
    elif role not in ROLES:
        way_out = did_you_mean(str(role), ROLES) or f" (roles are {', '.join(ROLES)})"
        yield f" has the unknown role `{shorten(str(role))}`{way_out}"
    if content is None and not message.get("tool_calls"):
        yield " has no `content`"
    if content is not None and not isinstance(content, str):
        yield f" has {_kind(content)} as `content`, and only text is learned"
    weight = message.get("weight")
    if weight is not None and not (isinstance(weight, int | float) and 0 <= weight <= _MOST_WEIGHT):
        yield (
            f" has the weight {shorten(str(weight))}; an answer counts as much as a number from 0 "
            f"to {_MOST_WEIGHT:,} says, 1 if it has none"
        )


def _json_list(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _kind(value: object) -> str:
    """A value's kind in words."""
    kinds: dict[type[Any], str] = {list: "a list", dict: "an object", str: "a text"}
    if value is None:
        return "missing"
    if value == []:
        return "an empty list"
    return kinds.get(type(value), f"a {type(value).__name__}")
