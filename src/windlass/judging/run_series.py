"""The curves and times of one run, as arrays, from the series of its journals."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from windlass.judge import Curve, RankTimes
from windlass.program import mesh_coord
from windlass.schema import Parallelism, Plan
from windlass.tracking import Series

_CURVES = ("loss", "gradient_norm", "learning_rate")
_KIND_PREFIX, _ARRIVAL_PREFIX = "seconds.", "arrival."


def curves_of(series: Mapping[str, Series]) -> dict[str, Curve]:
    """The curves of a run, without the norms of steps that a scaled loss made it skip."""
    curves = {name: curve_of(series, name) for name in _CURVES if name in series}
    if "loss_scale" in series and "gradient_norm" in curves:
        norms = curves["gradient_norm"]
        kept = np.isfinite(norms.values)
        curves["gradient_norm"] = Curve(norms.steps[kept], norms.values[kept])
    return curves


def curve_of(series: Mapping[str, Series], name: str) -> Curve:
    """A series by its name; it has no step if the run has none of that name."""
    if name not in series:
        return Curve(np.empty(0, dtype=np.int64), np.empty(0))
    return Curve(series[name].steps, series[name].values)


def rank_times(rank: int, series: Mapping[str, Series], plan: Plan | None) -> RankTimes:
    """The times of one rank; a step without a kind of instruction took no time for it."""
    steps = curve_of(series, "seconds").steps

    def aligned(one: Series) -> npt.NDArray[np.float64]:
        values = np.zeros(len(steps))
        values[np.isin(steps, one.steps)] = one.values[np.isin(one.steps, steps)]
        return values

    def of_prefix(prefix: str) -> dict[str, npt.NDArray[np.float64]]:
        found = {name: one for name, one in series.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): aligned(one) for name, one in found.items()}

    cpu = series.get("cpu_seconds")
    return RankTimes(
        mesh_coord(rank, plan.parallel if plan else Parallelism()),
        steps,
        of_prefix(_KIND_PREFIX),
        of_prefix(_ARRIVAL_PREFIX),
        None if cpu is None else aligned(cpu),
    )


def most_targets(series: Mapping[str, Series]) -> int | None:
    """Targets of a step, at most: its tokens, or its examples; None if they were not recorded."""
    tokens = curve_of(series, "tokens").values
    return int(tokens.max()) if len(tokens) else None
