"""`export` hands a run's weights to other software, or a plan to the engine that will run it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from windlass import planner
from windlass.answer import Answer
from windlass.atomic_files import atomic_write, storage_errors
from windlass.distributed import ClusterJob, Scheduler, launch_texts
from windlass.engines import (
    EngineFile,
    Translation,
    callback_text,
    engine_versions,
    load_engine,
    plan_facts,
    sayable_edits,
    translate,
)
from windlass.errors import InputErrors, PlanError, RequestError
from windlass.flags import AnyPath
from windlass.jobs import (
    NO_OBJECTS,
    RUNS,
    Planned,
    capture,
    exported_config,
    find_machine,
    load,
    on_stack,
    plan as plan_model,
    with_tensor_shards,
)
from windlass.models import TransformerConfig
from windlass.planner import NearestPlan, PlanningResult
from windlass.program import capability_faults
from windlass.schema import (
    PLAN_FILE,
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
from windlass.training import ExportedFiles, export as export_weights, planned_from_record

PREDICTION_FILE = "prediction.json"
TRANSLATION_FILE = "translation.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineExport(Answer):
    """A plan in the words of an engine, written to a folder."""

    engine: str
    """Name and version."""
    plan: Plan
    """The plan that was written."""
    prediction: Prediction
    priced_as: str
    """Stack whose costs the prediction has."""
    changes: tuple[str, ...]
    """What the engine could not say, and what the plan has in its place."""
    folder: Path
    start: Path
    """What the user starts or submits."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the plan has in place of what the engine could not say."""
        return self.changes

    def lines(self) -> Iterator[RenderableType]:
        """Where the files are, what is predicted, and what to do next."""
        numbers = prediction_numbers(self.prediction, self.plan)
        step, peak = numbers["step_seconds"], numbers["peak_gib"]
        yield f"engine   {self.engine}, priced with the constants of `{self.priced_as}`"
        yield (
            f"step     {step['predicted']:.3g} s (80 %: {step['low']:.3g} to {step['high']:.3g}), "
            f"{numbers['tokens_per_second_per_device']:.0f} tokens/s/GPU, MFU "
            f"{100 * numbers['mfu']:.1f} %, peak {peak['predicted']:.1f} GiB; predicted"
        )
        yield f"written  {self.folder}: {TRANSLATION_FILE} says what became of each field"
        yield f"start    sh {self.start}"


def export(
    run: str | Path = "last",
    *overrides: str,
    to: str | Path | None = None,
    output: AnyPath | None = None,
    nearest: bool = False,
    on: str | None = None,
    masks: AnyPath | None = None,
    ema: bool = False,
    root: Path | str = RUNS,
    model: Callable[..., Any] | None = None,
    scheduler: Scheduler | None = None,
) -> ExportedFiles | EngineExport:
    """Writes the weights of a run for other software, or a plan for another engine.

    Args:
        run: folder, name, the first characters of its id, or `last`; for an engine also the TOML
            file of a plan.
        overrides: for an engine: `key=value` of what a plan file leaves open.
        to: a place for weights as `windlass export` has it, or `ENGINE` or `ENGINE@VERSION`.
        output: for an engine: the folder to write to.
        nearest: for an engine: where it cannot say the plan, write the nearest one that it can.
        on: for an engine: the machine, if it is another than the plan's.
        masks: the file of the masks of a sparse model.
        ema: write the averages of the weights that a run with `train.ema` keeps.
        root: the folder that holds the run folders.
        model: the model of a run that was given it as an object.
        scheduler: for an engine: what starts the hosts, for which a file is written too.

    Raises:
        RequestError: no file is named, no such engine, or the model was an object that is not given
            here.
        InputErrors: every field of a plan that the engine cannot say.
        RecordError: no such run, or one of its files has changed or is a link.
        CheckpointError: it has no complete checkpoint, no sparse layer for `masks`, or no averages
            for `ema`.
        ModelError: Hugging Face has no such model.
        StorageError: a file cannot be written.
    """
    if to is None or str(to).partition("@")[0] not in engine_versions():
        _require_weights_only(run, overrides, output, on, nearest=nearest)
        return export_weights(run, to=to, masks=masks, ema=ema, root=root, model=model)
    if masks is not None or ema or output is None:
        raise RequestError(
            f"`--to {to}` writes a plan for an engine: name its folder by `-o DIR`"
            if output is None else f"`--to {to}` writes no weights; leave `--masks` and `--ema` out"
        )  # fmt: skip
    engine = load_engine(str(to))
    planned = _planned(run, overrides, on, Path(root))
    handover = hand_over(planned, engine, nearest=nearest)
    return _write(handover, planned, Path(output), scheduler)


def _require_weights_only(
    run: str | Path, overrides: tuple[str, ...], output: AnyPath | None, on: str | None, *,
    nearest: bool,
) -> None:  # fmt: skip
    given = {"-o": output is not None, "--on": on is not None, "--nearest": nearest}
    named = [f"`{name}`" for name, is_given in given.items() if is_given]
    named += [f"`{each}`" for each in overrides]
    if named or Path(run).suffix == ".toml":
        raise RequestError(
            f"{' and '.join(named) or f'`{run}`'} is for the plan of an engine; name it by `--to "
            f"ENGINE`, one of {', '.join(engine_versions())}"
        )


