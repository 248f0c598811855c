"""The laws of training on a device, which a GPU must keep as a CPU does."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from factories import catalog_graph, write_documents
from windlass.data.batches import Batches
from windlass.data.dataset_cache import prepare_dataset
from windlass.data.token_files import TokenDataset
from windlass.models.build import build_layer_stack
from windlass.program.lowering.lower import lower
from windlass.runtime.checkpoint.checkpoint import checkpoint_folders, latest_checkpoint
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.answers.verification import TOLERANCE
from windlass.schema.data_request import DataRequest
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.train_request import TrainSettings
from windlass.torch_ext import Device, device_for

SEQUENCE, BATCH, STEPS = 16, 4, 3
RESIDENT = ((0, 5),)
PHASES = ((0, 1), (1, 3), (3, 5))
"""Embedding, three blocks and head, together and in three phases."""
ON = {tier: Offload(parameters=tier, gradients=tier, optimizer=tier) for tier in ("host", "disk")}
Weights = Mapping[str, torch.Tensor]
Run = Callable[..., tuple[list[float], Weights]]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """A few small documents as bytes."""
    source = tmp_path_factory.mktemp("text")
    write_documents(source)
    data = DataRequest(source=str(source), tokenizer="byte", held_out=0.2)
    return prepare_dataset(data, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture
def run(tokens: TokenDataset, tmp_path: Path) -> Run:
    """Trains a tiny GPT; returns its losses and all tensors of its last checkpoint."""

    batches = Batches(tokens, sequence=SEQUENCE, batch=BATCH, seed=3)

    def train(
        device: Device,
        *,
        name: str = "run",
        steps: int = STEPS,
        until: int | None = None,
        **plan_fields: object,
    ) -> tuple[list[float], Weights]:
        dials = {
            "layers": 3, "width": 32, "heads": 4, "sequence": SEQUENCE, "dropout": 0.1,
            "vocabulary": tokens.vocabulary,
        }  # fmt: skip
        graph = catalog_graph("gpt-tiny", **dials)
        fields = {"stages": (Stage(phases=RESIDENT),), "precision": "float32"} | plan_fields
        plan = Plan(
            graph=graph.label,
            machine="here@000000000000",
            batch=Batch(sequence=SEQUENCE, micro=BATCH // 2, accumulation=2),
            deterministic=True if device.is_asynchronous else None,
            **fields,
        )
        settings = TrainSettings(
            steps=steps, batch=BATCH, sequence=SEQUENCE, learning_rate=1e-2, warmup=0.4, clip=0.5,
            epsilon=1e-4, save_every=1, keep=STEPS, evaluate_every=1000, evaluate_sequences=6,
        )  # fmt: skip
        folder = tmp_path / name / "checkpoints"
        folder.parent.mkdir(exist_ok=True)
        context = RankContext(
            plan=plan,
            stack=build_layer_stack("gpt-tiny", dials, device="meta", seed=settings.seed),
            program=lower(plan, graph)[0],
            settings=settings,
            checkpoints=folder,
            device=device,
        )
        losses: list[float] = []
        for step in train_loop(context, batches, resume=latest_checkpoint(folder)):
            losses.append(step.loss)
            if step.step == until:
                break
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(checkpoint_folders(folder)[-1].glob("*.safetensors")):
            tensors |= load_file(file)
        return losses, {key: t for key, t in tensors.items() if not key.startswith("zeros/")}

    return train


def equal(first: Weights, second: Weights) -> bool:
    """Whether all tensors are equal bit for bit."""
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_repeats_bit_for_bit_on_the_same_device(run: Run, device: Device, precision: str):
    first, second = (run(device, name=name, precision=precision) for name in ("one", "other"))
    assert first[0] == second[0]
    assert equal(first[1], second[1])


@pytest.mark.parametrize(
    ("tier", "precision"),
    [
        ("host", "float32"),
        ("disk", "bfloat16"),
        pytest.param("host", "bfloat16", marks=pytest.mark.slow),
        pytest.param("disk", "float32", marks=pytest.mark.slow),
    ],
)
def test_phases_and_offload_equal_resident_weights_bit_for_bit(
    run: Run, device: Device, tier: str, precision: str
):
    losses, resident = run(device, name="resident", precision=precision)
    stages = (Stage(phases=PHASES),)
    phase_losses, streamed = run(device, precision=precision, offload=ON[tier], stages=stages)
    assert phase_losses == losses
    assert equal(streamed, resident)


def test_moments_in_8_bits_are_the_same_in_phases_and_in_device_memory(run: Run, device: Device):
    _, resident = run(device, name="resident", moments="int8")
    stages = (Stage(phases=PHASES),)
    _, streamed = run(device, moments="int8", offload=ON["host"], stages=stages)
    assert equal(streamed, resident)


def test_a_run_that_stops_and_resumes_equals_one_that_went_on(run: Run, device: Device):
    losses, whole = run(device, name="whole")
    before, _ = run(device, name="stopped", until=1)
    after, resumed = run(device, name="stopped")
    assert before + after == losses
    assert equal(resumed, whole)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_recorded_steps_equal_those_that_are_not(run: Run, device: Device, precision: str):
    if not device.can_record:
        pytest.skip(f"torch records no work of `{device.kind}`")
    # Two steps run unrecorded, one is recorded, and three more are replays.
    fields = {"precision": precision, "steps": 6}
    losses, plain = run(device, name="plain", **fields)
    recorded_losses, recorded = run(device, step_graph=True, **fields)
    assert recorded_losses == losses
    assert equal(recorded, plain)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_activations_change_no_bit(run: Run, device: Device, recompute: str):
    losses, kept = run(device, name="kept")
    stages = (Stage(phases=RESIDENT, recompute=recompute),)
    recomputed_losses, recomputed = run(device, stages=stages)
    assert recomputed_losses == losses
    assert equal(recomputed, kept)


def test_weights_and_moments_are_those_of_the_cpu_up_to_rounding(run: Run, device: Device):
    # On the CPU a second run with two threads, whose sums have another order.
    losses, reference = run(device_for("cpu"), name="cpu")
    if not device.is_asynchronous:
        torch.set_num_threads(2)
    device_losses, weights = run(device)
    assert device_losses == pytest.approx(losses, rel=TOLERANCE["float32"])
    for name, value in reference.items():
        scale = value.double().abs().max().clamp(min=1e-30)
        error = (weights[name].double() - value.double()).abs().max() / scale
        assert error <= _FEW_STEPS * TOLERANCE["float32"], name


_FEW_STEPS = 10
"""Times the rounding of a step by which a moment may differ after three: squares double it, and
Adam divides by roots."""
