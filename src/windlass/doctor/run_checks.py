"""Checks of whole runs: the measurement of rates, plans beside one device, steps as predicted."""

import re
from functools import partial

from windlass.atomic_files import cache_folder
from windlass.doctor.findings import (
    Check,
    Finding,
    NotAvailableError,
    WorkerTask,
    WrongResultError,
)
from windlass.doctor.recording_checks import recorded_run, require_recording
from windlass.hardware import (
    accelerator_names,
    device_names,
    load_local_machine,
    load_machine,
)
from windlass.jobs import EVERY_PART, HERE, Progress, find_machine, plan, probe
from windlass.judging import judge
from windlass.schema import Machine
from windlass.units import format_bytes, format_flop_rate, format_rate, format_seconds
from windlass.verify import RUN_FOLDER, Verifier, measure_plan, run_isolated, verification

_SPEED_CHECK = "windlass.hardware.probe.speed_check"
_DRIFT = 1.25
"""Times by which the machine's speed may differ from that of its kept measurement."""
_LEAST_OF_PEAK = 0.5
"""Share of the published peak of an accelerator below which its products count as slow."""
TINY = (
    "model.layers=4", "model.width=32", "model.heads=2", "model.vocabulary=257",
    "data.tokenizer=byte", "train.sequence=32", "train.batch=8", "batch.micro=2",
)  # fmt: skip
"""A model of tied embeddings and four blocks, in four micro-batches."""
_STEPS = 2
"""Steps of a compared run: it stops after the first, and goes on from its checkpoint."""
_PLANS: dict[str, tuple[int, tuple[str, ...]]] = {
    "phases, weights on disk": (1, ("phases=3",)),
    "optimizer on disk": (1, ("phases=1", "offload.optimizer=disk")),
    "full recompute": (1, ("recompute=full",)),
    "pipeline, gpipe": (2, ("parallel.pipeline=2", "parallel.schedule=gpipe")),
    "pipeline, 1f1b": (2, ("parallel.pipeline=2", "parallel.schedule=1f1b")),
    "pipeline, interleaved": (
        2, ("parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.virtual_stages=2"),
    ),
    "pipeline, zero-bubble": (2, ("parallel.pipeline=2", "parallel.schedule=zero-bubble")),
    "tensor parallel": (2, ("parallel.tensor=2",)),
    "data parallel, all sharded": (
        2, ("parallel.data=2", "sharding.parameters=2", "sharding.optimizer=2"),
    ),
    "pipeline of tensor-parallel stages": (4, ("parallel.pipeline=2", "parallel.tensor=2")),
    "pipeline of four stages": (4, ("parallel.pipeline=4", "parallel.schedule=1f1b")),
}  # fmt: skip
"""Kinds of plans: how many devices they take, and what pins them."""
_AXES = ("pipeline", "tensor", "data")
ONE_PLAN = (
    *(f"parallel.{axis}=1" for axis in _AXES),
    "compile=false", "recompute=none", "loss=plain", "attention=flash", "phases=1",
)  # fmt: skip
"""Pins that leave nothing open which could change a bit."""
_TRAINED_STEPS = 20
_CPU_MODEL, _ACCELERATOR_MODEL = ("gpt-tiny",), ("gpt2-124m", "train.batch=4")
"""What is trained beside its prediction, on a CPU and on an accelerator."""


def machine_checks(_: WorkerTask, progress: Progress) -> tuple[Check, ...]:
    """The measurement of this machine's rates."""
    way_out = "see that the cache folder can be written and has 1 GiB free, and run it again"
    return (Check("rates of this machine", partial(_rates, progress), way_out),)


def plan_checks(task: WorkerTask, _: Progress) -> tuple[Check, ...]:
    """Kinds of plans beside a plain run on one device; each first proved free of deadlock."""
    way_out = "report it with this file; until then `windlass check` tells which plans are right"
    recorded = partial(recorded_run, task, ("gpt-tiny", *TINY, *ONE_PLAN, *_numerics(task)))
    return (
        *(Check(name, partial(_plan_beside_one_device, task, name), way_out) for name in _PLANS),
        Check("recorded steps", recorded, "leave `step_graph` out; report it with this file"),
    )


def step_checks(task: WorkerTask, progress: Progress) -> tuple[Check, ...]:
    """Steps of a small model, as the usual command trains it, beside their prediction."""
    model = _CPU_MODEL if task.device == "cpu" else _ACCELERATOR_MODEL
    way_out = "train with `windlass train` and ask `windlass judge` for more; report it"
    recorded = (*model, "step_graph=true", *(f"parallel.{axis}=1" for axis in _AXES))
    return (
        Check(model[0], partial(_steps, task, model, progress), way_out),
        Check(f"{model[0]}, recorded", partial(_recorded_steps, task, recorded, progress), way_out),
    )


