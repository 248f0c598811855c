"""A model streamed through device memory in phases, against the same model kept there in full."""

import shutil
from collections.abc import Callable, Iterable
from itertools import permutations, product
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from safetensors.torch import load_file

from windlass.data.batches import Batches
from windlass.models.layer_stack import LayerStack
from windlass.program.lowering.lower import lower
from windlass.program.memory.offloaded_bytes import offloaded_bytes_by_tier
from windlass.program.memory.tier_traffic import TierTraffic, sum_tiers
from windlass.runtime.checkpoint.checkpoint import (
    checkpoint_folders,
    latest_checkpoint,
    link_checkpoint,
)
from windlass.runtime.rank_context import RankContext
from windlass.runtime.train import train_loop
from windlass.schema.graph import Graph
from windlass.schema.plan import Batch, Offload, Plan, Stage
from windlass.schema.run_record import Step
from windlass.schema.train_request import TrainSettings

SEQUENCE = 16
ON_DISK = Offload(parameters="disk", gradients="disk", optimizer="disk")
ON_HOST = Offload(parameters="host", gradients="host", optimizer="host")
PHASES = {
    1: ((0, 5),),
    2: ((0, 2), (2, 5)),
    3: ((0, 1), (1, 3), (3, 5)),
    5: ((0, 1), (1, 2), (2, 3), (3, 4), (4, 5)),
}
"""Layers of each phase, by number of phases: embedding, three blocks and head."""

PADDING_BYTES = 400 * 4096
"""Headers, and less than a page behind each of 40 weights in up to 7 regions or files."""

Run = Callable[..., tuple[list[Step], dict[str, torch.Tensor]]]


def quick(every: Iterable[tuple[object, ...]], *chosen: tuple[object, ...]) -> list[ParameterSet]:
    """All cases, of which those not chosen are slow; together the chosen have each value once."""
    return [pytest.param(*one, marks=() if one in chosen else pytest.mark.slow) for one in every]


