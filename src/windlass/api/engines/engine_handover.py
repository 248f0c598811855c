"""A plan priced with the costs of an engine, and said in its words; or the nearest one."""

from dataclasses import dataclass, replace

from windlass import planner
from windlass.engines import (
    EngineFile,
    Translation,
    plan_facts,
    sayable_edits,
    translate,
)
from windlass.errors import InputErrors, PlanError
from windlass.jobs import (
    NO_OBJECTS,
    Planned,
    capture,
    exported_config,
    find_machine,
    on_stack,
    with_tensor_shards,
)
from windlass.models import TransformerConfig
from windlass.planner import NearestPlan, PlanningResult
from windlass.program import capability_faults
from windlass.schema import (
    BatchRequest,
    Graph,
    Machine,
    ModelIdentity,
    ParallelRequest,
    Plan,
    Prediction,
    ShardingRequest,
    Stack,
)
from windlass.stacks import load_stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """A plan, priced and said in the words of an engine."""

    translation: Translation
    plan: Plan
    prediction: Prediction
    peaks: tuple[int, ...]
    """Peak bytes of the ranks of each pipeline stage."""
    priced_as: str
    changes: tuple[str, ...] = ()


def hand_over(planned: Planned, engine: EngineFile, *, nearest: bool = False) -> Handover:
    """A plan in the words of an engine, with its price on the engine's stack.

    Args:
        planned: the plan, of any stack.
        engine: the version that is to run it.
        nearest: take the nearest plan that it can say instead of refusing this one.

    Raises:
        InputErrors: every field that the engine cannot say, with the nearest plan and its price.
        PlanError: it does not fit with the engine's costs.
    """
    identity = planned.plan.model or ModelIdentity(name=planned.graph.name)
    config = exported_config(identity)
    if not isinstance(config, TransformerConfig) or config.image is not None or not config.causal:
        raise PlanError(
            f"`{identity.name}` is no model of text that engines train; export `hf:DIR`"
        )
    pricing = Pricing.of(planned, engine, identity)
    plan, changes = pricing.plan, []
    faults = tuple(capability_faults(plan, pricing.stack))
    if faults:
        found = pricing.nearest(plan)
        if found is None or not nearest:
            ways = () if found is None else (_offer(engine, found.words),)
            raise InputErrors((*faults, *ways))
        plan = found.plan.model_copy(update={"model": identity})
        changes = [*faults, f"written instead: {found.words}"]
    translation = _translated(plan, planned, config, engine)
    if translation.unsayable:
        words = _words(translation, engine)
        edited = pricing.nearest_of(_edits(plan, translation, planned, config))
        keys = ", ".join(f"`{each.fact}`" for each in translation.unsayable)
        if edited is None:
            raise InputErrors(words)
        price = pricing.difference(plan, edited, keys)
        if not nearest:
            raise InputErrors((*words, _offer(engine, price)))
        changes += [*words, f"written instead: {price}"]
        plan, translation = edited, _translated(edited, planned, config, engine)
    result = pricing.result(plan)
    return Handover(
        translation=translation, plan=plan, changes=tuple(changes),
        prediction=_fitting(result, engine), priced_as=pricing.name,
        peaks=planner.stage_peak_bytes(plan, pricing.graph, pricing.machine),
    )  # fmt: skip


def _offer(engine: EngineFile, words: str) -> str:
    return f"the nearest plan that `{engine.name}` can run has {words}; `--nearest` takes it"


def _translated(
    plan: Plan, planned: Planned, config: TransformerConfig, engine: EngineFile
) -> Translation:
    return translate(plan_facts(plan, planned.request.train, config), engine)


def _words(translation: Translation, engine: EngineFile) -> tuple[str, ...]:
    return tuple(
        f"`{each.fact}` = {each.value}: {each.because or f'`{engine.label}` has no word for it'}"
        for each in translation.unsayable
    )


