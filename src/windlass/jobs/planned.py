"""`plan` turns a request into a plan and its prediction, without running anything.

Modules that import torch load only when something must be captured or measured for the first time,
so that planning answers at once.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass import planner
from windlass.errors import PlanError, RequestError
from windlass.jobs.arguments.data import with_data
from windlass.jobs.arguments.optimizer import optimizer_overrides
from windlass.jobs.data import measure_data
from windlass.jobs.fine_tuning import with_peft_adapters, with_trained_head
from windlass.jobs.kept_results import keep_plan, load_kept_code, load_kept_plan, plan_key
from windlass.jobs.known_machines import (
    HERE,
    Progress,
    find_machine,
    find_stack,
    needed_parts,
    on_stack,
    unmeasured_notes,
)
from windlass.jobs.model_graph import capture, head_notes, model_notes
from windlass.jobs.objects import (
    NO_OBJECTS,
    PlannedObjects,
    argument_override,
    name_of_model,
    require_cross_entropy,
    with_examples,
    with_own_data,
)
from windlass.jobs.plan_file import plan_context, split_machine, with_tensor_shards
from windlass.jobs.plan_search import PlanSearch
from windlass.planner import (
    Explanation,
    Findings,
    PlanningResult,
    explain_result,
    pinned_parallelism,
    resolve_defaults,
)
from windlass.report import plan_notebook
from windlass.schema import (
    ChosenDefault,
    DataSize,
    Graph,
    Machine,
    Plan,
    Prediction,
    Request,
    ResolvedRequest,
    fact_table_html,
)
from windlass.sparsity import describe_leg, last_step_of_leg

if TYPE_CHECKING:
    from torch import Tensor, nn

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
    data: DataSize | None = None
    """How much there is to train on; None if that was not counted yet."""
    objects: PlannedObjects = NO_OBJECTS
    """What was passed in place of names."""
    is_kept: bool = False
    """Whether the outcome was found before and kept, not searched for now."""

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
    stack: str | None = None,
    file: Path | None = None,
) -> Request:
    """The request made from *defaults < file < overrides < the other arguments*.

    Args:
        model: a name, or `file.py:function`.
        overrides: `key=value`, such as `train.batch=32`.
        machine: a name of the catalogue.
        memory: device memory budget, such as `4GiB`.
        stack: software to plan for, by name or file.
        file: a TOML file with a request.

    Raises:
        RequestError: the file cannot be read.
        InputErrors: every key and value that is not valid.
    """
    overrides = _all_overrides(model, overrides, machine, memory, stack)
    return with_trained_head(with_peft_adapters(Request.resolve(file, overrides)))


def request_origins(
    model: str | None = None,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    stack: str | None = None,
    file: Path | None = None,
) -> dict[str, str]:
    """Where each key comes from that `make_request` is given in these arguments, by dotted key.

    Raises:
        RequestError: the file or an override cannot be read.
    """
    return Request.origins(file, _all_overrides(model, overrides, machine, memory, stack))


def _all_overrides(
    model: str | None, overrides: tuple[str, ...], *others: str | None
) -> tuple[str, ...]:
    """The overrides, and machine, memory and stack as such."""
    keys = ("model.name", "machine", "memory", "stack")
    arguments = dict(zip(keys, (model, *others), strict=True))
    # A JSON string is a TOML string too, whatever it contains.
    texts = ((key, json.dumps(value)) for key, value in arguments.items() if value is not None)
    return (*overrides, *(f"{key}={text}" for key, text in texts))


def plan(
    model: "str | Request | nn.Module | Callable[..., nn.Module] | None" = None,
    *overrides: str,
    machine: str | None = None,
    memory: str | None = None,
    stack: str | None = None,
    plan: Plan | Path | str | None = None,
    loss: "Callable[[Tensor, Tensor], Tensor] | None" = None,
    data: object = None,
    optimizer: object = None,
    fine_tunes: bool = False,
    cache: bool = True,
    progress: Progress | None = None,
) -> Planned:
    """Chooses a plan and predicts its cost, without running anything.

    Args:
        model: a name, `file.py:function`, or a complete request; an `nn.Sequential` of layers, or a
            function that returns one; None means the model of `plan`, or `gpt-tiny`.
        overrides: `key=value`, such as `train.batch=32`; a complete request takes neither these
            nor `machine`, `memory` or `stack`.
        machine: a name of the catalogue; None means this machine.
        memory: device memory budget, such as `4GiB`; None means all of it.
        stack: software to plan for, by name or file; None means Windlass's own runtime.
        plan: this plan, or the one in this TOML file, in place of a search. The model, the machine
            and all that it decides are then its own, unless they are named here too.
        loss: of logits `[b s v]` and targets `[b s]`, the mean over all targets; None means
            cross-entropy.
        data: what to train on: the name of a source, texts, token ids, or pairs of inputs and
            targets, each `Int[s]`; None means the request's `data`.
        optimizer: a name as `train.optimizer` has it, or `torch.optim.AdamW` or `SGD`: the class,
            a function that is given weights, or an optimizer, whose settings alone are read; None
            means the request's.
        fine_tunes: whether the weights that it starts from are trained already, so that its steps
            are passes over its data; those of a Hugging Face folder are.
        cache: take the outcome of the same question from the cache, if it is there.
        progress: called with how far a first measurement of this machine, the capture of
            tensor-parallel shards, and the search are.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    objects = PlannedObjects(loss=loss)
    if optimizer is not None:
        overrides = (*optimizer_overrides(optimizer), *overrides)
    if not (model is None or isinstance(model, str | Request)):
        name, by_name = name_of_model(model)
        objects = replace(objects, model=None if by_name else model)
        model, overrides = name, tuple(map(argument_override, overrides))
    if not isinstance(model, Request):
        request = make_request(model, *overrides, machine=machine, memory=memory, stack=stack)
    elif overrides or machine or memory or stack:
        raise RequestError("a complete request takes no overrides; give them to `make_request`")
    else:
        request = model
    items: Iterable[object] | None = None
    if data is not None:
        request, items = with_data(request, data)
    if request.train.groups:
        from windlass.runtime import require_group_matches

        require_group_matches(
            request.train.groups, objects.stack(request.model_identity, seed=None)
        )
    given = Plan.load(Path(plan)) if isinstance(plan, str | Path) else plan
    planned = (
        plan_request(request, objects, progress, cache=cache, fine_tunes=fine_tunes)
        if given is None
        else _planned_as_given(given, request, objects, progress, fine_tunes=fine_tunes)
    )
    if items is None:
        return planned
    return replace(planned, objects=with_examples(objects, items, planned.request, planned.graph))