@pytest.fixture
def run(
    gpt: Callable[..., LayerStack],
    graph_of: Callable[..., Graph],
    batches: Callable[..., Batches],
    settings: Callable[..., TrainSettings],
    tmp_path: Path,
) -> Run:
    """Trains in phases; returns the steps and all tensors of the last checkpoint."""

    def go(
        phases: int,
        *,
        offload: Offload | None = None,
        micro: int = 4,
        accumulation: int = 1,
        precision: str = "float32",
        moments: str = "float32",
        compiled: bool = False,
        recompute: str = "none",
        name: str = "run",
        resume: bool = False,
        until: int | None = None,
        after_step: Callable[[], None] = lambda: None,
        predicted_bytes: list[int] | None = None,
        model_args: dict[str, float] | None = None,
        **train_args: object,
    ) -> tuple[list[Step], dict[str, torch.Tensor]]:
        stack = gpt(device="meta", dropout=0.1, **(model_args or {}))
        graph = graph_of(dropout=0.1, **(model_args or {}))
        plan = Plan(
            graph=graph.label,
            machine="here@000000000000",
            optimizer=train_args.get("optimizer"),
            precision=precision,
            moments=moments,
            compile=compiled,
            clip=train_args.get("clip", 0.5) is not None,
            offload=offload or (ON_DISK if phases > 1 else Offload()),
            batch=Batch(sequence=SEQUENCE, micro=micro, accumulation=accumulation),
            stages=(Stage(phases=PHASES[phases], recompute=recompute),),
        )
        if predicted_bytes is not None:
            predicted_bytes.append(sum(offloaded_bytes_by_tier(plan, graph)["disk"].values()))
        folder = tmp_path / name / "checkpoints"
        folder.parent.mkdir(exist_ok=True)
        request = settings(batch=micro * accumulation, **train_args)
        steps = []
        context = RankContext(
            plan=plan,
            stack=stack,
            program=lower(plan, graph)[0],
            settings=request,
            checkpoints=folder,
        )
        newest = latest_checkpoint(folder) if resume else None
        for step in train_loop(context, batches(batch=micro * accumulation), resume=newest):
            steps.append(step)
            after_step()
            if step.step == until:
                break
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(checkpoint_folders(folder)[-1].glob("*.safetensors")):
            tensors |= load_file(file)
        return steps, {key: t for key, t in tensors.items() if not key.startswith("zeros/")}

    return go


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors are equal bit for bit."""
    assert first.keys() == second.keys()
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("phases", "precision", "accumulation"),
    quick(
        product((2, 3, 5), ("float32", "bfloat16"), (1, 3)),
        (2, "bfloat16", 3), (3, "float32", 1), (5, "float32", 3),
    ),
)  # fmt: skip
def test_phases_give_the_same_weights_as_device_memory_bit_for_bit(
    run: Run, phases: int, precision: str, accumulation: int
):
    shape = {"precision": precision, "accumulation": accumulation, "micro": 2}
    reference_steps, reference = run(1, name="reference", **shape)
    steps, streamed = run(phases, **shape)
    assert [s.loss for s in steps] == [s.loss for s in reference_steps]
    assert [s.gradient_norm for s in steps] == [s.gradient_norm for s in reference_steps]
    assert steps[-1].held_out_loss == reference_steps[-1].held_out_loss
    assert equal(streamed, reference)


@pytest.mark.parametrize(
    ("moments", "precision", "clip"),
    quick(
        product(("bfloat16", "int8"), ("float32", "bfloat16"), (0.5, None)),
        ("bfloat16", "float32", None), ("int8", "bfloat16", 0.5),
    ),
)  # fmt: skip
def test_quantized_moments_are_the_same_in_phases_and_in_device_memory(
    run: Run, moments: str, precision: str, clip: float | None
):
    shape = {"precision": precision, "accumulation": 2, "micro": 2, "moments": moments}
    shape |= {"clip": clip, "model_args": {"width": 96}}  # 300 x 96: the last block is incomplete
    reference_steps, reference = run(1, name="reference", **shape)
    steps, streamed = run(3, **shape)
    assert [s.loss for s in steps] == [s.loss for s in reference_steps]
    assert equal(streamed, reference)
    moment = next(tensor for name, tensor in reference.items() if name.startswith("moment1/"))
    assert moment.dtype == {"bfloat16": torch.bfloat16, "int8": torch.int8}[moments]


@pytest.mark.parametrize("moments", ["bfloat16", "int8"])
def test_quantized_moments_resume_bit_for_bit_wherever_they_were_saved(run: Run, moments: str):
    train_args = {"steps": 6, "save_every": 2, "moments": moments, "precision": "bfloat16"}
    _, reference = run(1, name="reference", **train_args)
    run(3, until=2, **train_args)
    run(1, resume=True, until=4, **train_args)
    _, mixed = run(3, resume=True, **train_args)
    assert equal(mixed, reference)


@pytest.mark.parametrize(
    ("before", "after"),
    quick(
        permutations(["float32", "bfloat16", "int8"], 2), ("float32", "int8"), ("int8", "bfloat16")
    ),
)
def test_a_checkpoint_resumes_with_another_moment_format_alike_in_memory_and_in_phases(
    run: Run, tmp_path: Path, before: str, after: str
):
    run(3, name="streamed", steps=4, save_every=2, until=2, moments=before)
    shutil.copytree(tmp_path / "streamed", tmp_path / "resident")
    train_args = {"steps": 4, "save_every": 4, "moments": after, "resume": True}
    steps, streamed = run(3, name="streamed", **train_args)
    resident_steps, resident = run(1, name="resident", **train_args)
    assert [s.step for s in steps] == [3, 4]
    assert [s.loss for s in steps] == [s.loss for s in resident_steps]
    assert equal(streamed, resident)


@pytest.mark.parametrize(
    ("moments", "precision", "accumulation", "clip"),
    quick(
        (
            (moments, precision, *steps)
            for moments, precision, steps in product(
                ("float32", "int8"), ("float32", "bfloat16"), ((1, 0.5), (2, 0.5), (2, None))
            )
        ),
        ("float32", "float32", 1, 0.5), ("int8", "float32", 2, None), ("int8", "bfloat16", 2, 0.5),
    ),
)  # fmt: skip
def test_the_state_files_have_the_predicted_size(
    run: Run, tmp_path: Path, moments: str, precision: str, accumulation: int, clip: float | None
):
    shape = {"precision": precision, "moments": moments, "accumulation": accumulation}
    file_bytes: list[int] = []
    predicted_bytes: list[int] = []

    def after_step() -> None:
        files = (tmp_path / "run" / "state").iterdir()
        file_bytes.append(sum(file.stat().st_size for file in files))

    run(
        3, micro=2, clip=clip, after_step=after_step, predicted_bytes=predicted_bytes, steps=1,
        model_args={"width": 256}, **shape,
    )  # fmt: skip
    (predicted,) = predicted_bytes
    assert predicted <= file_bytes[0] <= predicted + PADDING_BYTES


@pytest.mark.parametrize(
    ("phases", "precision"),
    quick(product((2, 3, 5), ("float32", "bfloat16")), (3, "float32"), (5, "bfloat16")),
)
def test_offload_to_host_memory_gives_the_same_bits_and_creates_no_files(
    run: Run, tmp_path: Path, phases: int, precision: str
):
    shape = {"precision": precision, "accumulation": 2, "micro": 2}
    folders: set[str] = set()

    def after_step() -> None:
        folders.update(path.name for path in (tmp_path / "run").glob("*"))

    reference_steps, reference = run(1, name="reference", **shape)
    steps, streamed = run(phases, offload=ON_HOST, after_step=after_step, **shape)
    assert [s.loss for s in steps] == [s.loss for s in reference_steps]
    assert [s.gradient_norm for s in steps] == [s.gradient_norm for s in reference_steps]
    assert steps[-1].held_out_loss == reference_steps[-1].held_out_loss
    assert equal(streamed, reference)
    assert folders <= {"checkpoints"}


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_offload_to_host_memory_transfers_as_many_bytes_as_to_files(run: Run, precision: str):
    shape = {"precision": precision, "accumulation": 2, "micro": 2, "clip": None}
    files, _ = run(3, name="files", **shape)
    memory, _ = run(3, offload=ON_HOST, **shape)
    for field in ("read_bytes", "written_bytes"):
        totals = [sum(getattr(step, field) for step in steps) for steps in (memory, files)]
        assert totals[0] == totals[1] > 0


@pytest.mark.parametrize("moments", [pytest.param("float32", marks=pytest.mark.slow), "int8"])
def test_each_class_of_tensor_may_be_offloaded_to_another_tier(run: Run, moments: str):
    shape = {"precision": "bfloat16", "accumulation": 2, "micro": 2, "moments": moments}
    _, reference = run(1, name="reference", **shape)
    for offload in (
        Offload(parameters="host", gradients="host", optimizer="disk"),
        Offload(parameters="disk", gradients="host", optimizer="host"),
    ):
        _, streamed = run(3, name=offload.optimizer, offload=offload, **shape)
        assert equal(streamed, reference)


def test_a_run_resumes_from_files_in_host_memory_and_back(run: Run):
    train_args = {"steps": 6, "save_every": 2, "moments": "int8", "precision": "bfloat16"}
    _, reference = run(1, name="reference", **train_args)
    run(3, offload=ON_HOST, until=2, **train_args)
    run(2, resume=True, until=4, **train_args)
    _, mixed = run(3, offload=ON_HOST, resume=True, **train_args)
    assert equal(mixed, reference)


def test_without_clipping_layers_are_updated_in_their_phase_with_the_same_result(run: Run):
    _, reference = run(1, name="reference", clip=None)
    _, streamed = run(3, clip=None)
    assert equal(streamed, reference)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_the_optimizer_state_alone_may_be_offloaded(run: Run, tmp_path: Path, tier: str):
    folders: set[str] = set()

    def after_step() -> None:
        folders.update(path.name for path in (tmp_path / "run").glob("*"))

    shape = {"precision": "bfloat16", "model_args": {"width": 128}}
    _, reference = run(1, name="reference", **shape)
    steps, streamed = run(1, offload=Offload(optimizer=tier), after_step=after_step, **shape)
    assert equal(streamed, reference)
    assert ("state" in folders) == (tier == "disk")
    # Masters and moments are transferred; the weights that layers compute with stay.
    state = sum(t.nbytes for name, t in reference.items() if name.startswith(("weight/", "moment")))
    # A step may end before its last write; the last step of a run waits for all.
    read, written = sum(s.read_bytes for s in steps), sum(s.written_bytes for s in steps)
    most = (1 + PADDING_SHARE) * state + PADDING_BYTES
    assert len(steps) * state <= read == written <= len(steps) * most


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_layers_give_the_same_weights_streamed_as_in_memory(run: Run):
    _, reference = run(1, name="reference", precision="bfloat16", compiled=True)
    _, streamed = run(3, precision="bfloat16", compiled=True)
    assert equal(streamed, reference)


def test_a_stopped_run_resumes_from_its_checkpoint_bit_for_bit(run: Run):
    _, reference = run(3, name="reference", steps=6, save_every=2)
    run(3, steps=6, save_every=2, until=4)
    _, resumed = run(3, steps=6, save_every=2, resume=True)
    assert equal(resumed, reference)


def test_a_checkpoint_of_a_streamed_run_resumes_in_device_memory_and_back(run: Run):
    _, reference = run(1, name="reference", steps=6, save_every=2)
    run(3, steps=6, save_every=2, until=2)
    run(1, steps=6, save_every=2, resume=True, until=4)
    _, mixed = run(3, steps=6, save_every=2, resume=True)
    assert equal(mixed, reference)


def test_a_new_run_from_a_checkpoint_counts_the_updates_of_its_weights_in_phases_too(
    run: Run, tmp_path: Path
):
    run(1, name="parent", steps=2, save_every=2)
    parent = latest_checkpoint(tmp_path / "parent" / "checkpoints")
    start = parent.manifest.model_copy(update={"step": 0, "samples": 0})
    for name in ("one", "two"):
        link_checkpoint(parent, tmp_path / name / "checkpoints", start)

    _, in_memory = run(1, name="one", steps=2, save_every=2, resume=True)
    _, streamed = run(3, name="two", steps=2, save_every=2, resume=True)

    assert equal(streamed, in_memory)
    assert latest_checkpoint(tmp_path / "parent" / "checkpoints") == parent


def test_later_updates_do_not_change_a_checkpoint(run: Run, tmp_path: Path):
    run(3, steps=6, save_every=2, keep=3)
    folder = tmp_path / "run" / "checkpoints"
    saved = checkpoint_folders(folder)
    assert len(saved) == 3
    assert latest_checkpoint(folder).damaged == ()
    for path in saved[1:]:
        shutil.rmtree(path)
    assert latest_checkpoint(folder).manifest.step == 2


def test_only_checkpoints_are_left_on_disk(run: Run, tmp_path: Path):
    run(3, steps=2, save_every=1)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize(
    ("tier", "phases", "precision"),
    quick(
        (
            (tier, *shape)
            for tier, shape in product(
                ("host", "disk"), ((5, "float32"), (5, "bfloat16"), (2, "float32"))
            )
        ),
        ("host", 2, "float32"), ("disk", 5, "bfloat16"),
    ),
)  # fmt: skip
def test_offloaded_activations_are_reloaded_unchanged(
    run: Run, tmp_path: Path, tier: str, phases: int, precision: str
):
    shape = {"precision": precision, "accumulation": 3, "micro": 2}
    reference_steps, reference = run(1, name="reference", **shape)
    steps, streamed = run(phases, offload=ON_HOST.model_copy(update={"activations": tier}), **shape)
    assert [s.loss for s in steps] == [s.loss for s in reference_steps]
    assert [s.gradient_norm for s in steps] == [s.gradient_norm for s in reference_steps]
    assert equal(streamed, reference)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_activations_alone_may_be_offloaded_and_transfer_the_bytes_of_the_program(
    run: Run, graph_of: Callable[..., Graph], tier: str
):
    shape = {"accumulation": 3, "micro": 2, "recompute": "full"}
    _, reference = run(1, name="reference", **shape)
    steps, offloaded = run(1, offload=Offload(activations=tier), **shape)
    assert equal(offloaded, reference)
    graph = graph_of(dropout=0.1)
    plan = Plan(
        graph=graph.label, machine="here@000000000000", offload=Offload(activations=tier),
        batch=Batch(sequence=SEQUENCE, micro=2, accumulation=3),
        stages=(Stage(phases=PHASES[1], recompute="full"),),
    )  # fmt: skip
    expected = sum_tiers(TierTraffic(plan, graph).total(lower(plan, graph)[0].instructions))
    assert expected.read == expected.written > 0
    assert {(step.read_bytes, step.written_bytes) for step in steps} == {tuple(expected)}


PADDING_SHARE = 0.02
"""Fraction by which padding to full pages increases the traffic of layers this wide."""


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    quick(
        (("float32", None), ("bfloat16", None), ("float32", "lamb"), ("bfloat16", "adafactor")),
        ("bfloat16", None),
        ("float32", "lamb"),
    ),
)
def test_a_run_transfers_the_bytes_of_its_program(
    run: Run, graph_of: Callable[..., Graph], precision: str, optimizer: str | None
):
    shape = {"precision": precision, "accumulation": 2, "micro": 2, "model_args": {"width": 256}}
    if optimizer is not None:
        shape["optimizer"] = optimizer
    steps, _ = run(3, steps=4, evaluate_every=4, save_every=4, **shape)
    graph = graph_of(dropout=0.1, width=256)
    plan = Plan(
        graph=graph.label, machine="here@000000000000", precision=precision, offload=ON_DISK,
        batch=Batch(sequence=SEQUENCE, micro=2, accumulation=2), stages=(Stage(phases=PHASES[3]),),
        optimizer=optimizer,
    )  # fmt: skip
    (program,), traffic = lower(plan, graph), TierTraffic(plan, graph)
    first = sum_tiers(traffic.total(program.instructions, stored=False))
    later = sum_tiers(traffic.total(program.instructions))
    last = later.plus(sum_tiers(traffic.total(program.flush_deferred_updates)))
    # Summed over all steps: a transfer still running when its step ends counts in the next one.
    expected = first.plus(later).plus(later).plus(last)
    assert sum(step.read_bytes for step in steps) == pytest.approx(expected.read, rel=PADDING_SHARE)
    assert sum(step.written_bytes for step in steps) == pytest.approx(
        expected.written, rel=PADDING_SHARE
    )


def test_a_run_in_device_memory_transfers_nothing(run: Run):
    steps, _ = run(1)
    assert {(step.read_bytes, step.written_bytes, step.flush_seconds) for step in steps} == {
        (0, 0, 0.0)
    }
