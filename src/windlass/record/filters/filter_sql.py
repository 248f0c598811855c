"""Filters and orders as SQL with parameters: no word of a user is ever part of the SQL itself.

A name is a column of the table of runs, a setting (`train.learning_rate`), a series (its last
value, or `max(gradient_norm)`), `tag`, `note` or `fault`. Each becomes an expression that is NULL
where a run lacks it, so that such a run matches only `is null`.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Literal, NamedTuple, Protocol

from windlass.errors import InputErrors, RequestError, did_you_mean, is_text, shorten
from windlass.record.filters.run_filter import (
    Combination,
    Comparison,
    Condition,
    FilterValue,
    Negation,
    Quantity,
)
from windlass.record.run_row import COLUMNS, Unit
from windlass.units import parse_bytes, parse_seconds

_LISTS = {"tag": "tag", "note": "note", "fault": "fault"}
"""Names of which a run has any number, and the tables that hold them."""
_LIST_NAMES = "`tag`, `note` or `fault`"
_STATISTICS = {
    "last": "last", "min": "minimum", "median": "median", "max": "maximum", "count": "count",
    "nonfinite": "nonfinite",
}  # fmt: skip
"""What can be asked of a series, and its column."""
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_SETTING_NUMBER = "(SELECT number FROM setting WHERE setting.run = run.run AND setting.key = ?)"
_SETTING_TEXT = _SETTING_NUMBER.replace("number", "text")
_SERIES = "(SELECT last FROM series WHERE series.run = run.run AND series.name = ?)"
_ORDER = re.compile(r"(.+?)\s+(asc|desc|ASC|DESC)")
_STATISTIC = re.compile(r"(last|min|median|max|count|nonfinite)\((.+)\)")


class Sql(NamedTuple):
    """A piece of SQL with `?` for each of its parameters."""

    text: str
    parameters: tuple[object, ...] = ()


class KnownNames(Protocol):
    """The settings and series that runs of a catalogue have."""

    def knows(self, table: Literal["setting", "series"], name: str) -> bool:
        """Whether a run has a setting or a series of this name."""

    def names(self) -> Iterable[str]:
        """The names of all settings and series."""


class Operand(NamedTuple):
    """What a name stands for. A setting is a number in one run and a text in another."""

    number: Sql | None
    """An expression that is a number or NULL; None if the name has only texts."""
    text: Sql | None
    """An expression that is a text or NULL; None if the name has only numbers."""
    unit: Unit | Literal["setting"]


def filter_sql(condition: Condition, known: KnownNames) -> Sql:
    """The condition as SQL over the table `run`.

    Raises:
        InputErrors: every name that no run has, and every value of the wrong kind.
    """
    faults: list[str] = []
    sql = _condition(condition, known, faults)
    if faults:
        raise InputErrors(tuple(dict.fromkeys(faults)))
    return sql


def order_sql(sort: str, known: KnownNames) -> Sql:
    """The order of rows as SQL, for a name, with ` desc` behind or `-` before it if descending.

    Raises:
        RequestError: no run has that name.
    """
    match = _ORDER.fullmatch(sort.strip())
    name, way = (match[1], match[2].upper()) if match else (sort.strip(), "ASC")
    if name.startswith("-"):
        name, way = name[1:], "DESC"
    operand = find_operand(name, known)
    sides = [side for side in (operand.number, operand.text) if side is not None]
    text = "".join(f"({side.text}) IS NULL, ({side.text}) {way}, " for side in sides)
    parameters = tuple(value for side in sides for value in side.parameters * 2)
    return Sql(f"{text}id DESC, folder", parameters)


def find_operand(name: str, known: KnownNames) -> Operand:
    """What a name stands for: a column before a setting before a series.

    Raises:
        RequestError: no run has that name.
    """
    units = {column.name: column.unit for column in COLUMNS}
    if name in units:
        unit, expression = units[name], Sql(f'run."{name}"')
        return (
            Operand(None, expression, unit)
            if unit in ("text", "json")
            else Operand(expression, None, unit)
        )
    if name == "ratio":
        return Operand(Sql("run.seconds / NULLIF(run.predicted_seconds, 0)"), None, "number")
    if not is_text(name):
        raise RequestError(f"`{shorten(name)}` is not UTF-8 text, or has a NUL")
    if known.knows("setting", name):
        return Operand(Sql(_SETTING_NUMBER, (name,)), Sql(_SETTING_TEXT, (name,)), "setting")
    statistic = _STATISTIC.fullmatch(name)
    series = statistic[2] if statistic else name
    if known.knows("series", series):
        column = _STATISTICS[statistic[1] if statistic else "last"]
        return Operand(
            Sql(_SERIES.replace("last", column), (series,)),
            None,
            "seconds" if series.startswith("seconds") else "number",
        )
    raise RequestError(_unknown(name, known))


def _condition(condition: Condition, known: KnownNames, faults: list[str]) -> Sql:
    if isinstance(condition, Negation):
        text, parameters = _condition(condition.condition, known, faults)
        return Sql(f"NOT ({text})", parameters)
    if isinstance(condition, Combination):
        parts = [_condition(part, known, faults) for part in condition.conditions]
        word = {"and": " AND ", "or": " OR "}[condition.word]
        text = word.join(f"({part.text})" for part in parts)
        return Sql(text, tuple(value for part in parts for value in part.parameters))
    try:
        if condition.name in _LISTS:
            return _list_comparison(condition)
        return _comparison(condition, find_operand(condition.name, known))
    except RequestError as error:
        faults.append(str(error))
        return Sql("1 = 0")


def _comparison(comparison: Comparison, operand: Operand) -> Sql:
    name, operator, values = comparison
    if operator == "is null":
        text, parameters = operand.text or operand.number or Sql("NULL")
        return Sql(f"{text} IS NULL", parameters)
    if operand.unit == "json":
        raise RequestError(f"`{name}` is a list; compare {_LIST_NAMES}, or a single name of it")
    if operator == "like":
        if operand.text is None:
            raise RequestError(f"`{name}` is a number, which `like` cannot compare; use = < >")
        return Sql(f"{operand.text.text} LIKE ?", (*operand.text.parameters, _pattern(values[0])))
    # Values of a setting may be texts and numbers: each is compared with its own kind.
    pairs = [_value(name, value, operand) for value in values]
    if operator == "in":
        parts = [Sql(f"{side.text} = ?", (*side.parameters, value)) for side, value in pairs]
        text = " OR ".join(part.text for part in parts)
        return Sql(text, tuple(value for part in parts for value in part.parameters))
    ((side, value),) = pairs
    return Sql(f"{side.text} {operator} ?", (*side.parameters, value))


def _value(name: str, value: FilterValue, operand: Operand) -> tuple[Sql, object]:
    """The expression that a value is compared with, and the value in its unit."""
    unit = operand.unit
    if isinstance(value, str):
        if operand.text is not None:
            return operand.text, value
        if operand.number is not None and unit == "time":
            return operand.number, _seconds_since_1970(name, value)
        raise RequestError(f"`{name}` is compared with a number, not with '{shorten(value)}'")
    if isinstance(value, bool):
        if operand.number is None or unit not in ("flag", "setting"):
            raise RequestError(f"`{name}` is neither true nor false; compare it with a {unit}")
        return operand.number, int(value)
    if operand.number is None:
        raise RequestError(f'`{name}` is a text; write "{value}" in quotes')
    return operand.number, _in_unit(name, value, unit)


def _in_unit(name: str, value: Quantity, unit: str) -> float:
    """The number in the unit of its column."""
    if value.unit in _COUNTS and not (value.unit == "B" and unit == "bytes"):
        return value.number * _COUNTS[value.unit]
    parsers: dict[str, tuple[Callable[[object], float], ...]] = {
        "seconds": (parse_seconds,), "bytes": (parse_bytes,),
    }  # fmt: skip
    for parse in parsers.get(unit, (parse_seconds, parse_bytes) if unit == "setting" else ()):
        with contextlib.suppress(RequestError):
            return math.copysign(parse(f"{abs(value.number)!r}{value.unit}"), value.number)
    examples = {"seconds": "`300ms` or `2min`", "bytes": "`4GiB`", "setting": "`4GiB` or `300ms`"}
    raise RequestError(
        f"`{name}` is compared with `{value}`, whose unit it does not have; write "
        f"{examples.get(unit, 'a plain number')}"
    )


def _seconds_since_1970(name: str, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise RequestError(
            f"`{name}` is a time, and '{shorten(text)}' is none; write it as '2026-11-22' or "
            "'2026-11-22 18:30'"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _list_comparison(comparison: Comparison) -> Sql:
    """A condition on the tags, notes or faults of a run: at least one of them fulfils it."""
    name, operator, values = comparison
    table = _LISTS[name]
    among = f"EXISTS (SELECT 1 FROM {table} WHERE {table}.run = run.run"  # noqa: S608  ours
    if operator == "is null":
        return Sql(f"NOT {among})")
    if operator not in ("=", "!=", "in", "like") or not all(isinstance(v, str) for v in values):
        raise RequestError(f"`{name}` is compared with texts, by =, !=, `in` or `like`")
    if operator == "like":
        return Sql(f"{among} AND {table}.text LIKE ?)", (_pattern(values[0]),))
    same = " OR ".join([f"{table}.text = ?"] * len(values))
    text = f"{among} AND ({same}))"
    return Sql(f"NOT {text}" if operator == "!=" else text, values)


def _pattern(value: FilterValue) -> str:
    """The pattern of `like`, which cannot end with a backslash that takes a meaning away."""
    pattern = str(value)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise RequestError(f"the pattern `{shorten(pattern)}` ends with a backslash; double it")
    return pattern


def _unknown(name: str, known: KnownNames) -> str:
    names = (*(column.name for column in COLUMNS), "ratio", *_LISTS, *known.names())
    nearest = did_you_mean(name, names)
    return f"no run has `{shorten(name)}`: no column, setting or series has this name{nearest}"