def _planned(
    run: str | Path, overrides: tuple[str, ...], on: str | None, root: Path
) -> Planned:  # fmt: skip
    """The plan of a file or of a run."""
    path = Path(run)
    if path.suffix == ".toml":
        return plan_model(None, *overrides, machine=on, plan=path)
    record = load(run, root=root)
    if overrides or on is not None:
        return plan_model(None, *overrides, machine=on, plan=record.folder / PLAN_FILE)
    return planned_from_record(record)


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
            # How other software computes experts is known for no stack: only what it can is.
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


def prediction_numbers(prediction: Prediction, plan: Plan) -> dict[str, Any]:
    """What is predicted of a step, with 80 % intervals, as `prediction.json` has it."""
    peak, devices = prediction.peaks[0], plan.parallel.devices
    gib = {"predicted": peak.peak_bytes, "low": peak.low_bytes, "high": peak.high_bytes}
    speed = prediction.tokens_per_step / devices
    return {
        "step_seconds": {
            "predicted": prediction.step_seconds,
            "low": prediction.low_seconds, "high": prediction.high_seconds,
        },
        "tokens_per_second_per_device": speed / prediction.step_seconds,
        "mfu": prediction.mfu,
        "peak_gib": {name: size / 2**30 for name, size in gib.items()},
    }  # fmt: skip


def _write(
    handover: Handover, planned: Planned, folder: Path, scheduler: Scheduler | None
) -> EngineExport:
    """Writes the configuration, the plan, what is predicted, and what starts it."""
    engine, plan = handover.translation.engine, handover.plan
    machine, devices = planned.machine, plan.parallel.devices
    per_node = min(machine.devices_per_host, devices)
    arguments = next((name for name in engine.files if name.endswith(".args")), None)
    job = ClusterJob(
        parallelism=plan.parallel, folder=folder.absolute(), run_id=plan.label,
        nodes=-(-devices // per_node), per_node=per_node, device_kind=machine.device.kind,
        command=f"{engine.starter}\n{engine.place}\n{engine.command}", arguments=arguments,
    )  # fmt: skip
    scripts = launch_texts(job, scheduler)
    numbers = prediction_numbers(handover.prediction, plan)
    stages = [nbytes / 2**30 for nbytes in handover.peaks]
    prediction = {
        "all_numbers_are": "predicted, not measured; intervals hold 80 %", "engine": engine.label,
        "plan": plan.label, "machine": machine.name, "priced_as": handover.priced_as, **numbers,
        "peak_gib_by_pipeline_stage": stages,
    }  # fmt: skip
    texts = {
        **handover.translation.files, **scripts,
        PREDICTION_FILE: json.dumps(prediction, indent=2) + "\n",
        TRANSLATION_FILE: _page(handover, numbers),
    }  # fmt: skip
    if engine.logs_by_callback:
        texts["windlass_log.py"] = callback_text()
    with storage_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    plan.save(folder / PLAN_FILE)
    for name, text in texts.items():
        atomic_write(folder / name, text)
    if engine.model == "folder":
        _write_model(folder / "model", plan.model)
    return EngineExport(
        engine=engine.label, plan=plan, prediction=handover.prediction,
        priced_as=handover.priced_as, changes=handover.changes, folder=folder,
        start=folder / [*scripts][-1],
    )  # fmt: skip


def _write_model(folder: Path, model: ModelIdentity | None) -> None:
    """Writes the `config.json` of a model, from which engines make it without weights."""
    from windlass.models import config_content

    _, content = config_content(exported_config(model or ModelIdentity()))
    with storage_errors(folder):
        folder.mkdir(exist_ok=True)
    atomic_write(folder / "config.json", json.dumps(content, indent=2) + "\n")


def _page(handover: Handover, numbers: dict[str, Any]) -> str:
    """The page that says what became of each field."""
    engine, step = handover.translation.engine, numbers["step_seconds"]
    rows = "".join(
        f"| `{name}` | {value} | {became} | {note} |\n"
        for name, value, became, note in handover.translation.rows
    )
    changes = "".join(f"- {each}\n" for each in handover.changes)
    unknown = "".join(f"- {each}\n" for each in engine.unknown)
    way = (
        "its own parser, in Windlass's tests" if engine.checked == "parser"
        else "the recorded fields of its configuration, not by its own parser"
    )  # fmt: skip
    changed = f"## What the engine could not say\n\n{changes}\n" if changes else ""
    return f"""# This plan for {engine.label}

Predicted, not measured: {step["predicted"]:.3g} s a step (80 %: {step["low"]:.3g} to
{step["high"]:.3g} s), peak {numbers["peak_gib"]["predicted"]:.1f} GiB a device, with the constants
of the stack `{handover.priced_as}`. Configurations of this form are checked by {way}.

{changed}## What became of each field

| plan | value | {engine.name} | |
|---|---|---|---|
{rows}
## What Windlass does not know about {engine.name}

{unknown}
Keys were read in: {engine.source}.
"""
