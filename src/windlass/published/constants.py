"""Constants: what each is for a stack, whence, and how sure predictions from it are."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import hypot
from typing import Any, Literal

from windlass.published.stacks import FOLDER, catalogue

Provenance = Literal["prior", "fitted", "borrowed"]
UNFITTED_SPREAD = 0.30
"""Standard deviation of log(measured / predicted) where no row was fitted: two clusters of equal
devices differ by so much (A100 runs of BLOOM's early and late rows: 88 to 157 TFLOP/s)."""

TENTH = 1.2816
"""Standard deviations beyond which a tenth of a normal distribution lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """A constant before any run is seen."""

    value: float
    spread: float
    """Standard deviation of its logarithm."""
    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The constants of one stack."""

    stack: str
    values: Mapping[str, float]
    provenance: Provenance
    fitted_from: str
    """Which rows, by what split and seed; where borrowed, whose they are."""
    rows: frozenset[str]
    """Keys of the rows that it was fitted from."""
    step_spread: float
    """Half width of the 80 % interval of log(measured / predicted) of step time."""
    memory_spread: float
    """The same of peak memory."""


@cache
def priors(law: str) -> Mapping[str, Prior]:
    """The constants of one law."""
    found = tomllib.loads((FOLDER / "priors.toml").read_text(encoding="utf-8"))
    return {name: Prior(**table) for name, table in found[law].items()}


@cache
def calibration(stack: str) -> Calibration:
    """The constants of a stack: fitted, else borrowed from the one it is like, else priors."""
    known = catalogue().stack(stack)
    path = FOLDER / "fitted" / f"{stack}.toml"
    if path.exists():
        return _fitted(stack, tomllib.loads(path.read_text(encoding="utf-8")))
    if known.like:
        other = calibration(known.like)
        return Calibration(
            stack=stack,
            values={**other.values, **known.taken},
            provenance="borrowed",
            fitted_from=f"{known.like}: {other.fitted_from}",
            rows=frozenset(),
            step_spread=hypot(other.step_spread, TENTH * UNFITTED_SPREAD),
            memory_spread=hypot(other.memory_spread, TENTH * UNFITTED_SPREAD),
        )
    return Calibration(
        stack=stack, values=before(stack), provenance="prior", fitted_from="no row",
        rows=frozenset(), step_spread=TENTH * UNFITTED_SPREAD,
        memory_spread=TENTH * UNFITTED_SPREAD,
    )  # fmt: skip


def before(stack: str) -> dict[str, float]:
    """`law.name` -> value of each constant before any run, what the stack fixes included."""
    known = catalogue().stack(stack)
    values = {
        f"{law}.{name}": prior.value
        for law in (known.law, "memory")
        for name, prior in priors(law).items()
    }
    return values | dict(known.taken)


def _fitted(stack: str, found: Mapping[str, Any]) -> Calibration:
    return Calibration(
        stack=stack,
        values=before(stack) | found["constants"],
        provenance="fitted",
        fitted_from=found["fitted_from"],
        rows=frozenset(found["rows"]),
        step_spread=found["interval"]["step"],
        memory_spread=found["interval"]["memory"],
    )
