"""`export` hands a run's weights to other software, or a plan to the engine that will run it."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from windlass.answer import Answer
from windlass.api.engines.engine_handover import Handover, hand_over
from windlass.atomic_files import atomic_write, storage_errors
from windlass.distributed import ClusterJob, Scheduler, launch_texts
from windlass.engines import (
    callback_text,
    engine_versions,
    load_engine,
)
from windlass.errors import RequestError
from windlass.flags import AnyPath
from windlass.jobs import (
    RUNS,
    Planned,
    exported_config,
    load,
    plan as plan_model,
)
from windlass.schema import (
    PLAN_FILE,
    ModelIdentity,
    Plan,
    Prediction,
)
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