def _edits(
    plan: Plan, translation: Translation, planned: Planned, config: TransformerConfig
) -> tuple[Plan, ...]:
    """Plans with all that cannot be said as every engine can say it, which this one can say."""
    plans: tuple[Plan, ...] = (plan,)
    for each in translation.unsayable:
        plans = tuple(edit for one in plans for edit in sayable_edits(one, each.fact))
    engine = translation.engine
    return tuple(
        one for one in dict.fromkeys(plans)
        if one != plan and not _translated(one, planned, config, engine).unsayable
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """A plan with the graph and the machine as an engine's stack has them."""

    planned: Planned
    plan: Plan
    stack: Stack
    name: str
    """Stack whose constants it has."""

    @classmethod
    def of(cls, planned: Planned, engine: EngineFile, model: ModelIdentity) -> "Pricing":
        """Prices with the engine's constants; a model with experts as PyTorch's parts run it."""
        stack, name = load_stack(engine.name), engine.name
        if planned.graph.experts:
            # Of other software only `nemo` has costs of experts, which no engine takes yet.
            stack, name = load_stack("torch").model_copy(update={"can": stack.can}), "torch"
        stack = stack.model_copy(update={"name": engine.name})
        machine = on_stack(find_machine(planned.request.machine), stack)
        made = planned.plan
        graph = capture(model, NO_OBJECTS, stack)
        plan = made.model_copy(
            update={
                "stack": engine.name, "graph": graph.label, "machine": machine.label,
                "model": model, "compile": made.compile and stack.can.compile,
            }
        )  # fmt: skip
        graph = with_tensor_shards(model, graph, plan, NO_OBJECTS, stack)
        of_stack = replace(planned, graph=graph, machine=machine)
        return cls(planned=of_stack, plan=plan, stack=stack, name=name)

    @property
    def graph(self) -> Graph:
        """The model as the stack computes it."""
        return self.planned.graph

    @property
    def machine(self) -> Machine:
        """The machine, driven by the stack."""
        return self.planned.machine

    def with_result(self, result: PlanningResult) -> Planned:
        """The request with a plan of the stack."""
        return replace(self.planned, result=result)

    def result(self, plan: Plan) -> PlanningResult:
        """Checks and predicts a plan."""
        return planner.result_of_given_plan(plan, self.planned.request, self.graph, self.machine)

    def nearest(self, plan: Plan) -> NearestPlan | None:
        """The nearest plan that the stack can run; other recompute, then other degrees if none."""
        pinned = planner.pinned_by(plan, self.planned.request)
        open_, batch = {"recompute": None}, BatchRequest()
        freer = {**open_, "parallel": ParallelRequest(), "batch": batch}
        for update in ({}, open_, freer | {"sharding": ShardingRequest()}):
            request = pinned.model_copy(update=update)
            found = planner.nearest_sayable(request, self.graph, self.machine, self.stack)
            if found is not None:
                return found
        return None

    def nearest_of(self, plans: tuple[Plan, ...]) -> Plan | None:
        """The fastest of some plans that fits; the last one if none does, None of none."""
        priced = ((self.result(one).prediction, one) for one in plans)
        fitting = [(found.step_seconds, one) for found, one in priced if found is not None]
        if not fitting:
            return plans[-1] if plans else None
        return min(fitting, key=lambda pair: pair[0])[1]

    def difference(self, plan: Plan, edited: Plan, words: str) -> str:
        """What another plan has in place of this one, and its price beside it."""
        asked, found = self.result(plan).prediction, self.result(edited).prediction
        price = "it does not fit" if found is None else planner.price_difference(found, asked)
        return f"all but {words} of this plan: {price}"


def _fitting(result: PlanningResult, engine: EngineFile) -> Prediction:
    if result.prediction is None:
        over = "" if result.advice is None else f" by {result.advice.over_bytes / 2**30:.1f} GiB"
        raise PlanError(
            f"with the costs of `{engine.name}` the plan exceeds device memory{over}; plan with "
            f"`--stack {engine.name}`"
        )
    return result.prediction
