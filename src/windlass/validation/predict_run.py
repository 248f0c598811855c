"""Predicts step time and peak memory of published runs by the clock that plans, with intervals."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import exp, hypot

from windlass.cost import stack_stage_bytes
from windlass.errors import MachineError
from windlass.schema import DEVIATIONS_OF_80_PERCENT, Stack
from windlass.stacks import load_stack
from windlass.validation.clusters import Cluster
from windlass.validation.csv_table import UnusableRow
from windlass.validation.published_plan import PublishedPlan, published_plan, step_seconds
from windlass.validation.published_run import PublishedRun, RunConfig

_CLUSTER_DEVIATION = 0.15
"""Standard deviation of log(measured / predicted) between clusters of equal devices that run the
same software, added where no row of a cluster was fitted: it is what sources that are left out
whole show (docs/design/accuracy.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """Predicted step time and memory of a run, beside what was measured."""

    run: PublishedRun
    config: RunConfig
    """The configuration that was predicted; one of the candidates if the row leaves it open."""
    step_seconds: float
    low_seconds: float
    """Lower end of the 80 % interval of step time."""
    high_seconds: float
    peak_bytes: float | None
    """Peak memory of the fullest device; None if it is not predicted."""
    low_peak_bytes: float | None
    high_peak_bytes: float | None
    fits: bool | None
    """False if even the lower end of peak memory exceeds the device's capacity."""

    @property
    def is_calibration_row(self) -> bool:
        """Whether constants were fitted to this very row."""
        return self.run.key in self.run.cluster.rows


def predict_run(
    run: PublishedRun, stack_of: Callable[[Cluster], Stack] | None = None
) -> RunPrediction:
    """The prediction of a run.

    If it has several candidate configurations, the fastest that fits is predicted, or the fastest
    of all if none fits.

    Args:
        stack_of: the software of a cluster; None takes the stack that it names.

    Raises:
        UnusableRow: no configuration of the run can be a plan.
    """
    stack = load_stack(run.cluster.stack) if stack_of is None else stack_of(run.cluster)
    refused: list[str] = []
    predictions = list(_predictions(run, stack, refused))
    if not predictions:
        raise UnusableRow(refused[0])
    return min(predictions, key=lambda each: (each.fits is False, each.step_seconds))


def _predictions(run: PublishedRun, stack: Stack, refused: list[str]) -> Iterator[RunPrediction]:
    """A prediction for each configuration that the row may mean and that can be a plan."""
    for config in run.candidates or (run.config,):
        try:
            published = published_plan(run, config, stack)
            seconds = step_seconds(published)
        except (UnusableRow, MachineError) as reason:
            refused.append(str(reason))
        except KeyError as lack:
            refused.append(str(lack.args[0]))
        else:
            yield _with_intervals(run, config, published, seconds, stack)


def _with_intervals(
    run: PublishedRun, config: RunConfig, published: PublishedPlan, seconds: float, stack: Stack
) -> RunPrediction:
    cluster = run.cluster
    if cluster.old_software_share and config.old_software:
        seconds *= 1.0 + cluster.old_software_share
    has_experts = run.shape.experts is not None
    own = None if has_experts and stack.expert_deviation else cluster.deviation
    spread = exp(_deviation(own, stack.step_deviation(has_experts=has_experts)))
    memory_spread = exp(_deviation(cluster.memory_deviation, stack.memory_deviation))
    peak = _peak_bytes(published)
    capacity = published.machine.device.memory.capacity_bytes
    return RunPrediction(
        run=run,
        config=config,
        step_seconds=seconds,
        low_seconds=seconds / spread,
        high_seconds=seconds * spread,
        peak_bytes=peak,
        low_peak_bytes=None if peak is None else peak / memory_spread,
        high_peak_bytes=None if peak is None else peak * memory_spread,
        fits=None if peak is None else peak / memory_spread <= capacity,
    )


def _deviation(own: float | None, of_stack: float | None) -> float:
    """Half width of the 80 % interval in logarithms."""
    if own is not None:
        return DEVIATIONS_OF_80_PERCENT * own
    of_stack = _CLUSTER_DEVIATION if of_stack is None else of_stack
    return DEVIATIONS_OF_80_PERCENT * hypot(of_stack, _CLUSTER_DEVIATION)


def _peak_bytes(published: PublishedPlan) -> float | None:
    """Bytes of device memory on the fullest stage; None where tensors stream through the device."""
    plan, graph, machine = published.plan, published.graph, published.machine
    if machine.device.kind != "cuda" or plan.offloads:
        return None
    return max(sum(each.values()) for each in stack_stage_bytes(plan, graph, machine))
