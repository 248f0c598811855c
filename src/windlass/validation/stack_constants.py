"""Constants of the laws for each software stack, with their origin and prediction intervals."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import hypot
from typing import Any, Literal

from windlass.validation.software_stacks import FOLDER, stack_catalog

Provenance = Literal["prior", "fitted", "borrowed"]
UNFITTED_SPREAD = 0.30
"""Standard deviation of log(measured / predicted) if no row was fitted. Two clusters of equal
devices differ by this much (A100 runs of BLOOM's early and late rows: 88 to 157 TFLOP/s)."""

P90_Z = 1.2816
"""The 90th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantPrior:
    """Prior distribution of a constant."""

    value: float
    spread: float
    """Standard deviation of its logarithm; 0 means that it is never fitted."""
    about: str
    """Meaning and source."""

    @property
    def fixed(self) -> bool:
        """Whether the software determines it, so that it is never fitted."""
        return self.spread == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackCalibration:
    """The constants of one stack and the intervals of predictions from them."""

    stack: str
    values: Mapping[str, float]
    """`law.name` -> value."""
    provenance: Provenance
    fitted_from: str
    """Rows and seed of the fit; preceded by the name of the stack from which they are borrowed."""
    rows: frozenset[str]
    """Keys of the rows that the constants were fitted to."""
    step_spread: float
    """Half width of the 80 % interval of log(measured / predicted) of step time."""
    memory_spread: float
    """Half width of the 80 % interval of log(measured / predicted) of peak memory."""


@cache
def priors(law: str) -> Mapping[str, ConstantPrior]:
    """Priors of the constants of one law, by name."""
    tables = tomllib.loads((FOLDER / "priors.toml").read_text(encoding="utf-8"))
    return {name: ConstantPrior(**table) for name, table in tables[law].items()}


@cache
def calibration(stack: str) -> StackCalibration:
    """The constants of a stack: fitted, else those of a similar stack, else prior means."""
    software = stack_catalog().stack(stack)
    path = FOLDER / "fitted" / software.law / f"{stack}.toml"
    if path.exists():
        fitted = _fitted(stack, tomllib.loads(path.read_text(encoding="utf-8")))
        return _borrowed(fitted) if software.other_clusters else fitted
    if software.similar_to:
        similar = calibration(software.similar_to)
        values = {**similar.values, **software.fixed_constants}
        origin = f"{software.similar_to}: {similar.fitted_from}"
        return _borrowed(replace(similar, stack=stack, values=values, fitted_from=origin))
    return prior_calibration(stack, prior_constants(stack))


def prior_calibration(stack: str, values: Mapping[str, float]) -> StackCalibration:
    """A calibration that no row of the stack was fitted to, with wide intervals."""
    return StackCalibration(
        stack=stack, values=values, provenance="prior", fitted_from="no row",
        rows=frozenset(), step_spread=P90_Z * UNFITTED_SPREAD,
        memory_spread=P90_Z * UNFITTED_SPREAD,
    )  # fmt: skip


def _borrowed(fitted: StackCalibration) -> StackCalibration:
    """The same constants for another cluster, with intervals wider by what clusters differ."""
    cluster_spread = P90_Z * UNFITTED_SPREAD
    return replace(
        fitted,
        provenance="borrowed",
        rows=frozenset(),
        step_spread=hypot(fitted.step_spread, cluster_spread),
        memory_spread=hypot(fitted.memory_spread, cluster_spread),
    )


def prior_constants(stack: str) -> dict[str, float]:
    """`law.name` -> prior mean of each constant, or the value that the stack fixes."""
    software = stack_catalog().stack(stack)
    values = {
        f"{law}.{name}": prior.value
        for law in (software.law, "memory")
        for name, prior in priors(law).items()
    }
    return values | dict(software.fixed_constants)


def _fitted(stack: str, document: Mapping[str, Any]) -> StackCalibration:
    return StackCalibration(
        stack=stack,
        values=prior_constants(stack) | document["constants"],
        provenance="fitted",
        fitted_from=document["fitted_from"],
        rows=frozenset(document["rows"]),
        step_spread=document["interval"]["step"],
        memory_spread=document["interval"]["memory"],
    )
