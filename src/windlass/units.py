"""Parses and formats quantities such as `16 GiB`, `900 GB/s` and `2.5 ms`.

Capacities use powers of 2 (KiB, MiB, GiB, TiB), rates and FLOP powers of 10. `GB` is parsed as 10^9
bytes, as vendors mean it. Every parser also takes a plain number, in the base unit.
"""

import math
import re
from typing import Annotated

from pydantic import BeforeValidator

from windlass.errors import RequestError, shorten

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_DECIMAL = {"kB": 1e3, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "PB": 1e15}
_BYTES: dict[str, float] = {"B": 1, "": 1, **_BINARY, **_DECIMAL}
_RATES: dict[str, float] = {f"{unit}/s": size for unit, size in _BYTES.items() if unit} | {"": 1}
_SECONDS: dict[str, float] = {
    "ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "": 1,
    "min": 60, "h": 3600, "d": 86400,
}  # fmt: skip
_SHORTEST = 5e-12
"""Seconds below which a time is written as 0: half a hundredth of a nanosecond."""
_UP = 0.9995
"""Values that three digits round to 1000 of a unit are written as 1 of the next unit."""
_SI = ("", "k", "M", "G", "T", "P", "E")
_FLOP_RATES: dict[str, float] = {f"{p}FLOP/s": 1000.0**i for i, p in enumerate(_SI)} | {"": 1}
_NUMBER = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\s0-9].*)?$")


def parse_bytes(value: object) -> int:
    """Bytes of `16 GiB`, `1.5GB` or a plain number."""
    return round(_parse(value, _BYTES, "a size such as `16 GiB`"))


def parse_rate(value: object) -> float:
    """Bytes per second of `900 GB/s` or a plain number."""
    return _parse(value, _RATES, "a rate such as `900 GB/s`")


def parse_seconds(value: object) -> float:
    """Seconds of `2.5 ms`, `3 h` or a plain number."""
    return _parse(value, _SECONDS, "a time such as `2.5 ms`")


def parse_flop_rate(value: object) -> float:
    """FLOP per second of `312 TFLOP/s` or a plain number."""
    return _parse(value, _FLOP_RATES, "a rate such as `312 TFLOP/s`")


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
BytesPerSecond = Annotated[float, BeforeValidator(parse_rate)]
Seconds = Annotated[float, BeforeValidator(parse_seconds)]
FlopPerSecond = Annotated[float, BeforeValidator(parse_flop_rate)]


def format_bytes(count: float) -> str:
    """`16.0 GiB`: three significant digits, powers of 2."""
    if abs(round(count)) < 2**10:
        return f"{round(count)} B"
    unit, size = "KiB", 2**10
    for name, scale in _BINARY.items():
        # A value that rounds to 1024 of a unit is written as 1 of the next unit.
        if abs(count) >= scale - scale / 2**11:
            unit, size = name, scale
    return f"{_digits(count / size)} {unit}"


def format_traffic(count: float) -> str:
    """`797 MB`: bytes that are moved; three significant digits, powers of 10."""
    return _si(count, "B")


def format_rate(rate: float) -> str:
    """`900 GB/s`: three significant digits, powers of 10."""
    return _si(rate, "B/s")


def format_flop(flop: float) -> str:
    """`1.76 TFLOP`: three significant digits, powers of 10."""
    return _si(flop, "FLOP")


def format_flop_rate(rate: float) -> str:
    """`312 TFLOP/s`: three significant digits, powers of 10."""
    return _si(rate, "FLOP/s")


def format_count(count: float) -> str:
    """`124 M`, `175 B`, `7`: a count of parameters or tokens, three significant digits."""
    for scale, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(count) >= _UP * scale:
            return f"{_digits(count / scale)} {name}"
    return f"{count:.0f}" if count == round(count) else _digits(count)


def format_seconds(seconds: float) -> str:
    """`2.53 s`, `41.0 ms`, `3 h 12 min`: in the units that a person would choose."""
    size = abs(seconds)
    if size >= 86400:
        days, hours = divmod(round(seconds / 3600), 24)
        return f"{days} d {hours} h"
    if size >= 3600:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if size >= 60:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    for scale, name in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if size >= _UP * scale:
            return f"{_digits(seconds / scale)} {name}"
    return "0 s" if size < _SHORTEST else f"{_digits(seconds / 1e-9)} ns"


def _parse(value: object, units: dict[str, float], example: str) -> float:
    shown = shorten(repr(value))
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise RequestError(f"{shown} is not {example}")
    match = _NUMBER.match(str(value))
    size = units.get((match.group(2) or "").strip()) if match else None
    if match is None or size is None:
        raise RequestError(f"{shown} is not {example}")
    number = float(match.group(1)) * size
    if math.isinf(number):
        raise RequestError(f"{shown} is larger than any number; write {example}")
    return number


def _si(value: float, unit: str) -> str:
    power = 0
    while power < len(_SI) - 1 and abs(value) >= _UP * 1000.0 ** (power + 1):
        power += 1
    return f"{_digits(value / 1000.0**power)} {_SI[power]}{unit}"


def _digits(value: float) -> str:
    """Three significant digits without an exponent, at most five behind the point."""
    if not math.isfinite(value):
        return str(value)
    exponent = int(f"{value:.2e}".partition("e")[2])
    return f"{value:.{min(max(2 - exponent, 0), 5)}f}"
