"""The grammar of filters: `model = "gpt-tiny" and (loss < 5 or tag in ("good", "kept"))`.

    filter     = and-filter, { "or", and-filter }
    and-filter = condition, { "and", condition }
    condition  = "not", condition | "(", filter, ")"
               | name, ( "=" | "!=" | "<" | "<=" | ">" | ">=" ), value
               | name, [ "not" ], "in", "(", value, { ",", value }, ")"
               | name, [ "not" ], "like", string
               | name, "is", [ "not" ], "null"

Names are dotted words, `max(loss)` and the like, or anything in backticks; values are strings in
either quotes, `true`, `false`, and numbers with a unit or none, such as `4GiB` and `300ms`.
"""

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

from windlass.errors import RequestError, is_text, shorten

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "in", "like", "is null"]
_COMPARISONS: dict[str, Operator] = {
    "=": "=", "==": "=", "!=": "!=", "<>": "!=", "<": "<", "<=": "<=", ">": ">", ">=": ">=",
}  # fmt: skip
_MAX_CHARACTERS, _MAX_DEPTH, _MAX_COMPARISONS = 20_000, 40, 400
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"]|"")*"|'(?:[^']|'')*')
    |(?P<name>`[^`]+`)
    |(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)(?P<unit>[A-Za-zµ/]*)
    |(?P<word>(?:last|min|median|max|count|nonfinite)\([^()\s]+\)|[^\W0-9][\w./@-]*)
    |(?P<sign><=|>=|!=|<>|==|[=<>(),])
    )""",
    re.VERBOSE,
)


class Quantity(NamedTuple):
    """A number as it was written, with its unit; the unit is empty if there is none."""

    number: float
    unit: str

    def __str__(self) -> str:
        return f"{self.number:g}{self.unit}"


FilterValue = str | bool | Quantity


class Comparison(NamedTuple):
    """One condition on one name."""

    name: str
    operator: Operator
    values: tuple[FilterValue, ...]
    """One, several for `in`, none for `is null`."""


class Negation(NamedTuple):
    """The opposite of a condition."""

    condition: "Condition"


class Combination(NamedTuple):
    """Conditions that hold all, or of which one holds."""

    word: Literal["and", "or"]
    conditions: "tuple[Condition, ...]"


Condition = Comparison | Negation | Combination


class _Token(NamedTuple):
    kind: str
    text: str
    unit: str
    offset: int


def parse_filter(text: str) -> Condition:
    """The condition that a filter states.

    Raises:
        RequestError: it is no filter; the message shows where, and what was expected.
    """
    if len(text) > _MAX_CHARACTERS:
        raise RequestError(f"the filter has {len(text)} characters, more than {_MAX_CHARACTERS}")
    if not is_text(text):
        raise RequestError(f"the filter `{shorten(text)}` is not UTF-8 text, or has a NUL")
    return _Parser(text).parse()


class _Parser:
    """Reads a filter from left to right; each method reads one rule of the grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = self._split()
        self._next = 0
        self._comparisons = 0

    def parse(self) -> Condition:
        condition = self._any(0)
        if self._kind != "end":
            raise self._expected("`and`, `or` or the end")
        return condition

    def _any(self, depth: int) -> Condition:
        if depth > _MAX_DEPTH:
            raise RequestError(f"the filter has more than {_MAX_DEPTH} parentheses in each other")
        conditions = [self._all(depth)]
        while self._take_word("or"):
            conditions.append(self._all(depth))
        return conditions[0] if len(conditions) == 1 else Combination("or", tuple(conditions))

    def _all(self, depth: int) -> Condition:
        conditions = [self._condition(depth)]
        while self._take_word("and"):
            conditions.append(self._condition(depth))
        return conditions[0] if len(conditions) == 1 else Combination("and", tuple(conditions))

    def _condition(self, depth: int) -> Condition:
        if self._take_word("not"):
            if depth > _MAX_DEPTH:
                raise RequestError(f"the filter has more than {_MAX_DEPTH} `not` in each other")
            return Negation(self._condition(depth + 1))
        if self._take_sign("("):
            condition = self._any(depth + 1)
            self._require_sign(")")
            return condition
        return self._comparison()

    def _comparison(self) -> Condition:
        self._comparisons += 1
        if self._comparisons > _MAX_COMPARISONS:
            raise RequestError(f"the filter has more than {_MAX_COMPARISONS} conditions")
        name = self._name()
        if self._take_word("is"):
            negated = self._take_word("not")
            if not self._take_word("null"):
                raise self._expected("`null`")
            return self._negated(Comparison(name, "is null", ()), negated)
        negated = self._take_word("not")
        if self._take_word("in"):
            return self._negated(Comparison(name, "in", self._values()), negated)
        if self._take_word("like"):
            if self._kind != "string":
                raise self._expected('a pattern in quotes, such as "gpt%"')
            return self._negated(Comparison(name, "like", (self._value(),)), negated)
        if negated:
            raise self._expected("`in` or `like`")
        token = self._tokens[self._next]
        if token.kind != "sign" or token.text not in _COMPARISONS:
            raise self._expected("one of = != < <= > >=, `in`, `like`, `is null`")
        self._next += 1
        return Comparison(name, _COMPARISONS[token.text], (self._value(),))

    def _negated(self, comparison: Comparison, negated: bool) -> Condition:
        return Negation(comparison) if negated else comparison

    def _name(self) -> str:
        token = self._tokens[self._next]
        reserved = token.text.lower() in ("and", "or", "not", "in", "like", "is", "null")
        if token.kind == "name" or (token.kind == "word" and not reserved):
            self._next += 1
            return token.text
        raise self._expected("a name, such as `loss`")

    def _values(self) -> tuple[FilterValue, ...]:
        self._require_sign("(")
        values = [self._value()]
        while self._take_sign(","):
            values.append(self._value())
        self._require_sign(")")
        return tuple(values)

    def _value(self) -> FilterValue:
        token = self._tokens[self._next]
        value: FilterValue | None = None
        if token.kind == "number":
            value = Quantity(float(token.text), token.unit)
        elif token.kind == "string":
            value = token.text
        elif token.kind == "word" and token.text.lower() in ("true", "false"):
            value = token.text.lower() == "true"
        elif token.kind == "word":
            raise self._expected(
                f'a number, `true` or a text in quotes, such as "{shorten(token.text)}",'
            )
        if value is None:
            raise self._expected("a number, a text in quotes, `true` or `false`")
        self._next += 1
        return value

    @property
    def _kind(self) -> str:
        return self._tokens[self._next].kind

    def _take_word(self, word: str) -> bool:
        token = self._tokens[self._next]
        matches = token.kind == "word" and token.text.lower() == word
        self._next += matches
        return matches

    def _take_sign(self, sign: str) -> bool:
        token = self._tokens[self._next]
        matches = token.kind == "sign" and token.text == sign
        self._next += matches
        return matches

    def _require_sign(self, sign: str) -> None:
        if not self._take_sign(sign):
            raise self._expected(f"`{sign}`")

    def _expected(self, what: str) -> RequestError:
        token = self._tokens[self._next]
        found = "ends" if token.kind == "end" else f"has `{shorten(token.text)}`"
        return RequestError(
            f"the filter {found} at character {token.offset + 1} where {what} should stand: "
            f"`{shorten(self._text)}`"
        )

    def _split(self) -> Sequence[_Token]:
        tokens: list[_Token] = []
        offset, text = 0, self._text.rstrip()
        while offset < len(text):
            match = _TOKEN.match(text, offset)
            if match is None or match.lastgroup is None:
                offset += len(text[offset:]) - len(text[offset:].lstrip())
                raise RequestError(
                    f"the filter has `{shorten(text[offset])}` at character {offset + 1}, which "
                    f"begins no name, number, text in quotes or comparison: `{shorten(text)}`"
                )
            kind = "number" if match["number"] is not None else match.lastgroup
            start = match.start(kind)
            tokens.append(_Token(kind, _unquoted(match[kind]), match["unit"] or "", start))
            offset = match.end()
        return [*tokens, _Token("end", "", "", len(self._text))]


def _unquoted(text: str) -> str:
    """The text without its quotes; a doubled quote inside stands for one."""
    if text[0] not in "\"'`":
        return text
    return text[1:-1].replace(text[0] * 2, text[0])