def plan_request(
    request: Request,
    objects: PlannedObjects,
    progress: Progress | None,
    *,
    cache: bool = True,
    here: Machine | None = None,
    fine_tunes: bool = False,
    explains: bool = True,
    findings: Findings | None = None,
) -> Planned:
    """The best plan for a request.

    Args:
        cache: take the outcome of the same question from the cache, if it is there.
        here: this machine, or the part of it that the run will have; None means all of it.
        fine_tunes: whether the weights that it starts from are trained already.
        explains: whether to say what comes next, or would help where nothing fits, which takes
            longer than the search.
        findings: of other searches of the same model and machine; None makes new ones.

    Raises:
        WindlassError: what is wrong with the request, the model or the machine.
    """
    require_cross_entropy(request, objects)
    # A capture takes seconds, and a measurement of this machine longer: unknown names come first.
    named = None if request.machine == HERE else find_machine(request.machine)
    stack = find_stack(request.stack)
    model = request.model_identity
    graph = capture(model, objects, stack)
    needs = needed_parts(request, graph)
    target = on_stack(named or here or find_machine(HERE, progress=progress, needs=needs), stack)
    devices = pinned_parallelism(request).devices
    if request.machine == HERE:
        target = split_machine(devices, target)
    data = None
    if objects.examples is None:
        data = measure_data(with_own_data(request, graph), fine_tunes=fine_tunes, progress=progress)
    kept_code = load_kept_code(graph, request.machine)
    key = (
        plan_key(request, graph, target, kept_code, data, explains)
        if objects.is_rebuildable
        else None
    )
    kept = load_kept_plan(key) if cache and key is not None else None
    if kept is None:
        search = PlanSearch(
            request=request, machine=target, kept_code=kept_code, objects=objects,
            progress=progress, data=data, explains=explains, findings=findings or Findings(),
        )  # fmt: skip
        graph, outcome = search.run(graph)
        if key is not None and (outcome.result.fits or explains):
            keep_plan(key, outcome)
    else:
        outcome = kept
        if kept.result.plan is not None:
            graph = with_tensor_shards(
                request.model_identity, graph, kept.result.plan, objects, stack
            )
    resolved, defaults = resolve_defaults(
        request, graph, target, most_sequences=outcome.most_sequences, data=data
    )
    result = outcome.result
    if target.unmeasured and here is None and result.prediction is not None:
        needs = needed_parts(resolved, graph, resolved.train.steps * result.prediction.step_seconds)
        if any(part in target.unmeasured for part in needs):
            find_machine(HERE, progress=progress, needs=needs)
            return plan_request(request, objects, progress, cache=cache, fine_tunes=fine_tunes)
    if result.plan is not None:
        result = replace(result, plan=result.plan.model_copy(update={"model": model}))
    if progress is not None:
        progress("searching", 1, 1)
    return Planned(
        request=with_own_data(resolved, graph),
        graph=graph,
        machine=target,
        result=result,
        defaults=defaults,
        notes=(
            *model_notes(graph, objects),
            *head_notes(model),
            *_leg_notes(resolved),
            *unmeasured_notes(request, target),
        ),
        data=data,
        objects=objects,
        is_kept=kept is not None,
    )


def _leg_notes(request: ResolvedRequest) -> tuple[str, ...]:
    """Which leg of a run is planned, and how the others are; none for a run with one leg."""
    sparsity, steps = request.sparsity, request.train.steps
    if sparsity is None or sparsity.legs == 1:
        return ()
    words = describe_leg(sparsity, last_step_of_leg(sparsity, steps), steps)
    return (f"plans {words}; `sparsity.leg` = 0 to {sparsity.legs - 1} plans each",)


def _planned_as_given(
    plan: Plan,
    request: Request,
    objects: PlannedObjects,
    progress: Progress | None,
    *,
    fine_tunes: bool,
) -> Planned:
    """A plan as it is given, checked and predicted."""
    require_cross_entropy(request, objects)
    context = plan_context(plan, request, objects, progress=progress)
    graph, machine = context.graph, context.machine
    data = measure_data(
        with_own_data(context.request, graph), fine_tunes=fine_tunes, progress=progress
    )
    resolved, defaults = resolve_defaults(context.request, graph, machine, data=data)
    return Planned(
        request=with_own_data(resolved, graph),
        graph=graph,
        machine=machine,
        result=planner.result_of_given_plan(
            context.plan,
            resolved,
            graph,
            machine,
            kept_code=load_kept_code(graph, request.machine),
        ),
        defaults=defaults,
        notes=(*context.notes, *model_notes(graph, objects)),
        data=data,
        objects=objects,
    )
