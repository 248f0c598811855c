"""`plan` turns a request into a plan and its prediction, without running anything.

Modules that import torch load only when something must be captured or measured for the first time,
so that planning answers at once.
"""

from dataclasses import dataclass
from pathlib import Path

from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import capture, capture_open_tensor_degrees
from windlass.errors import PlanError, RequestError
from windlass.planner import PlanningResult, choose_plan, explain_result, pinned_parallelism
from windlass.schema import Graph, Machine, Plan, Prediction, Request

_NEAREST_SHOWN = 4
"""Plans for several devices that a message names as nearest to fitting, if none fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A request with its model's graph, its machine and the result of planning."""

    request: Request
    graph: Graph
    machine: Machine
    result: PlanningResult
    """The chosen plan with its alternatives, or what would help if nothing fits."""

    @property
    def plan(self) -> Plan:
        """The chosen plan.

        Raises:
            PlanError: nothing fits; the message names the cheapest changes that would help.
        """
        if self.result.plan is None:
            raise self._no_plan_error()
        return self.result.plan

    @property
    def prediction(self) -> Prediction:
        """The predicted cost of the chosen plan.

        Raises:
            PlanError: nothing fits.
        """
        if self.result.prediction is None:
            raise self._no_plan_error()
        return self.result.prediction

    def _no_plan_error(self) -> PlanError:
        explanation = explain_result(self.result)
        nearest = explanation.infeasible[:_NEAREST_SHOWN] if self.machine.devices > 1 else ()
        heading = f"`{self.request.model.name}` {explanation.verdict}; what would help:"
        return PlanError("\n- ".join([heading, *explanation.help, *nearest]))


def make_request(
    model: str | None = None,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    file: Path | None = None,
) -> Request:
    """The request made from *defaults < file < overrides < the other arguments*.

    Args:
        model: a name, or `file.py:function`.
        overrides: `key=value`, such as `train.batch=32`.
        machine: a name of the catalogue.
        memory: device memory budget, such as `4GiB`.
        file: a TOML file with a request.

    Raises:
        RequestError: the file cannot be read.
        InputErrors: every key and value that is not valid.
    """
    arguments = {"model.name": model, "machine": machine, "memory": memory}
    last = (f"{key}={value!r}" for key, value in arguments.items() if value is not None)
    return Request.resolve(file, (*overrides, *last))


def plan(
    model: str | Request,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Chooses a plan and predicts its cost, without running anything.

    Args:
        model: a name, `file.py:function`, or a complete request.
        overrides: `key=value`, such as `train.batch=32`; a complete request takes neither these
            nor `machine` or `memory`.
        machine: a name of the catalogue; None means this machine.
        memory: device memory budget, such as `4GiB`; None means all of it.
        progress: called with how far a first measurement of this machine, the capture of
            tensor-parallel shards, and the search are.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    if isinstance(model, str):
        request = make_request(model, *overrides, machine=machine, memory=memory)
    elif overrides or machine or memory:
        raise RequestError("a complete request takes no overrides; give them to `make_request`")
    else:
        request = model
    graph = capture(request.model)
    target = find_machine(request.machine, progress=progress)
    devices = pinned_parallelism(request).devices
    if devices > 1 and request.machine == HERE and target.device.kind == "cpu":
        target = target.split(devices)
    graph = capture_open_tensor_degrees(request, graph, target, progress=progress)
    if progress is not None:
        progress("searching", 0, None)
    result = choose_plan(request, graph, target)
    if progress is not None:
        progress("searching", 1, 1)
    return Planned(request=request, graph=graph, machine=target, result=result)
