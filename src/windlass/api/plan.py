"""`plan` turns a request into a plan and its prediction, without running anything.

Modules that import torch load only when something must be captured or measured for the first time,
so that planning answers at once.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from windlass.api.machines import HERE, Progress, find_machine
from windlass.api.model_graph import capture, capture_open_tensor_degrees
from windlass.api.plan_file import plan_context
from windlass.errors import PlanError, RequestError
from windlass.planner import (
    Explanation,
    PlanningResult,
    choose_plan,
    explain_result,
    pinned_parallelism,
    resolve_defaults,
    result_of_given_plan,
)
from windlass.report import plan_notebook
from windlass.schema import (
    ChosenDefault,
    Graph,
    Machine,
    Plan,
    Prediction,
    Request,
    ResolvedRequest,
    fact_table_html,
)

_NEAREST_SHOWN = 4
"""Plans for several devices that a message names as nearest to fitting, if none fits."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Planned:
    """A request with its model's graph, its machine and the result of planning."""

    request: ResolvedRequest
    """What was asked for, and what was chosen for that model and machine where it was left open."""
    graph: Graph
    machine: Machine
    result: PlanningResult
    """The chosen plan with its alternatives, or what would help if nothing fits."""
    defaults: tuple[ChosenDefault, ...] = ()
    """What was chosen where the request left batch, sequence or steps open."""
    notes: tuple[str, ...] = ()
    """What a user should know of a plan that was given, a sentence each."""

    def __repr__(self) -> str:
        return f"<Planned {self.graph.name} on {self.machine.name}: {self._explanation.verdict}>"

    def _repr_html_(self) -> str:
        plan, prediction = self.result.plan, self.result.prediction
        if plan is None or prediction is None:
            help_ = {str(i): text for i, text in enumerate(self._explanation.help, start=1)}
            return fact_table_html(f"{self.graph.name} {self._explanation.verdict}", help_)
        return plan_notebook(plan, self.graph, prediction, steps=self.request.train.steps)

    @property
    def _explanation(self) -> Explanation:
        return explain_result(self.result)

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
    model: str | Request | None = None,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    plan: Plan | Path | str | None = None,
    progress: Progress | None = None,
) -> Planned:
    """Chooses a plan and predicts its cost, without running anything.

    Args:
        model: a name, `file.py:function`, or a complete request; None means the model of `plan`,
            or `gpt-tiny`.
        overrides: `key=value`, such as `train.batch=32`; a complete request takes neither these
            nor `machine` or `memory`.
        machine: a name of the catalogue; None means this machine.
        memory: device memory budget, such as `4GiB`; None means all of it.
        plan: this plan, or the one in this TOML file, in place of a search. The model, the machine
            and all that it decides are then its own, unless they are named here too.
        progress: called with how far a first measurement of this machine, the capture of
            tensor-parallel shards, and the search are.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    if not isinstance(model, Request):
        request = make_request(model, *overrides, machine=machine, memory=memory)
    elif overrides or machine or memory:
        raise RequestError("a complete request takes no overrides; give them to `make_request`")
    else:
        request = model
    if plan is not None:
        given = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        return _planned_as_given(given, request, progress)
    graph = capture(request.model)
    target = find_machine(request.machine, progress=progress)
    devices = pinned_parallelism(request).devices
    if devices > 1 and request.machine == HERE and target.device.kind == "cpu":
        target = target.split(devices)
    resolved, defaults = resolve_defaults(request, graph, target)
    graph = capture_open_tensor_degrees(resolved, graph, target, progress=progress)
    if progress is not None:
        progress("searching", 0, None)
    result = choose_plan(resolved, graph, target)
    if result.plan is not None:
        result = replace(result, plan=result.plan.model_copy(update={"model": request.model}))
    if progress is not None:
        progress("searching", 1, 1)
    return Planned(request=resolved, graph=graph, machine=target, result=result, defaults=defaults)


def _planned_as_given(plan: Plan, request: Request, progress: Progress | None) -> Planned:
    """A plan as it is given, checked and predicted."""
    context = plan_context(plan, request, progress=progress)
    graph, machine = context.graph, context.machine
    resolved, defaults = resolve_defaults(context.request, graph, machine)
    return Planned(
        request=resolved,
        graph=graph,
        machine=machine,
        result=result_of_given_plan(context.plan, resolved, graph, machine),
        defaults=defaults,
        notes=context.notes,
    )
