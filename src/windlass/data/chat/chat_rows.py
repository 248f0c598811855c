"""Rows of conversations as documents: rendered text, and the answers in it that are learned."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.data.chat.chat_template import ChatTemplate, Message, TemplateFault
from windlass.data.readers import TargetSpan, TextDocument, UnreadableDocument
from windlass.errors import did_you_mean, shorten

ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERING_ROLE = "assistant"
_MOST_WEIGHT = 1000
_COLUMNS = ("messages", "tools", "prompt", "completion")


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

    def document(
        self, name: str, where: str, row: Mapping[str, object]
    ) -> TextDocument | UnreadableDocument:
        """The rendered conversation of a row, or why it cannot be learned."""
        try:
            text, targets = self._rendered(row)
            nbytes = len(text.encode())
        except (_RowFault, TemplateFault) as fault:
            by = f"the chat template {self.template.name}: "
            reason = f"{by}{fault}" if isinstance(fault, TemplateFault) else str(fault)
            return UnreadableDocument(message=f"{where}: {reason}")
        except UnicodeEncodeError:
            return UnreadableDocument(message=f"{where}: holds half a surrogate pair")
        return TextDocument(name=name, text=text, nbytes=nbytes, targets=tuple(targets))

    def _rendered(self, row: Mapping[str, object]) -> tuple[str, list[TargetSpan]]:
        if row.get("messages") is not None:
            return self._conversation(_messages(row["messages"], "messages"), row, context=0)
        prompt, completion = row.get("prompt"), row.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise _RowFault("`completion` is empty, so there is no answer to learn")
            text = f"{prompt}{completion}{self.template.special_tokens['eos_token']}"
            return text, [TargetSpan(len(prompt), len(text))]
        if isinstance(prompt, list) and isinstance(completion, list):
            turns = _messages(prompt, "prompt") + _messages(completion, "completion")
            return self._conversation(turns, row, context=len(prompt))
        raise _RowFault(
            f"`prompt` is {_kind(prompt)} and `completion` {_kind(completion)}; both should be "
            "texts, or both lists of messages"
        )

    def _conversation(
        self, messages: list[Message], row: Mapping[str, object], *, context: int
    ) -> tuple[str, list[TargetSpan]]:
        """Text and answers of messages, of which the first `context` ones are only read."""
        tools = row.get("tools")
        if isinstance(tools, str):  # tables hold them as JSON, since each has fields of its own
            tools = _json_list(tools)
        if tools is not None and not isinstance(tools, list):
            raise _RowFault(f"`tools` is {_kind(tools)}, not a list")
        turns = [i for i, m in enumerate(messages) if m["role"] == ANSWERING_ROLE]
        learned = [turn for turn in turns if turn >= context and messages[turn].get("weight", 1)]
        if not learned:
            raise _RowFault(
                f"no answer: none of its {len(messages) - context} messages has the role "
                f"`{ANSWERING_ROLE}` and a weight above 0"
            )
        text, marked = self.template.render(messages, tools)
        if not self.template.marks_answers:
            spans = self._answers_by_prefix(text, messages, turns, tools)
        elif len(marked) == len(turns):
            spans = list(marked)
        else:
            raise _RowFault(
                f"the chat template {self.template.name} marks {len(marked)} answers of a "
                f"conversation with {len(turns)}"
            )
        targets = [
            TargetSpan(*span, weight=float(messages[turn].get("weight", 1)))
            for turn, span in zip(turns, spans, strict=True)
            if turn in learned
        ]
        if all(span.start == span.end for span in targets):
            raise _RowFault(f"the chat template {self.template.name} renders nothing of its answer")
        return text, targets

    def _answers_by_prefix(
        self,
        text: str,
        messages: list[Message],
        turns: list[int],
        tools: list[object] | None,
    ) -> list[tuple[int, int]]:
        """Where each answer stands, from what a template renders before and after it."""
        spans: list[tuple[int, int]] = []
        for turn in turns:
            with_answer = self.template.render(messages[: turn + 1], tools).text
            question = self.template.render(messages[:turn], tools, generation_prompt=True).text
            if not with_answer.startswith(question):
                question = self.template.render(messages[:turn], tools).text
            if not (text.startswith(with_answer.rstrip()) and with_answer.startswith(question)):
                raise _RowFault(
                    f"the chat template {self.template.name} renders message {turn} in another way "
                    "once others follow, so that its answer cannot be told; mark answers in the "
                    "template with `{% generation %}` and `{% endgeneration %}`"
                )
            # White space behind the mark of an answer's end belongs to the next turn.
            spans.append((len(question), max(len(question), len(with_answer.rstrip()))))
        return spans


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
