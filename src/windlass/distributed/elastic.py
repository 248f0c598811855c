"""Elastic training: a run continues on the devices that there are, of one host or of several."""

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from math import gcd
from pathlib import Path

from windlass.errors import PlanError, RankLost
from windlass.jobs import Planned, Progress, load
from windlass.schema import Parallelism, ResolvedRequest
from windlass.training import Run, planned_from_record, replan, resume

_MAX_FAILURES = 2
"""Number of hangs of one rank after which its device is given up."""


class ElasticRecovery:
    """Resumes a run on several devices of this host whenever one of them is lost.

    A rank that was killed has lost its device; one that only hangs is restarted once.

    Args:
        folder: the run folder.
        stop: passed on to `resume`.
    """

    def __init__(self, folder: Path, *, stop: Callable[[], bool] | None = None) -> None:
        self._folder, self._stop = folder, stop
        self._failures: Counter[int] = Counter()

    def recover(self, lost: RankLost, *, progress: Progress | None = None) -> Run:
        """The run, resumed from its last checkpoint; its first note says on how many devices.

        Args:
            lost: the error that ended the run.
            progress: passed on to `resume`.

        Raises:
            RankLost: no plan for fewer devices trains the same model with the same batch.
            WindlassError: why the run cannot be resumed.
        """
        self._failures[lost.rank] += 1
        if not lost.permanent and self._failures[lost.rank] < _MAX_FAILURES:
            return self._resumed((), f"rank {lost.rank} is restarted", progress)
        self._failures.clear()  # with fewer devices, ranks have other numbers
        planned = planned_from_record(load(self._folder))
        before = planned.plan.parallel
        parallelism = fit_parallelism(before, planned.request, range(before.devices - 1, 0, -1))
        if parallelism is None:
            raise lost
        change = f"{parallelism.devices} of {before.devices} devices are left"
        return self._resumed(parallelism_overrides(planned, parallelism), change, progress)

    def _resumed(self, overrides: tuple[str, ...], change: str, progress: Progress | None) -> Run:
        run = resume(self._folder, *overrides, stop=self._stop, progress=progress)
        detail = f" ({', '.join(overrides)})" if overrides else ""
        run.notes = (f"{change}{detail}; continues after step {run.done}", *run.notes)
        return run


def replan_for_devices(folder: Path, planned: Planned, devices: int) -> Planned:
    """Gives a run a plan for another number of devices, with the same batch and order of tokens.

    Raises:
        PlanError: no plan for so many devices trains the same model with the same batch.
        WindlassError: why the run cannot be planned anew.
    """
    parallelism = fit_parallelism(planned.plan.parallel, planned.request, (devices,))
    if parallelism is None:
        before, batch = planned.plan.parallel.devices, planned.request.train.batch
        raise PlanError(
            f"the plan of `{folder}` is for {before} devices and there are {devices}, of which "
            f"`parallel.tensor` = {planned.plan.parallel.tensor} and `train.batch` = {batch} leave "
            "no equal share to each; start as many hosts as the run was prepared for, or a number "
            "that divides them"
        )
    return replan(load(folder), *parallelism_overrides(planned, parallelism))


def fit_parallelism(
    parallelism: Parallelism, request: ResolvedRequest, counts: Iterable[int]
) -> Parallelism | None:
    """Degrees for other numbers of devices, with as many stages as can stay; None without any.

    Args:
        request: its global batch stays what it is, of which replicas take equal shares.
        counts: numbers of devices, the preferred one first.
    """
    micro_batches = request.train.batch // (request.batch.micro or 1)
    of_stage = int(parallelism.tensor) * (parallelism.context or 1)
    for pipeline, devices in product(range(parallelism.pipeline, 0, -1), tuple(counts)):
        data, left = divmod(devices, pipeline * of_stage)
        if data and not left and micro_batches % data == 0:
            return parallelism.model_copy(update={"pipeline": pipeline, "data": data})
    return None


def parallelism_overrides(planned: Planned, parallelism: Parallelism) -> tuple[str, ...]:
    """Overrides that give a request other degrees, and keep the rest of it valid and unchanged."""
    request, batch = planned.request, planned.plan.batch
    overrides = [
        f"parallel.{name}={getattr(parallelism, name)}"
        for name in ("pipeline", "tensor", "data")
        if getattr(parallelism, name) != getattr(planned.plan.parallel, name)
    ]
    if request.batch.accumulation:
        micro = request.batch.micro or batch.micro
        overrides.append(f"batch.accumulation={request.train.batch // (micro * parallelism.data)}")
    for name in ("parameters", "optimizer"):
        degree = getattr(request.sharding, name)
        if degree and parallelism.data % degree:
            overrides.append(f"sharding.{name}={gcd(degree, parallelism.data)}")
    if request.precision is None:
        overrides.append(f"precision={planned.plan.precision}")
    return tuple(overrides)
