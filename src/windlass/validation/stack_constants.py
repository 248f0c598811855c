"""Constants: what each is for a stack, whence, and how sure predictions from it are."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import hypot
from typing import Any, Literal

from windlass.validation.software_stacks import FOLDER, stack_catalog

Provenance = Literal["prior", "fitted", "borrowed"]
UNFITTED_SPREAD = 0.30
"""Standard deviation of log(measured / predicted) where no row was fitted: two clusters of equal
devices differ by so much (A100 runs of BLOOM's early and late rows: 88 to 157 TFLOP/s)."""

P90_Z = 1.2816
"""Standard deviations beyond which a tenth of a normal distribution lies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantPrior:
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
class StackCalibration:
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
def priors(law: str) -> Mapping[str, ConstantPrior]:
    """The constants of one law."""
    found = tomllib.loads((FOLDER / "priors.toml").read_text(encoding="utf-8"))
    return {name: ConstantPrior(**table) for name, table in found[law].items()}


@cache
def calibration(stack: str) -> StackCalibration:
    """The constants of a stack: fitted, else borrowed from the one it is like, else priors."""
    known = stack_catalog().stack(stack)
    path = FOLDER / "fitted" / known.law / f"{stack}.toml"
    if path.exists():
        found = _fitted(stack, tomllib.loads(path.read_text(encoding="utf-8")))
        return _wider(found) if known.other_clusters else found
    if known.like:
        other = calibration(known.like)
        values = {**other.values, **known.fixed_constants}
        said = f"{known.like}: {other.fitted_from}"
        return _wider(replace(other, stack=stack, values=values, fitted_from=said))
    return prior_calibration(stack, prior_constants(stack))


def prior_calibration(stack: str, values: Mapping[str, float]) -> StackCalibration:
    """Constants that no row of the stack has a part in."""
    return StackCalibration(
        stack=stack, values=values, provenance="prior", fitted_from="no row",
        rows=frozenset(), step_spread=P90_Z * UNFITTED_SPREAD,
        memory_spread=P90_Z * UNFITTED_SPREAD,
    )  # fmt: skip


def _wider(found: StackCalibration) -> StackCalibration:
    """The same for runs of another cluster, which are surer by no more than clusters differ."""
    doubt = P90_Z * UNFITTED_SPREAD
    return replace(
        found,
        provenance="borrowed",
        rows=frozenset(),
        step_spread=hypot(found.step_spread, doubt),
        memory_spread=hypot(found.memory_spread, doubt),
    )


def prior_constants(stack: str) -> dict[str, float]:
    """`law.name` -> value of each constant before any run, what the stack fixes included."""
    known = stack_catalog().stack(stack)
    values = {
        f"{law}.{name}": prior.value
        for law in (known.law, "memory")
        for name, prior in priors(law).items()
    }
    return values | dict(known.fixed_constants)


def _fitted(stack: str, found: Mapping[str, Any]) -> StackCalibration:
    return StackCalibration(
        stack=stack,
        values=prior_constants(stack) | found["constants"],
        provenance="fitted",
        fitted_from=found["fitted_from"],
        rows=frozenset(found["rows"]),
        step_spread=found["interval"]["step"],
        memory_spread=found["interval"]["memory"],
    )
