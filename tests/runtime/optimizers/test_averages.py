"""Averages of weights: what evaluations read while training goes on with other weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from windlass.data.batches import Batches
from windlass.errors import CheckpointError
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import Checkpoint, Manifest, latest_checkpoint
from windlass.runtime.checkpoint.run_checkpoints import (
    evaluation_checkpoint,
    require_same_averages,
)
from windlass.runtime.inference.inference_model import InferenceModel
from windlass.runtime.optimizer_state.optimizer_state import StateFormat, averaging_of
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
AVERAGED: list[dict[str, object]] = [{"ema": 0.5}, {"optimizer": "schedule-free"}]
ON_DISK = Offload(parameters="disk", gradients="disk", optimizer="disk")
PHASES = ((0, 2), (2, 4), (4, 5))
LOSS_DIGITS = 1e-6
"""Relative: a mean over sequences in float32, summed in another order."""
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
"""Float32 values of 50 sums in another order."""

Train = Callable[..., tuple[list[Step], Checkpoint]]


@pytest.fixture
def train(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    folder: Path,
) -> Train:
    """Trains a tiny model; returns its steps and its last checkpoint."""

    def go(
        name: str = "run",
        *,
        phases: tuple[tuple[int, int], ...] = ((0, 5),),
        offload: Offload | None = None,
        precision: str = "float32",
        until: int | None = None,
        resume: bool = False,
        **changes: object,
    ) -> tuple[list[Step], Checkpoint]:
        stack, graph = gpt(device="meta", dropout=0.1), graph_of(dropout=0.1)
        request = settings(**{"save_every": 1, "keep": 9} | changes)
        plan = Plan(
            graph=graph.label, machine="here@000000000000", precision=precision, ema=request.ema,
            optimizer=None if request.optimizer == "adamw" else request.optimizer,
            offload=offload or (ON_DISK if len(phases) > 1 else Offload()),
            batch=Batch(sequence=SEQUENCE, micro=4), stages=(Stage(phases=phases),),
        )  # fmt: skip
        context = RankContext(
            plan=plan, stack=stack, program=lower(plan, graph)[0], settings=request,
            checkpoints=folder / name,
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


def saved_tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(checkpoint.path.glob("*.safetensors")):
        tensors |= load_file(file)
    return {key: value for key, value in tensors.items() if not key.startswith("zeros/")}


def same(first: Checkpoint, second: Checkpoint) -> bool:
    """Whether two checkpoints hold the same bits."""
    one, two = saved_tensors(first), saved_tensors(second)
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def test_an_average_is_that_of_torch():
    settings = TrainSettings(steps=50, batch=4, sequence=16, learning_rate=0.02, ema=0.9)
    draws = torch.Generator().manual_seed(0)
    module = torch.nn.Linear(5, 3, bias=False)
    master = module.weight.detach().clone()
    state = StateFormat(optimizer_law(None), average=True)
    weight = new_master_parameter("w", master, master, state, decays=True)
    oracle = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    oracle.update_parameters(module)  # the average begins with the weights
    optimizer = Optimizer(settings, device_for("cpu"))
    for step in range(1, 51):
        weight.gradient = torch.randn(3, 5, generator=draws)
        optimizer.update([weight], step, None)
        with torch.no_grad():
            module.weight.copy_(weight.master)
        oracle.update_parameters(module)
    torch.testing.assert_close(weight.average, oracle.module.weight.detach(), **CLOSE)


@pytest.mark.parametrize("changes", AVERAGED)
@pytest.mark.parametrize(
    ("phases", "precision"),
    [
        (((0, 5),), "float32"),
        pytest.param(((0, 5),), "bfloat16", marks=pytest.mark.slow),
        pytest.param(PHASES, "float32", marks=pytest.mark.slow),
    ],
)
def test_evaluations_change_no_bit_of_a_run(
    train: Train, changes: dict[str, object], phases: tuple[tuple[int, int], ...], precision: str
):
    how = {"phases": phases, "precision": precision, **changes}
    seldom, end = train("seldom", **how)
    often, other_end = train("often", evaluate_every=1, **how)
    assert [step.loss for step in seldom] == [step.loss for step in often]
    assert same(end, other_end)
    assert seldom[-1].held_out_loss == often[-1].held_out_loss
    assert (often[-1].held_out_loss_ema is not None) == ("ema" in changes)


@pytest.mark.parametrize("changes", AVERAGED)
@pytest.mark.parametrize("phases", [((0, 5),), pytest.param(PHASES, marks=pytest.mark.slow)])
def test_a_run_with_averages_resumes_bit_for_bit(
    train: Train, changes: dict[str, object], phases: tuple[tuple[int, int], ...]
):
    whole, end = train("whole", phases=phases, **changes)
    train("stopped", phases=phases, until=1, **changes)
    resumed, other_end = train("stopped", phases=phases, resume=True, **changes)
    assert [step.loss for step in resumed] == [step.loss for step in whole[1:]]
    assert same(end, other_end)
    assert resumed[-1].held_out_loss_ema == whole[-1].held_out_loss_ema


@pytest.mark.parametrize("changes", AVERAGED)
@pytest.mark.parametrize(
    "offload", [ON_DISK, pytest.param(Offload(optimizer="disk"), marks=pytest.mark.slow)]
)
def test_averages_in_phases_are_those_in_memory(
    train: Train, changes: dict[str, object], offload: Offload
):
    phases = PHASES if offload == ON_DISK else ((0, 5),)
    steps, end = train("memory", **changes)
    streamed, other_end = train("streamed", phases=phases, offload=offload, **changes)
    assert same(end, other_end)
    for one, two in zip(steps, streamed, strict=True):
        assert (one.loss, one.held_out_loss) == (two.loss, two.held_out_loss)
        assert one.held_out_loss_ema == two.held_out_loss_ema


@pytest.mark.parametrize("changes", AVERAGED)
def test_the_evaluated_weights_of_a_checkpoint_have_the_loss_that_its_run_measured(
    train: Train,
    gpt: Callable[..., LayerStack],
    batches: Callable[..., Batches],
    changes: dict[str, object],
    tmp_path: Path,
):
    steps, checkpoint = train(**changes)
    averaged = evaluation_checkpoint(
        checkpoint, gpt(device="meta"), tmp_path / "merged", ema="ema" in changes
    )
    model = InferenceModel(gpt(device="meta"), averaged)
    losses = []
    for inputs, targets in batches().held_out_batches(6, 1):
        logits = model.logits(torch.from_numpy(inputs).long())
        expected = torch.from_numpy(targets).long().flatten()
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), expected))
    measured = steps[-1].held_out_loss_ema if "ema" in changes else steps[-1].held_out_loss
    assert float(torch.stack(losses).mean()) == pytest.approx(measured, rel=LOSS_DIGITS)
    assert {key.partition("/")[0] for key in saved_tensors(averaged)} <= {"weight", "buffer"}


def test_trained_and_evaluated_weights_of_schedule_free_differ(
    train: Train, tmp_path: Path, gpt: Callable[..., LayerStack]
):
    _, checkpoint = train(optimizer="schedule-free")
    averaged = evaluation_checkpoint(checkpoint, gpt(device="meta"), tmp_path / "merged")
    trained, evaluated = saved_tensors(checkpoint), saved_tensors(averaged)
    key = next(key for key in evaluated if key.endswith("weight"))
    leading = trained[key.replace("weight/", "moment1/", 1)]
    # y = 0.9 x + 0.1 z
    torch.testing.assert_close(trained[key], 0.9 * evaluated[key] + 0.1 * leading, **CLOSE)
    assert not torch.equal(trained[key], evaluated[key])


def test_averages_that_nobody_kept_cannot_be_had(
    train: Train, gpt: Callable[..., LayerStack], tmp_path: Path
):
    _, checkpoint = train()
    with pytest.raises(CheckpointError, match=r"train\.ema.*leave `--ema` out"):
        evaluation_checkpoint(checkpoint, gpt(device="meta"), tmp_path / "merged", ema=True)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("adamw", "schedule-free"), ("schedule-free", "lamb")]
)
def test_a_schedule_free_state_is_no_other_optimizers(theirs: str, ours: str, tmp_path: Path):
    sizes = {"steps": 1, "batch": 1, "sequence": 2}
    written, run = (averaging_of(TrainSettings(optimizer=name, **sizes)) for name in (theirs, ours))
    manifest = Manifest(step=1, samples=1, seed=0, plan="p", graph="g", files={}, averaging=written)
    with pytest.raises(CheckpointError, match=r"train on with the `train\.optimizer`"):
        require_same_averages(Checkpoint(path=tmp_path, manifest=manifest), run)
    require_same_averages(Checkpoint(path=tmp_path, manifest=manifest), written)
