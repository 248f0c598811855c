"""What differs between runs, in words: the cells of its table on a terminal and on a page."""

from collections.abc import Iterator, Sequence

from windlass.judge import NoiseFloor, ResultDifference, RunDiff
from windlass.units import format_bytes, format_seconds

_NOTHING, _LITTLE = 1.0, 3.0
"""Deviations below which a difference is nothing, and from which on it is one."""
_MOST_CHARACTERS = 120


def input_line(found: RunDiff) -> str:
    """One sentence on which inputs differ."""
    states = {
        state: [name for name, one in found.inputs.items() if one == state]
        for state in ("different", "same", "not recorded")
    }
    parts = []
    if states["different"]:
        parts.append(f"{_listed(states['different'])} {_verb(states['different'])}")
    else:
        parts.append("no input differs")
    if states["same"]:
        verb = "is" if len(states["same"]) == 1 else "are"
        parts.append(f"{_listed(states['same'])} {verb} the same")
    if states["not recorded"]:
        parts.append(f"not recorded: {', '.join(states['not recorded'])}")
    return "; ".join(parts)


def key_rows(found: RunDiff) -> Iterator[tuple[str, ...]]:
    """Input, key and a value for each run; long values are cut."""
    for one in found.keys:
        values = ["–" if value is None else _shortened(value) for value in one.values]
        yield one.input, one.key, *values
    for name, count in found.omitted.items():
        yield name, f"{count} more keys", *("…" for _ in found.runs)


def result_rows(found: RunDiff) -> Iterator[tuple[str, ...]]:
    """Name, a value for each run, and what the difference of the last one from the first means."""
    for result in found.results:
        values = [_value(value, result.unit) for value in result.values]
        yield result.name, *values, describe_sigmas(result, len(found.runs) - 1)


def describe_sigmas(result: ResultDifference, index: int) -> str:
    """How far a run is from the first one in units of the noise floor, with its n, in words."""
    first, other = result.values[0], result.values[index]
    if first is None or other is None:
        return "–"
    if first == other:
        return "equal"
    sigmas = result.sigmas(index)
    if sigmas is None or result.noise is None:
        change = f"{100 * (other / first - 1):+.2g} %" if first else f"{other - first:+.3g}"
        return f"{change}, no noise floor"
    word = "nothing"
    if abs(sigmas) >= _LITTLE:
        word = "a difference"
    elif abs(sigmas) >= _NOTHING:
        word = "perhaps something"
    return f"{sigmas:+.1f} sigma: {word} ({_floor(result.noise)})"


def _floor(noise: NoiseFloor) -> str:
    if not noise.peers:
        return f"no peers; runs usually vary by {100 * noise.deviation:.2g} %"
    peers = "1 peer varies" if noise.peers == 1 else f"{noise.peers} peers vary"
    return f"{peers} by {100 * noise.deviation:.2g} %"


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "seconds":
        return format_seconds(value)
    if unit == "bytes":
        return format_bytes(round(value))
    return f"{value:.4f}"


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def _listed(names: Sequence[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def _verb(names: Sequence[str]) -> str:
    return "differs" if len(names) == 1 else "differ"
