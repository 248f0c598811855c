"""Constants: what each is for a stack, whence, and how sure predictions from it are."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import hypot
from typing import Any, Literal

from windlass.validation.software_stacks import FOLDER, catalogue

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
    """Standard deviation of its logarithm; 0 where no row may move it."""
    about: str

    @property
    def fixed(self) -> bool:
        """Whether software decides it, and no row."""
        return self.spread == 0.0


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
    path = FOLDER / "fitting" / "fitted" / f"{stack}.toml"
    if path.exists():
        found = _fitted(stack, tomllib.loads(path.read_text(encoding="utf-8")))
        return _wider(found) if known.strange else found
    if known.like:
        other = calibration(known.like)
        values = {**other.values, **known.taken}
        said = f"{known.like}: {other.fitted_from}"
        return _wider(replace(other, stack=stack, values=values, fitted_from=said))
    return unfitted(stack, before(stack))


def unfitted(stack: str, values: Mapping[str, float]) -> Calibration:
    """Constants that no row of the stack has a part in."""
    return Calibration(
        stack=stack, values=values, provenance="prior", fitted_from="no row",
        rows=frozenset(), step_spread=TENTH * UNFITTED_SPREAD,
        memory_spread=TENTH * UNFITTED_SPREAD,
    )  # fmt: skip


def _wider(found: Calibration) -> Calibration:
    """The same for runs of another cluster, which are surer by no more than clusters differ."""
    doubt = TENTH * UNFITTED_SPREAD
    return replace(
        found,
        provenance="borrowed",
        rows=frozenset(),
        step_spread=hypot(found.step_spread, doubt),
        memory_spread=hypot(found.memory_spread, doubt),
    )


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
