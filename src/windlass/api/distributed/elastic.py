"""Surviving: after the loss of a device a run goes on with those that are left."""

from collections import Counter
from collections.abc import Callable
from math import gcd
from pathlib import Path

from windlass.api.machines import Progress
from windlass.api.plan import Planned
from windlass.api.runs import load
from windlass.api.training.resume import resume
from windlass.api.training.run_files import planned_from_record
from windlass.api.training.train import Run
from windlass.errors import RankLost
from windlass.schema.plan import Parallelism
from windlass.schema.request import Request

_TRIES = 2
"""A device that has failed so often is given up."""


class ElasticRecovery:
    """Goes on with a run on several devices of this host whenever one of them is lost.

    A device that was killed is gone for good; one that only fell silent is given one more chance.

    Args:
        folder: of the run.
        stop: as `resume` takes it.
    """

    def __init__(self, folder: Path, *, stop: Callable[[], bool] | None = None) -> None:
        self._folder, self._stop = folder, stop
        self._failures: Counter[int] = Counter()

    def recover(self, lost: RankLost, *, progress: Progress | None = None) -> Run:
        """The run that goes on from the last checkpoint; its first note says with what.

        Args:
            lost: what the run ended with.
            progress: as `resume` takes it.

        Raises:
            DeviceLost: no plan of fewer devices computes the same.
            WindlassError: why it cannot go on.
        """
        self._failures[lost.device] += 1
        if not lost.for_good and self._failures[lost.device] < _TRIES:
            return self._resumed((), f"device {lost.device} gets another chance", progress)
        self._failures.clear()  # other devices have the numbers then
        planned = planned_from_record(load(self._folder))
        cut = shrink_parallelism(planned.plan.parallel, planned.request)
        if cut is None:
            raise lost
        words = f"{planned.plan.parallel.devices} devices are {cut.devices} now"
        return self._resumed(parallelism_overrides(planned, cut), words, progress)

    def _resumed(self, changes: tuple[str, ...], words: str, progress: Progress | None) -> Run:
        run = resume(self._folder, *changes, stop=self._stop, progress=progress)
        told = f" ({', '.join(changes)})" if changes else ""
        run.notes = (f"{words}{told}; goes on after step {run.done}", *run.notes)
        return run


def shrink_parallelism(parallelism: Parallelism, request: Request) -> Parallelism | None:
    """The cut for the devices that are left when one is lost, as wide as can be; None if none is.

    Fewer replicas, as many as divide the batch; where there is but one, fewer stages.

    Args:
        cut: that has lost a device.
        request: whose batch stays what it is.
    """
    samples = request.train.batch // (request.batch.micro or 1)
    for replicas in range(parallelism.data - 1, 0, -1):
        if samples % replicas == 0:
            return parallelism.model_copy(update={"data": replicas})
    if parallelism.pipeline > 1:
        return parallelism.model_copy(update={"pipeline": parallelism.pipeline - 1})
    return None


def parallelism_overrides(planned: Planned, parallelism: Parallelism) -> tuple[str, ...]:
    """What of a request must change for another cut, and what must not change with it.

    Args:
        planned: under the cut that there was.
        cut: that there is now.
    """
    request, batch = planned.request, planned.plan.batch
    changes = [
        f"parallel.{name}={getattr(parallelism, name)}"
        for name in ("pipeline", "tensor", "data")
        if getattr(parallelism, name) != getattr(planned.plan.parallel, name)
    ]
    if request.batch.accumulation:
        micro = request.batch.micro or batch.micro
        changes.append(f"batch.accumulation={request.train.batch // (micro * parallelism.data)}")
    for name in ("parameters", "optimizer"):
        shared = getattr(request.sharding, name)
        if shared and parallelism.data % shared:
            changes.append(f"sharding.{name}={gcd(shared, parallelism.data)}")
    if request.precision is None:
        changes.append(f"precision={planned.plan.precision}")
    return tuple(changes)
