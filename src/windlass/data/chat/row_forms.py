"""The forms that rows of conversations have on the hub, as messages of one form."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from windlass.errors import did_you_mean, shorten

ANSWERING_ROLE, SYSTEM_ROLE = "assistant", "system"
ROLES = (SYSTEM_ROLE, "developer", "user", ANSWERING_ROLE, "tool", "function")
_OTHER_ROLES: Mapping[str, str] = {
    "human": "user", "gpt": ANSWERING_ROLE, "bot": ANSWERING_ROLE, "chatgpt": ANSWERING_ROLE,
    "model": ANSWERING_ROLE, "observation": "tool",
}  # fmt: skip
"""Roles of ShareGPT, LLaMA-Factory and Gemma, by those that templates know."""
_MOST_WEIGHT = 1000

Message = dict[str, Any]
"""A turn (`Any`: any JSON)."""


class RowFault(Exception):  # noqa: N818  a reason, which the caller places
    """Why a row is no conversation."""


def find_columns(names: Sequence[str]) -> tuple[str, ...] | None:
    """The columns of a conversation; None if there are none."""
    form = next((form for form in _FORMS if set(form) <= set(names)), None)
    if form is None:
        return None
    return tuple(name for name in (*form, *_FURTHER[form], *_ALWAYS) if name in names)


def row_messages(row: Mapping[str, object]) -> tuple[list[Message], int]:
    """The messages of a row, and how many of them no answer is learned of.

    Raises:
        RowFault: it has no form of a conversation.
    """
    given = {name for name, value in row.items() if value is not None}
    form = next((form for form in _FORMS if set(form) <= given), None)
    if form is None:
        fields = ", ".join(f"`{name}` is {kind_of(row[name])}" for name in row)
        raise RowFault(f"no conversation: {fields or 'it has no fields'}")
    turns, context = _FORMS[form](row)
    system = row.get(SYSTEM_ROLE)
    if isinstance(system, str) and system and SYSTEM_ROLE in _FURTHER[form]:
        turns, context = [{"role": SYSTEM_ROLE, "content": system}, *turns], context + 1
    return turns, context


def _of_messages(field: str) -> Callable[[Mapping[str, object]], tuple[list[Message], int]]:
    return lambda row: (messages(row[field], field), 0)


def _of_completion(row: Mapping[str, object]) -> tuple[list[Message], int]:
    """A prompt and its completion, each a text or messages."""
    sides = []
    for field, role in (("prompt", "user"), ("completion", ANSWERING_ROLE)):
        value = row[field]
        if isinstance(value, str) and value:
            value = [{"role": role, "content": value}]
        sides.append(messages(value, field))
    return [*sides[0], *sides[1]], len(sides[0])


def _of_instruction(row: Mapping[str, object]) -> tuple[list[Message], int]:
    """Alpaca's: an instruction, perhaps with an input below it, and the output."""
    asked = [_text(row, field) for field in ("instruction", "input")]
    turns = [
        {"role": role, "content": side}
        for pair in _history(row.get("history"))
        for role, side in zip(("user", ANSWERING_ROLE), pair, strict=True)
    ]
    question = {"role": "user", "content": "\n\n".join(filter(None, asked))}
    return [*turns, question, {"role": ANSWERING_ROLE, "content": _text(row, "output")}], 0


def _history(value: object) -> list[list[str]]:
    pairs = value if isinstance(value, list) else []
    if any(
        not isinstance(pair, list) or len(pair) != len(("question", "answer")) for pair in pairs
    ):
        raise RowFault("`history` is no list of pairs, a question and its answer each")
    return pairs


def _of_question(row: Mapping[str, object]) -> tuple[list[Message], int]:
    question = {"role": "user", "content": _text(row, "question")}
    return [question, {"role": ANSWERING_ROLE, "content": _text(row, "answer")}], 0