def _rates(progress: Progress) -> Finding:
    """The kept measurement, if this machine is as fast as it was then; else a new one."""
    machine = load_local_machine(cache_folder())
    text = "measured now"
    if machine is not None and not machine.is_contended and machine.speed_check_seconds:
        drift = float(run_isolated(_SPEED_CHECK)) / machine.speed_check_seconds
        text = f"measured on {machine.date}, and the speed check takes {drift:.2f} x as long today"
        if not 1 / _DRIFT < drift < _DRIFT:
            machine = None
    if machine is None or machine.is_contended:
        machine, text = probe(progress=progress), "measured now"
    else:  # what no plan needed yet
        machine = find_machine(HERE, progress=progress, needs=EVERY_PART)
    rates = [
        f"{rate.precision} products at {format_flop_rate(rate.peak)}"
        for rate in machine.device.matmul
    ]
    disk = machine.device.tiers[-1]
    if disk.read:
        rates.append(f"{disk.name} read at {format_rate(disk.read)}")
    return Finding(f"{text}; {', '.join(rates)}", slow=_slow_machine(machine))


def _slow_machine(machine: Machine) -> str | None:
    """Why a machine is slower than expected and what to do; None if it is not."""
    if machine.is_contended:
        return (
            f"other processes took {machine.contention:.0%} of the cores' time: end them, and run "
            "`windlass probe`"
        )
    for name in accelerator_names()[:1]:
        published = published_device(name)
        if published is None:
            continue
        half = published.device.half_precision
        if not machine.device.computes_in(half):
            continue
        peak, own = (each.device.rate(half).peak for each in (published, machine))
        if own < _LEAST_OF_PEAK * peak:
            return (
                f"{format_flop_rate(own)} in {half} where {format_flop_rate(peak)} are published "
                f"for `{published.name}`: see power and clocks (`nvidia-smi -q -d PERFORMANCE`) "
                "and other processes"
            )
    return None


def published_device(model: str) -> Machine | None:
    """The device of the catalogue with most words in an accelerator's model; None if none has.

    Args:
        model: the driver's words, such as `NVIDIA H100 80GB HBM3`.
    """
    words = set(re.findall(r"[a-z0-9]+", model.lower()))
    fitting = [name for name in device_names() if set(name.split("-")) <= words]
    return load_machine(max(fitting, key=len)) if fitting else None


def _plan_beside_one_device(task: WorkerTask, name: str) -> Finding:
    needed, pins = _PLANS[name]
    if task.devices < needed:
        raise NotAvailableError(f"it needs {needed} devices")
    on_cpu = task.device == "cpu"
    keep = frozenset[str]() if on_cpu else frozenset({"precision"})
    single = (f"parallel.{axis}=1" for axis in _AXES if f"parallel.{axis}" not in "".join(pins))
    planned = verification(
        plan("gpt-tiny", *TINY, *single, *pins, *_numerics(task)), steps=_STEPS, keep=keep
    )
    folder = task.folder / re.sub(r"[^a-z0-9]+", "-", name)
    folder.mkdir()
    result = Verifier(planned, folder).verify()
    if (mismatch := result.first_mismatch) is not None:
        layer = f" of layer {mismatch.layer}" if mismatch.layer is not None else ""
        raise WrongResultError(
            f"step {mismatch.step}: the {mismatch.quantity}{layer} differs by {mismatch.error:.1e}"
        )
    worst = max(each.error for each in result.comparisons)
    count = sum(each.count for each in result.comparisons)
    return Finding(f"equal to one device: {count} values, {_STEPS} steps, error {worst:.1e}")


def _numerics(task: WorkerTask) -> tuple[str, ...]:
    """A GPU sums in one order only if told so, and is predicted for measured precisions only."""
    return () if task.device == "cpu" else ("precision=float32", "deterministic=true")


def _recorded_steps(task: WorkerTask, model: tuple[str, ...], progress: Progress) -> Finding:
    require_recording(task.computes_on())
    return _steps(task, model, progress)


def _steps(task: WorkerTask, model: tuple[str, ...], progress: Progress) -> Finding:
    progress(f"planning {model[0]}", 0, None)
    planned = plan(*model, progress=progress)
    progress(f"training {model[0]}", 0, None)
    folder = task.folder / ("recorded-steps" if planned.plan.step_graph else "steps")
    folder.mkdir()
    run = measure_plan(planned, folder, least_steps=_TRAINED_STEPS)
    verdict = judge(folder / RUN_FOLDER, root=folder)
    text = (
        f"{format_seconds(run.measured_seconds)} a step, predicted "
        f"{format_seconds(run.predicted_seconds)} ({format_seconds(run.low_seconds)} to "
        f"{format_seconds(run.high_seconds)}); {format_bytes(run.measured_bytes)} at the peak, "
        f"predicted {format_bytes(run.predicted_bytes)}"
    )
    if verdict.level == "broken":
        raise WrongResultError(f"{verdict.sentences[0]}; {text}")
    is_slow = verdict.level == "slow" or run.measured_seconds > run.high_seconds * max(1, run.drift)
    return Finding(
        f"{text}; {verdict.sentences[0]}" if verdict.is_alarm else text,
        slow="end other processes, and run `windlass probe`" if is_slow else None,
        measurement=run,
    )
