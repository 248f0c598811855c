"""Factors: the differences between two runs that a short run can have from either side."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from windlass.judge import flat_keys, with_keys_of
from windlass.schema import PLAN_FILE, REQUEST_FILE
from windlass.tracking import RunRecord, kept_variables


@dataclass(frozen=True, slots=True)
class Factor:
    """One such difference."""

    name: str
    """A key of the request, `plan`, `code`, or `variable NAME`."""
    kind: Literal["key", "plan", "variable", "code"]


def find_factors(good: RunRecord, bad: RunRecord, *, with_code: bool) -> Iterator[Factor]:
    """All of two runs.

    Args:
        with_code: whether their code differs and can be switched.
    """
    first, second = (dict(flat_keys(_request(one))) for one in (good, bad))
    keys = [key for key in sorted({*first, *second}) if first.get(key) != second.get(key)]
    yield from (Factor(key, "key") for key in keys)
    if not keys and _text(good, PLAN_FILE) != _text(bad, PLAN_FILE):
        yield Factor("plan", "plan")
    yield from (Factor(f"variable {name}", "variable") for name in _other_variables(good, bad))
    if with_code:
        yield Factor("code", "code")


def describe_untested(good: RunRecord, bad: RunRecord) -> Iterator[str]:
    """Differences of their environments that no run here can have, a sentence each."""
    first, second = good.environment, bad.environment
    if first is None or second is None:
        return
    for name in sorted({*first.packages, *second.packages}):
        one, other = first.packages.get(name), second.packages.get(name)
        if one != other and name != "windlass":
            yield f"package {name}: {one or 'absent'} and {other or 'absent'} were not switched"
    if first.host != second.host:
        yield f"the runs were taken on {first.host} and {second.host}; all of these ran here"


def mixed_request(good: RunRecord, bad: RunRecord, changes: Sequence[Factor]) -> dict[str, Any]:
    """The request of the good run, with the keys that changes name as the bad one has them."""
    keys = [change.name for change in changes if change.kind == "key"]
    return with_keys_of(_request(good), _request(bad), keys)


def mixed_variables(
    good: RunRecord, bad: RunRecord, changes: Sequence[Factor]
) -> dict[str, str | None]:
    """The environment variables in which both differ, from either side; None is not set."""
    changed = {change.name for change in changes if change.kind == "variable"}
    first, second = _variables(good), _variables(bad)
    return {
        name: (second if f"variable {name}" in changed else first).get(name)
        for name in _other_variables(good, bad)
    }


def _other_variables(good: RunRecord, bad: RunRecord) -> list[str]:
    first, second = _variables(good), _variables(bad)
    return [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]


def _variables(record: RunRecord) -> Mapping[str, str]:
    """The variables whose names a run records; a record from elsewhere may name any."""
    return kept_variables(record.environment.variables) if record.environment else {}


def _request(record: RunRecord) -> dict[str, Any]:
    return tomllib.loads(_text(record, REQUEST_FILE))


def _text(record: RunRecord, name: str) -> str:
    try:
        return (record.folder / name).read_text(encoding="utf-8")
    except OSError:
        return ""