_Form = tuple[str, ...]
_FORMS: Mapping[_Form, Callable[[Mapping[str, object]], tuple[list[Message], int]]] = {
    ("messages",): _of_messages("messages"),
    ("conversations",): _of_messages("conversations"),
    ("prompt", "completion"): _of_completion,
    ("instruction", "output"): _of_instruction,
    ("question", "answer"): _of_question,
}
"""What reads a row by the columns that it must have; the first form counts."""
_FURTHER: Mapping[_Form, tuple[str, ...]] = {
    ("messages",): ("prompt", "completion"),
    ("conversations",): (SYSTEM_ROLE,),
    ("prompt", "completion"): (),
    ("instruction", "output"): ("input", "history", SYSTEM_ROLE),
    ("question", "answer"): (SYSTEM_ROLE,),
}
"""Columns that a form may have; a row without messages may have another form."""
_ALWAYS = ("tools", "documents", "chat_template_kwargs")
FORMS = "`messages`, `conversations`, `prompt` with `completion`, `instruction` with `output`, or "
FORMS += "`question` with `answer`"


def _text(row: Mapping[str, object], field: str) -> str:
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise RowFault(f"`{field}` is {kind_of(value)}, not a text")
    return value or ""


def messages(value: object, field: str) -> list[Message]:
    """The messages of a field; all that is wrong with them is one fault.

    Raises:
        RowFault: something is.
    """
    value = from_json(value)
    if not isinstance(value, list) or not value:
        raise RowFault(f"`{field}` is {kind_of(value)}, not a list of messages")
    turns = [_renamed(message) for message in value]
    faults = [
        f"message {index}{fault}"
        for index, message in enumerate(turns)
        for fault in _message_faults(message)
    ]
    if faults:
        raise RowFault("; ".join(faults))
    # Tables give every message all fields, None where it has none.
    return [{key: item for key, item in turn.items() if item is not None} for turn in turns]


def _renamed(message: Any) -> Any:  # noqa: ANN401  whatever stands in a row
    """A message with the names of fields and roles that templates know."""
    message = from_json(message)
    if not isinstance(message, dict):
        return message
    turn = dict(message)
    if turn.get("role") is None and turn.get("from") is not None:
        turn["role"] = turn.pop("from")
        turn.setdefault("content", turn.pop("value", None))
    role = turn.get("role")
    if isinstance(role, str) and role not in ROLES:
        turn["role"] = _OTHER_ROLES.get(role, role)
    return turn


def from_json(value: Any) -> Any:  # noqa: ANN401  whatever stands in a row
    """A value that a table may hold as its JSON, since each row has fields of its own."""
    if isinstance(value, str) and value[:1] in "[{":
        with suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def message_weight(message: Mapping[str, Any]) -> float:
    """How much an answer counts; of one that is only read, axolotl writes `"train": false`."""
    return 0.0 if message.get("train") in (False, 0) else float(message.get("weight", 1))


def _message_faults(message: object) -> Iterator[str]:
    if not isinstance(message, dict):
        yield f" is {kind_of(message)}, not an object with `role` and `content`"
        return
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield " has no `role`"
    elif role not in ROLES:
        way_out = did_you_mean(str(role), ROLES) or f" (roles are {', '.join(ROLES)})"
        yield f" has the unknown role `{shorten(str(role))}`{way_out}"
    if content is None and not message.get("tool_calls"):
        yield " has no `content`"
    yield from _content_faults(content)
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and not (isinstance(weight, int | float) and 0 <= weight <= _MOST_WEIGHT):
        yield (
            f" has the weight {shorten(str(weight))}; an answer counts as much as a number from 0 "
            f"to {_MOST_WEIGHT:,} says, 1 if it has none"
        )
    if train not in (None, False, True):
        yield f" has `train` = {shorten(json.dumps(train, default=str))}; write true or false"


def _content_faults(content: object) -> Iterator[str]:
    """What is wrong with content, which is a text, or parts that are texts."""
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        yield f" has {kind_of(content)} as `content`, and only text is learned"
        return
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            yield f" has a part of the type {shorten(str(kind))}, and only text is learned"
        elif not isinstance(part.get("text"), str):
            yield " has a part without `text`"


def kind_of(value: object) -> str:
    """A value's kind in words."""
    kinds: dict[type[Any], str] = {list: "a list", dict: "an object", str: "a text"}
    if value is None:
        return "missing"
    if value == []:
        return "an empty list"
    return kinds.get(type(value), f"a {type(value).__name__}")
