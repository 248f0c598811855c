"""Planning: from a request to a plan and its prediction; runs nothing.

Rooms that need torch are imported only where something must be captured or measured for the first
time, so that planning answers at once.
"""

from dataclasses import dataclass
from pathlib import Path

from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import capture, capture_open_tensor_degrees
from windlass.errors import PlanError, RequestError
from windlass.planner.choose import choose
from windlass.planner.explain import explain
from windlass.planner.result import PlanningResult
from windlass.planner.space.pinned_parallelism import pinned_parallelism
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.prediction import Prediction
from windlass.schema.request import Request

_NEAREST = 4
"""Plans over several devices that come nearest to fitting, as told where none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request with everything that was found for it."""

    request: Request
    graph: Graph
    machine: Machine
    result: PlanningResult

    @property
    def plan(self) -> Plan:
        """The chosen plan.

        Raises:
            PlanError: nothing fits; the message names the cheapest changes that would.
        """
        if self.result.plan is None:
            raise self._refusal()
        return self.result.plan

    @property
    def prediction(self) -> Prediction:
        """What the chosen plan will cost.

        Raises:
            PlanError: nothing fits.
        """
        if self.result.prediction is None:
            raise self._refusal()
        return self.result.prediction

    def _refusal(self) -> PlanError:
        told = explain(self.result)
        model = self.request.model.name
        nearest = told.infeasible[:_NEAREST] if self.machine.devices > 1 else ()
        lines = [f"- {line}" for line in (*told.help, *nearest)]
        return PlanError("\n".join([f"`{model}` {told.verdict}; what would help:", *lines]))


def make_request(
    model: str | None = None,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    file: Path | None = None,
) -> Request:
    """The request of *defaults < file < overrides*, and what is named apart last.

    Raises:
        RequestError: the file cannot be read.
        Faults: all keys and values that do not fit.
    """
    apart = {"model.name": model, "machine": machine, "memory": memory}
    named = (f"{key}={value!r}" for key, value in apart.items() if value is not None)
    return Request.resolve(file, (*overrides, *named))


def plan(
    model: str | Request,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Chooses a plan and predicts it; runs nothing.

    Args:
        model: a name, `file.py:function`, or a whole request.
        overrides: `key=value`, such as `train.batch=32`; a whole request takes none, nor
            `machine` or `memory`: it says all that already.
        machine: a name of the catalogue; None means this machine.
        near: budget for the near tier, such as `4GiB`.
        progress: told how far a first measurement of this machine, or of a model's slices, is.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    if isinstance(model, str):
        request = make_request(model, *overrides, machine=machine, memory=memory)
    elif overrides or machine or memory:
        raise RequestError("a whole request takes no overrides; give them to `ask`, which makes it")
    else:
        request = model
    graph = capture(request.model)
    found = find_machine(request.machine, progress=progress)
    devices = pinned_parallelism(request).devices
    if devices > 1 and request.machine == HERE and found.device.kind == "cpu":
        found = found.split(devices)
    graph = capture_open_tensor_degrees(request, graph, found, progress=progress)
    if progress is not None:
        progress("searching", 0, None)
    choice = choose(request, graph, found)
    if progress is not None:
        progress("searching", 1, 1)
    return Planned(request=request, graph=graph, machine=found, result=choice)
