"""Weights in bfloat16 without float32 masters, updated with stochastic rounding."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from windlass.data.batches import Batches
from windlass.models.layer_stack import LayerStack
from windlass.program.layer_mode_errors import master_weight_errors
from windlass.program.lowering.lower import lower
from windlass.program.memory.layer_sizes import layer_kind_state_sizes
from windlass.runtime.checkpoint.checkpoint import Checkpoint, latest_checkpoint
from windlass.runtime.optimizer_state.optimizer_state import StateFormat
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.parameters import new_master_parameter
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema import TrainSettings, optimizer_law
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.run_record import Step
from windlass.torch_ext import device_for

SEQUENCE = 16
ON_DISK = Offload(parameters="disk", gradients="disk", optimizer="disk")
PHASES = ((0, 2), (2, 4), (4, 5))
LEFT = 0.05
"""Share of the way that may be left: the noise of 2,000 roundings, each of a step in a hundred."""

Train = Callable[..., tuple[list[Step], Checkpoint]]


@pytest.fixture
def train(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
) -> Train:
    """Trains a tiny model in bfloat16 alone; returns its steps and its last checkpoint."""

    def go(
        name: str,
        *,
        phases: tuple[tuple[int, int], ...] = ((0, 5),),
        offload: Offload | None = None,
        moments: str = "float32",
        until: int | None = None,
        resume: bool = False,
        **changes: object,
    ) -> tuple[list[Step], Checkpoint]:
        stack, graph = gpt(device="meta", dropout=0.1), graph_of(dropout=0.1)
        plan = Plan(
            graph=graph.label, machine="here@000000000000", precision="bfloat16", moments=moments,
            master_weights=False, offload=offload or Offload(),
            batch=Batch(sequence=SEQUENCE, micro=2, accumulation=2),
            stages=(Stage(phases=phases),),
        )  # fmt: skip
        context = RankContext(
            plan=plan, stack=stack, program=lower(plan, graph)[0],
            settings=settings(save_every=1, keep=9, **changes), checkpoints=folder / name,
        )  # fmt: skip
        newest = latest_checkpoint(folder / name) if resume else None
        steps = []
        for step in train_loop(context, batches(), resume=newest):
            steps.append(step)
            if step.step == until:
                break
        checkpoint = latest_checkpoint(folder / name)
        assert checkpoint is not None
        return steps, checkpoint

    return go


def weights(checkpoint: Checkpoint) -> list[torch.Tensor]:
    """The weights of the first block."""
    tensors = load_file(checkpoint.path / "layer-0001.safetensors")
    return [tensors[key] for key in sorted(tensors) if key.startswith("weight/")]


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_bfloat16_weights_in_phases_are_those_in_memory_bit_for_bit(train: Train, moments: str):
    steps, end = train("memory", moments=moments)
    streamed, other = train("streamed", moments=moments, phases=PHASES, offload=ON_DISK)
    assert [step.loss for step in steps] == [step.loss for step in streamed]
    for one, two in zip(weights(end), weights(other), strict=True):
        assert one.dtype == torch.bfloat16
        assert torch.equal(one, two)


def test_a_run_of_bfloat16_weights_resumes_bit_for_bit(train: Train):
    whole, end = train("whole")
    train("stopped", until=1)
    resumed, other = train("stopped", resume=True)
    assert [step.loss for step in resumed] == [step.loss for step in whole[1:]]
    assert all(map(torch.equal, weights(end), weights(other)))


def test_small_steps_arrive_where_rounding_to_the_nearest_stalls():
    settings = TrainSettings(
        steps=2000, batch=1, sequence=2, optimizer="sgd", momentum=0.0, learning_rate=1e-5,
        schedule="constant", warmup=0, weight_decay=0, clip=None,
    )  # fmt: skip
    state = StateFormat(optimizer_law("sgd"), has_masters=False)
    start = torch.ones(4096, dtype=torch.bfloat16)
    weight = new_master_parameter("w", start.clone(), start, state, decays=False)
    weight.working = weight.master
    optimizer, nearest = Optimizer(settings, device_for("cpu")), start.clone()
    for step in range(1, settings.steps + 1):
        weight.gradient = torch.ones(4096)
        optimizer.update([weight], step, None)
        nearest = (nearest.float() - 1e-5).bfloat16()
    moved = 1 - float(weight.master.float().mean())
    assert moved == pytest.approx(settings.steps * 1e-5, rel=LEFT)
    assert torch.equal(nearest, start)


def test_weights_without_masters_take_two_bytes_beside_their_moments(
    graph_of: Callable[..., Graph],
):
    graph = graph_of()
    plan = Plan(
        graph=graph.label, machine="m", precision="bfloat16",
        batch=Batch(sequence=SEQUENCE, micro=1), stages=(Stage(phases=((0, 5),)),),
    )  # fmt: skip
    block = graph.kinds["block"]
    alone = layer_kind_state_sizes(plan.model_copy(update={"master_weights": False}), block)
    both = layer_kind_state_sizes(plan, block)
    assert alone.weights == both.weights == 2 * block.parameter_count
    assert alone.optimizer == 8 * block.parameter_count
    assert both.optimizer == 12 * block.parameter_count


@pytest.mark.parametrize(
    ("optimizer", "precision", "reason"),
    [
        ("adamw", "float32", "set `precision` = bfloat16"),
        ("adamw", None, "left open"),
        ("muon", "bfloat16", "set `train.optimizer` = adamw, lion or sgd"),
        ("schedule-free", "bfloat16", "set `train.optimizer` = adamw, lion or sgd"),
    ],
)
def test_what_cannot_be_rounded_is_refused(optimizer: str, precision: str | None, reason: str):
    (error,) = master_weight_errors(optimizer, precision)
    assert reason in error
    assert not list(master_weight_errors("lion", "bfloat16"))
