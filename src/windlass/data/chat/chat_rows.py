"""Rows of conversations as documents: rendered text, and the answers in it that are learned."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

from windlass.data.chat.chat_template import ChatTemplate, Conversation, Message, Rendered
from windlass.data.chat.row_forms import (
    ANSWERING_ROLE,
    FORMS,
    SYSTEM_ROLE,
    RowFault,
    find_columns,
    from_json,
    kind_of,
    message_weight,
    row_messages,
)
from windlass.data.chat.template_process import TemplateFault, TemplateLimitFault
from windlass.data.readers import Row, TargetSpan, TextDocument, UnreadableDocument
from windlass.errors import DataError

_BATCH_ROWS = 64
"""Rows that are rendered at once: a message to another process takes as long as a short one."""


@dataclass(frozen=True, slots=True)
class ChatRows:
    """Each row is a conversation, in any of the forms that `row_forms` knows.

    Answers are the turns of the assistant, up to and with the mark of their end: what the template
    marks as generated or, without such marks, what a turn adds to the conversation rendered up to
    it. A `weight` says how much an answer counts: 0 leaves it out. A prompt and a completion that
    are texts follow each other, and an end of text.
    """

    template: ChatTemplate
    reads_text: bool = False

    def columns(self, names: Sequence[str]) -> tuple[str, ...] | str:
        """The columns of a conversation, or that there are none."""
        columns = find_columns(names)
        if columns is not None:
            return columns
        fields = ", ".join(f"`{name}`" for name in names) or "none"
        return (
            f"no conversation; fields are {fields}, and should be {FORMS}; rename yours, or read "
            "text with `data.format=text`"
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
        except RowFault as fault:
            return UnreadableDocument(message=f"{row.where}: {fault}")

    def _completed(
        self, row: Row, prompt: str, completion: str
    ) -> TextDocument | UnreadableDocument:
        """The document of a prompt and its completion."""
        if not completion:
            raise RowFault("`completion` is empty, so there is no answer to learn")
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
        row, conversation, learned = parsed
        messages, turns = conversation.messages, conversation.turns
        by = f"{row.where}: the chat template {self.template.name}"
        if isinstance(rendered, TemplateFault):
            return UnreadableDocument(message=f"{by}: {rendered}")
        if len(rendered.answers) == len(turns):
            spans = zip(turns, rendered.answers, strict=True)
            targets = [
                TargetSpan(*span, learned[turn])
                for turn, span in spans
                if turn in learned and turn not in rendered.dropped
            ]
        elif set(learned.values()) == {1.0} and learned.keys() == set(turns):
            targets = [TargetSpan(*span) for span in rendered.answers]
        else:
            return UnreadableDocument(
                message=f"{by} marks {len(rendered.answers)} answers of a conversation with "
                f"{len(turns)}, of which not all count alike"
            )
        if all(span.start == span.end for span in targets):
            return UnreadableDocument(message=f"{by} renders nothing of its answer")
        document = _text_document(row, rendered.text, targets, _system_prompt(messages))
        if isinstance(document, TextDocument) and rendered.dropped & learned.keys():
            document = replace(document, read_answers=len(rendered.dropped & learned.keys()))
        return document


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
    if isinstance(content, list):
        content = "".join(part["text"] for part in content)
    return content if first["role"] == SYSTEM_ROLE and isinstance(content, str) else ""


def _conversation(row: Mapping[str, object]) -> tuple[Conversation, Mapping[int, float]]:
    """The conversation of a row, and the weight of each message that is learned."""
    turns, context = row_messages(row)
    answers = [i for i, turn in enumerate(turns) if turn["role"] == ANSWERING_ROLE]
    weights = {turn: message_weight(turns[turn]) for turn in answers if turn >= context}
    learned = {turn: weight for turn, weight in weights.items() if weight}
    if not learned:
        raise RowFault(
            f"no answer: none of its {len(turns) - context} messages has the role "
            f"`{ANSWERING_ROLE}` and a weight above 0"
        )
    tools, documents = (_column(row, name, list, "a list") for name in ("tools", "documents"))
    variables = _column(row, "chat_template_kwargs", dict, "an object") or {}
    return Conversation(turns, tools, answers, documents, variables), learned


def _column(row: Mapping[str, object], name: str, kind: type, what: str) -> Any:  # noqa: ANN401  JSON
    """A column of any JSON, or of its text."""
    value = from_json(row.get(name))
    if value is not None and not isinstance(value, kind):
        raise RowFault(f"`{name}` is {kind_of(value)}, not {what}")
    return value
