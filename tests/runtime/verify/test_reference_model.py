"""The reference step compared with torch on the full model, and runs compared with it."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from windlass.data.batches import Batches
from windlass.errors import CheckpointError, ModelError
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import checkpoint_folders, layer_file
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.runtime.verify.compare_to_reference import compare_to_reference
from windlass.runtime.verify.reference_model import ReferenceStep, reference_step
from windlass.schema.answers.largest_model import ReferenceComparison
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.run_record import Step
from windlass.schema.train_request import TrainSettings

SEQUENCE = 16
BATCH = Batch(sequence=SEQUENCE, micro=2, accumulation=2)
OFFLOADED = Offload(parameters="disk", gradients="disk", optimizer="disk")
ROUNDING = 2e-5
"""Relative, of float32 sums in another order."""

Trained = tuple[LayerStack, Step, Path, TrainSettings]


@pytest.fixture
def trained(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
) -> Callable[..., Trained]:
    """Trains, and gives the last step and its checkpoint."""

    def run(
        *,
        phases: tuple[tuple[int, int], ...],
        precision: str = "float32",
        moments: str = "float32",
        steps: int = 1,
    ) -> Trained:
        stack = gpt(device="meta")
        graph = graph_of()
        plan = Plan(
            graph=graph.label, machine="here@000000000000", precision=precision, batch=BATCH,
            offload=OFFLOADED if len(phases) > 1 else Offload(), moments=moments,
            stages=(Stage(phases=phases),),
        )  # fmt: skip
        request = settings(steps=steps, clip=0.1, evaluate_sequences=0)
        folder = tmp_path / "checkpoints"
        program = lower(plan, graph)[0]
        context = RankContext(
            plan=plan, stack=stack, program=program, settings=request, checkpoints=folder
        )
        done = list(train_loop(context, batches()))
        return stack, done[-1], checkpoint_folders(folder)[-1], request

    return run


def reference(stack: LayerStack, batches: Callable[..., Batches], precision: str) -> ReferenceStep:
    return reference_step(stack, batches(), seed=0, precision=precision, batch=BATCH)


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_the_reference_step_equals_torch_on_the_full_model(
    gpt: Callable[..., LayerStack], batches: Callable[..., Batches], name: str
):
    keys = {"kv_heads": 2} if name == "llama-tiny" else {}
    full = gpt(name, device="cpu", seed=0, **keys)
    tokens, targets = (torch.as_tensor(part) for part in batches().samples(1, 0, 4))
    logits = nn.Sequential(*full.layers)(tokens)
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    gradients = {
        f"{layer}.{inner}": parameter.grad
        for layer, module in zip(full.names, full.layers, strict=True)
        for inner, parameter in module.named_parameters()
        if f"{layer}.{inner}" not in full.tied_weights
    }
    step = reference(gpt(name, device="meta", **keys), batches, "float32")
    assert step.loss == pytest.approx(loss.item(), rel=ROUNDING)
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradients.values()))
    assert step.gradient_norm == pytest.approx(norm, rel=ROUNDING)
    assert {name.split(".")[0] for name in step.gradients} == {full.names[0], full.names[-1]}
    for name_, gradient in step.gradients.items():
        error = torch.linalg.vector_norm(gradient - gradients[name_])
        assert error <= ROUNDING * torch.linalg.vector_norm(gradients[name_]), name_


def test_a_layer_with_dropout_is_refused(
    gpt: Callable[..., LayerStack], batches: Callable[..., Batches]
):
    with pytest.raises(ModelError, match=r"has dropout 0.1.*`model.dropout=0`"):
        reference(gpt(device="meta", dropout=0.1), batches, "float32")


@pytest.mark.parametrize(
    ("precision", "moments"),
    [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("float32", "int8")],
)
@pytest.mark.parametrize("phases", [((0, 5),), ((0, 2), (2, 5))], ids=["in memory", "in phases"])
def test_a_step_equals_the_reference_in_loss_norm_and_first_and_last_gradients(
    trained: Callable[..., Trained],
    batches: Callable[..., Batches],
    precision: str,
    moments: str,
    phases: tuple[tuple[int, int], ...],
):
    stack, step, checkpoint, request = trained(phases=phases, precision=precision, moments=moments)
    assert step.gradient_norm > 0.1, "it clips, so that the divisor counts"
    wanted = reference(stack, batches, precision)
    verified = compare_to_reference(
        wanted, checkpoint, stack, step, request, precision=precision, moments=moments
    )
    assert verified.within_tolerance, verified
    assert len(verified.comparisons) == 4


@pytest.fixture
def compare_spoiled(trained: Callable[..., Trained], batches: Callable[..., Batches]):
    """One layer's first moments times a factor, in the checkpoint of a step in phases."""

    def spoil(layer: int, factor: float) -> ReferenceComparison:
        stack, step, checkpoint, request = trained(phases=((0, 2), (2, 5)))
        file = checkpoint / layer_file(layer)
        tensors = {
            name: tensor * factor if name.startswith("moment1/") else tensor
            for name, tensor in load_file(file).items()
        }
        file.unlink()
        save_file(tensors, file)
        wanted = reference(stack, batches, "float32")
        return compare_to_reference(wanted, checkpoint, stack, step, request, precision="float32")

    return spoil


@pytest.mark.parametrize(("layer", "place"), [(0, 2), (4, 3)])
def test_a_changed_moment_is_reported_with_its_layer(
    compare_spoiled: Callable[..., ReferenceComparison], layer: int, place: int
):
    verified = compare_spoiled(layer, 1.1)
    assert not verified.within_tolerance
    assert [each.within_tolerance for each in verified.comparisons].index(False) == place
    assert verified.comparisons[place].error == pytest.approx(0.1, rel=1e-3)
    assert sum(not each.within_tolerance for each in verified.comparisons) == 1


def test_a_moment_of_nan_is_not_within_tolerance(
    compare_spoiled: Callable[..., ReferenceComparison],
):
    assert not compare_spoiled(0, float("nan")).within_tolerance


def test_no_gradient_is_recovered_after_several_updates(
    trained: Callable[..., Trained], batches: Callable[..., Batches]
):
    stack, step, checkpoint, request = trained(phases=((0, 5),), steps=2)
    wanted = reference(stack, batches, "float32")
    with pytest.raises(CheckpointError, match="after 2 updates"):
        compare_to_reference(wanted, checkpoint, stack, step, request, precision="float32")
