"""Random requests: what is planned keeps its pins and passes the check that a run passes."""

import random
from collections.abc import Mapping

import pytest

from command_line import TINY
from windlass.errors import WindlassError
from windlass.jobs.planned import Planned, plan
from windlass.program import lower, memory_profile, plan_errors
from windlass.schema import Plan, TensorGrid
from windlass.training.preconditions import verified_programs

MODELS = ("gpt-tiny", "bert-tiny", "llama-tiny", "gpt2-124m", "gpt2-1.5b", "gpt3-1.3b")
MACHINES = (
    "a100-40gb", "h100", "gc200", "bow", "cs-2:1", "ipu-pod4", "ipu-pod16", "ipu-pod64", "cs-2:3",
    "bow-2000:3", "dgx-a100-40gb:1", "dgx-v100-32gb:1", "dgx-h100:3", "sn10-8:1", "sn30:1",
)  # fmt: skip
BATCHES = (1, 2, 3, 4, 7, 8, 12, 16, 24, 30, 32, 60, 64, 96, 100, 128, 256)
PINS: Mapping[str, tuple[str, ...]] = {
    "train.sequence": ("16", "64", "100", "128", "256", "512", "1000"),
    "train.steps": ("1", "100", "100000"),
    "parallel.pipeline": ("1", "2", "3", "4", "6", "8"),
    "parallel.tensor": ("1", "2", "3", "4", "8", "2x2", "4x2", "1x4", "1x16", "3x2"),
    "parallel.data": ("1", "2", "3", "4", "8", "16"),
    "parallel.schedule": ("gpipe", "1f1b", "interleaved", "zero-bubble"),
    "parallel.virtual_stages": ("1", "2", "3"),
    "sharding.parameters": ("1", "2", "4"),
    "sharding.optimizer": ("1", "2", "4", "8"),
    "offload.optimizer": ("device", "host", "streaming", "memoryx"),
    "batch.micro": ("1", "2", "3", "4", "8"),
    "batch.accumulation": ("1", "2", "3", "4", "8", "16"),
    "precision": ("float32", "bfloat16"),
    "moments": ("bfloat16", "int8"),
    "compile": ("true", "false"),
    "recompute": ("none", "selective", "full"),
    "recompute_layers": ("1", "2", "[1,0]"),
    "phases": ("1", "2", "3", "6"),
    "memory": ("256MiB", "512MiB", "800MiB", "2GiB", "6GiB", "16GiB", "30GiB"),
}
VERIFIED_DEVICES = 64
"""Devices up to which the whole program is verified, with its messages; beyond, its memory."""

CASES = (
    ("h100", {"parallel.pipeline": "2"}),
    ("h100", {"recompute": "full", "batch.accumulation": "2"}),
    ("cs-2:1", {"phases": "3", "moments": "int8"}),
    ("a100-40gb", {"offload.optimizer": "host"}),
    ("ipu-pod4", {"parallel.tensor": "1", "parallel.data": "2", "sharding.optimizer": "2"}),
)


def drawn(seed: int) -> tuple[str, str, dict[str, str]]:
    """A model, a machine, and up to four pins beside the batch."""
    chance = random.Random(seed)
    pins = {"train.batch": str(chance.choice(BATCHES))}
    for key in chance.sample(sorted(PINS), k=chance.randrange(5)):
        pins[key] = chance.choice(PINS[key])
    return chance.choice(MODELS), chance.choice(MACHINES), pins


def faults(
    model: str, machine: str, pins: Mapping[str, str], others: tuple[str, ...] = ()
) -> list[str]:
    """What is wrong with what is planned; nothing is wrong with a refusal."""
    overrides = (*others, *(f"{key}={value}" for key, value in pins.items()))
    try:
        planned = plan(model, *overrides, machine=machine)
    except WindlassError:
        return []
    if planned.result.plan is None:
        assert planned.result.advice is not None
        return []
    values = kept(planned.plan).items()
    found = [f"{key} is {value}" for key, value in values if pins.get(key, value) != value]
    found += [] if planned.prediction.fits else ["predicted not to fit"]
    try:
        admitted(planned, planned.plan)
        for runner in planned.result.runners_up:
            require_memory(planned, runner.plan)
    except WindlassError as error:
        found.append(str(error))
    return found


def kept(chosen: Plan) -> dict[str, str]:
    """A plan's values of the keys that a request may pin."""
    parallel, batch, sharding = chosen.parallel, chosen.batch, chosen.sharding
    values: dict[str, object] = {
        "train.batch": chosen.global_batch, "train.sequence": batch.sequence,
        "parallel.pipeline": parallel.pipeline, "parallel.tensor": parallel.tensor,
        "parallel.data": parallel.data, "parallel.schedule": parallel.schedule,
        "parallel.virtual_stages": parallel.virtual_stages,
        "sharding.parameters": sharding.parameters, "sharding.optimizer": sharding.optimizer,
        "offload.optimizer": chosen.offload.optimizer, "batch.micro": batch.micro,
        "batch.accumulation": batch.accumulation, "precision": chosen.precision,
        "moments": chosen.moments, "compile": str(chosen.compile).lower(),
        "recompute": chosen.recompute,
        "phases": max(len(stage.phases) for stage in chosen.stages),
    }  # fmt: skip
    if values["phases"] != 1:  # all layers but those of the last phase are recomputed
        del values["recompute"]
    return {key: str(value) for key, value in values.items()}


def admitted(planned: Planned, chosen: Plan) -> None:
    """Refuses a plan as a run does before it starts."""
    if chosen.parallel.devices <= VERIFIED_DEVICES:
        verified_programs(planned)
        return
    batch = planned.request.train.batch
    assert not plan_errors(chosen, planned.graph, planned.machine, global_batch=batch)
    require_memory(planned, chosen)


def require_memory(planned: Planned, chosen: Plan) -> None:
    """Refuses a plan one of whose full programs needs more device memory than there is."""
    device = planned.machine.device
    budget = planned.request.memory or device.memory.capacity_bytes
    room = budget - device.process_bytes(compiled=chosen.compile)
    ranks = chosen.parallel.tensor * chosen.parallel.data
    for program in lower(chosen, planned.graph)[::ranks]:
        over = memory_profile(program, chosen, planned.graph).peak_bytes - room
        if over > 0:
            raise WindlassError(f"{over} bytes too much: {chosen}")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("machine", "pins"), CASES)
def test_a_plan_keeps_its_pins_and_is_admitted_or_the_request_is_refused(
    machine: str, pins: dict[str, str]
):
    name, *tiny = TINY
    assert faults(name, machine, pins, tuple(tiny)) == []


@pytest.mark.slow
def test_three_hundred_random_requests_are_planned_as_asked_or_refused():
    wrong = {seed: found for seed in range(300) if (found := faults(*drawn(seed)))}
    assert wrong == {}


@pytest.mark.slow
def test_a_model_of_25_heads_fits_on_a_pod_in_a_grid_that_is_not_the_quickest():
    planned = plan("gpt2-1.5b", "train.batch=256", machine="ipu-pod16")
    assert planned.plan.parallel.tensor == TensorGrid(1, 16)
