"""Makes run folders as training leaves them, with invented but plausible numbers."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from windlass.document import Document
from windlass.schema import run_record as files
from windlass.schema.graph import Graph, LayerKind, LayerRun, ParameterInfo
from windlass.schema.machine import Device, Machine, Tier
from windlass.schema.machine.rates import Curve, MatmulRate, Point
from windlass.schema.plan import Batch, Parallelism, Plan, Stage
from windlass.schema.prediction import (
    DeviceTimeline,
    OffloadTraffic,
    Prediction,
    TierPeak,
    Timeline,
)
from windlass.schema.request import Request
from windlass.schema.run_record import Environment, RunState, Step
from windlass.tracking import RunRecord, create_run_folder, load_run

LAYERS, MICRO_BATCHES = 8, 4
SECONDS = {
    "load_batch": 0.001,
    "forward": 0.004,
    "recompute": 0.004,
    "backward": 0.009,
    "update": 0.003,
}


def graph() -> Graph:
    table = ParameterInfo(name="tokens.weight", shape=(4096, 256))
    matrix = ParameterInfo(name="mix.weight", shape=(256, 256 * 12))
    kinds = {
        "embedding": LayerKind(name="embedding", parameters=(table,), costs=()),
        "block": LayerKind(name="block", parameters=(matrix,), costs=()),
        "head": LayerKind(name="head", parameters=(), costs=()),
    }
    chain = (
        LayerRun(kind="embedding", count=1),
        LayerRun(kind="block", count=LAYERS - 2),
        LayerRun(kind="head", count=1),
    )
    return Graph(name="gpt-tiny", vocabulary=4096, layer_runs=chain, kinds=kinds)


def machine() -> Machine:
    curve = Curve(points=(Point(1e6, 2e10), Point(1e9, 2e11), Point(1e12, 4e11)))
    rate = MatmulRate(precision="bfloat16", peak=4.1e11, curve=curve, attention=curve)
    tiers = (
        Tier(name="device", capacity_bytes=22 * 2**30),
        Tier(name="disk", capacity_bytes=64 * 2**30, read=1.2e9, write=8e8),
    )
    device = Device(
        kind="cpu", matmul=(rate,), traffic=curve, launch_seconds=8e-6, update_rate=1.1e10,
        runtime_bytes=300 * 2**20, tiers=tiers,
    )  # fmt: skip
    return Machine(
        name="here", device=device, source="measured here", date="2026-11-20", noise=0.031
    )


def plan() -> Plan:
    return Plan(
        graph=graph().label, machine=machine().label, precision="bfloat16", compile=True,
        batch=Batch(sequence=256, micro=4, accumulation=MICRO_BATCHES),
        stages=(Stage(phases=((0, LAYERS),), recompute="full"),),
    )  # fmt: skip


def instructions() -> Iterator[tuple[str, int | None, int | None]]:
    for micro in range(MICRO_BATCHES):
        yield "load_batch", None, micro
        for layer in range(LAYERS):
            yield "forward", layer, micro
        for layer in reversed(range(LAYERS)):
            if 0 < layer < LAYERS - 1:
                yield "recompute", layer, micro
            yield "backward", layer, micro
    yield "grad_norm", None, None
    for layer in range(LAYERS):
        yield "update", layer, None
    yield "sync", None, None


def timeline(*, predicted: bool, seed: int = 0) -> Timeline:
    noise = random.Random(seed)
    clock, memory = 0.0, 420 * 2.0**20
    kinds, layers, micros, starts, ends, held = [], [], [], [], [], []
    for kind, layer, micro in instructions():
        heavy = 3.0 if layer == LAYERS - 1 and kind != "update" else 1.0
        spent = heavy * SECONDS.get(kind, 0.0004) * (1 if predicted else noise.gauss(1.06, 0.08))
        grows = {"forward": 6, "backward": -6, "load_batch": 0}.get(kind, 0) * 2**20
        memory += grows
        kinds.append(kind)
        layers.append(layer)
        micros.append(micro)
        starts.append(clock + (0 if predicted else 4e-5))
        clock += spent + (0 if predicted else 4e-5)
        ends.append(clock)
        held.append(memory + (heavy * 20 * 2**20 if kind in ("forward", "backward") else 0))
    lane = DeviceTimeline(
        device=0, kinds=tuple(kinds), layers=tuple(layers), micro_batches=tuple(micros),
        starts=tuple(starts), ends=tuple(ends), memory_bytes=tuple(held) if predicted else (),
    )  # fmt: skip
    return Timeline(predicted=predicted, devices=(lane,))


def prediction() -> Prediction:
    lane = timeline(predicted=True).devices[0]
    by_kind: dict[str, float] = {}
    for kind, start, end in zip(lane.kinds, lane.starts, lane.ends, strict=True):
        by_kind[kind] = by_kind.get(kind, 0.0) + end - start
    step = sum(by_kind.values())
    peak = TierPeak(
        tier="device", capacity_bytes=22 * 2**30, peak_bytes=round(max(lane.memory_bytes)),
        by_class={
            "weights": 9 * 2**20, "gradients": 18 * 2**20, "optimizer": 54 * 2**20,
            "activations": 103 * 2**20, "working": 60 * 2**20, "runtime": 300 * 2**20,
        },
    )  # fmt: skip
    return Prediction(
        plan=plan().label, machine=machine().label, step_seconds=step, low_seconds=step * 0.93,
        high_seconds=step * 1.09, by_kind=by_kind, peaks=(peak,), tokens_per_step=4096,
        by_term={
            "matmul": step * 0.61, "attention": step * 0.11, "traffic": step * 0.19,
            "launch": step * 0.03, "update": step * 0.06,
        },
        model_flop=1.3e11, peak_flop_rate=4.1e11, compile_seconds=14.0,
    )  # fmt: skip


def with_offload(record: RunRecord) -> RunRecord:
    """The same run with offload: a step reads 2 GiB and writes 1 GiB, 1 % more than predicted."""
    traffic = OffloadTraffic(
        read_bytes=2 * 2**30, written_bytes=2**30, seconds=0.4, exposed_seconds=0.1
    )
    assert record.prediction is not None
    moved = {"read_bytes": round(2.02 * 2**30), "written_bytes": round(1.01 * 2**30)}
    steps = tuple(replace(step, **moved) for step in record.steps)
    return replace(
        record,
        prediction=record.prediction.model_copy(update={"offload": traffic}),
        steps=steps,
        current_plan_steps=steps,
    )


def on_busy_machine(record: RunRecord) -> RunRecord:
    """The same run in twice the time, for 38 % of which its threads waited for a core."""
    steps = tuple(replace(step, seconds=2 * step.seconds, contention=0.38) for step in record.steps)
    return replace(record, steps=steps, current_plan_steps=steps)


def on_two_stages(record: RunRecord) -> RunRecord:
    """The same run on two pipeline stages; the second waits a quarter of each step."""
    assert record.plan is not None
    stages = (Stage(phases=((0, 4),)), Stage(phases=((4, LAYERS),)))
    steps_by_rank = tuple(
        tuple(
            replace(
                step, seconds=0.4, by_kind={"forward": 0.4 - waits, "receive": waits},
                device_memory_bytes=(3 - rank) * 2**30,
            )
            for step in record.steps
        )
        for rank, waits in enumerate((0.0, 0.1))
    )  # fmt: skip
    parallel = Parallelism(pipeline=2)
    return replace(
        record,
        plan=record.plan.model_copy(update={"parallel": parallel, "stages": stages}),
        steps_by_rank=steps_by_rank,
    )


def environment() -> Environment:
    return Environment(
        windlass="0.1.0", commit="3f9c1e0a7b52d8e4", dirty=True, python="3.11.2",
        packages={"numpy": "2.3.4", "torch": "2.13.0", "tricky": "<1.0 & 2.0>"},
        system="Linux-6.1-x86_64", host="loft", processor="AMD EPYC 7B13", threads=2,
        command=("windlass", "train", "gpt-tiny"),
    )  # fmt: skip


def steps(count: int = 300, *, seed: int = 1) -> Iterator[Step]:
    noise = random.Random(seed)
    by_kind = prediction().by_kind
    for number in range(1, count + 1):
        slow = 1.06 * noise.lognormvariate(0, 0.025) * (1.6 if number % 97 == 0 else 1)
        loss = 2.1 + 6.2 * math.exp(-number / 38) + 1.4 * math.exp(-number / 260)
        held_out = loss + 0.12 if number % 50 == 0 or number == count else None
        yield Step(
            step=number, loss=loss + noise.gauss(0, 0.06), gradient_norm=1.1, learning_rate=1e-3,
            tokens=4096, seconds=sum(by_kind.values()) * slow + (9.0 if number == 1 else 0),
            memory_bytes=round(2**20 * (531 + 6 * min(1, number / 20))),
            by_kind={
                kind: seconds * slow * (1.15 if kind == "update" else 1)
                for kind, seconds in by_kind.items()
            },
            held_out_loss=held_out,
            held_out_bits_per_byte=held_out / math.log(2) / 3.4 if held_out else None,
            saved=f"step-{number}" if number % 100 == 0 else None,
        )  # fmt: skip


def make_record(
    root: Path,
    *,
    count: int = 300,
    state: RunState = "finished",
    without: tuple[str, ...] = (),
    broken_at: int | None = None,
    name: str = "gpt-tiny",
) -> RunRecord:
    """A run of `count` steps in a folder under `root`; `without` names files it lacks."""
    request = Request.model_validate({"model": {"name": name}, "train": {"steps": max(1, count)}})
    documents: dict[str, Document] = {
        files.REQUEST_FILE: request,
        files.PLAN_FILE: plan(),
        files.GRAPH_FILE: graph(),
        files.MACHINE_FILE: machine(),
        files.PREDICTION_FILE: prediction(),
        files.ENVIRONMENT_FILE: environment(),
        files.PREDICTED_TIMELINE_FILE: timeline(predicted=True),
        files.MEASURED_TIMELINE_FILE: timeline(predicted=False),
    }
    kept = {file: document for file, document in documents.items() if file not in without}
    meta = {
        "model": name, "machine": "here", "steps": count, "unigram_entropy": 6.31,
        "predicted_seconds": prediction().step_seconds,
    }  # fmt: skip
    run = create_run_folder(root, name, documents=kept, meta=meta)
    for step in steps(count):
        if step.step == broken_at:
            run.append_event(
                "alert", step=step.step, message=f"the loss is nan at step {step.step}"
            )
            break
        run.append_step(step)
    run.end(state, reason="the loss is nan" if broken_at else None)
    return load_run(run.path)
