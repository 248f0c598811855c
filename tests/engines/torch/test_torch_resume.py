"""A run goes on from its checkpoint on another mesh, and under the other stack."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from factories import tiny_plan
from rank_pool import BATCH, MACHINE, RankPool, slow
from torch_plans import describe, random_plan, torch_plan
from windlass.errors import CheckpointError
from windlass.runtime.checkpoint.checkpoint import checkpoint_name
from windlass.runtime.checkpoint.merge_shards import PartFiles
from windlass.runtime.checkpoint.safetensors_io import write_tensors
from windlass.schema import CHECKPOINT_FOLDER
from windlass.schema.plan import Plan

ROUNDING = 1e-9


def own_plan(pool: RankPool, *, data: int = 1, tensor: int = 1) -> Plan:
    return tiny_plan(
        pool.graph, MACHINE, data=data, tensor=tensor, micro=1, accumulation=BATCH // data,
        sequence=pool.sequence, precision="float64",
    )  # fmt: skip


def require_resumed(pool: RankPool, before: Plan, after: Plan) -> None:
    """Requires that a plan goes on, from what another one saved, as one device would.

    Under the same stack its ranks read the parts that others wrote; under the other, merged ones.
    """
    run = pool.run(before)
    saved = run.folder / CHECKPOINT_FOLDER / checkpoint_name(1)
    if before.stack is None or after.stack is None:
        saved = pool.merged_checkpoint(run, 1)
    resumed = pool.run(after, resume=saved)
    expected = pool.single_device_run("float64").steps[1:]
    for step, other in zip(resumed.steps, expected, strict=True):
        assert step.loss == pytest.approx(other.loss, rel=ROUNDING)
        assert step.gradient_norm == pytest.approx(other.gradient_norm, rel=ROUNDING)
        assert step.held_out_loss == (
            None if other.held_out_loss is None else pytest.approx(other.held_out_loss, rel=1e-9)
        )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch, 2 shards", "own, one device"),
        ("own, one device", "torch, 2 stages"),
        slow("own, 2 tensor-parallel ranks", "torch, 2 shards"),
        ("torch, 2 tensor-parallel ranks", "torch, 2 shards"),
        slow("torch, 2 stages", "torch, 2 shards"),
        slow("torch, 2 shards", "torch, 2 tensor-parallel ranks"),
    ],
)
def test_a_run_goes_on_under_the_other_stack(pool: RankPool, before: str, after: str) -> None:
    plans = {
        "own, one device": own_plan(pool),
        "own, 2 tensor-parallel ranks": own_plan(pool, tensor=2),
        "torch, 2 shards": torch_plan(pool, data=2, sharding=(2, 2)),
        "torch, 2 stages": torch_plan(pool, pipeline=2),
        "torch, 2 tensor-parallel ranks": torch_plan(pool, tensor=2),
    }
    require_resumed(pool, plans[before], plans[after])


def test_what_a_rank_saves_is_its_own_rectangle_as_torch_reads_it(pool: RankPool) -> None:
    run = pool.run(torch_plan(pool, tensor=2))
    folder = run.folder / CHECKPOINT_FOLDER / checkpoint_name(1)
    assert not [*folder.glob("layer-0001.safetensors")]
    with safe_open(folder / "layer-0001.part-1-0.safetensors", framework="pt") as file:
        places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    full = read_tensors_of(pool.merged_checkpoint(run, 1) / "layer-0001.safetensors")
    halves = [key for key in shapes if shapes[key] != full[key]]
    assert halves
    assert all(any(places[key]["saved_offsets"]) for key in halves)
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    assert {key: tuple(metadata[key].size) for key in full} == full


def test_parts_that_lack_one_are_refused_by_name(tmp_path: Path) -> None:
    half = torch.ones(2, 3)
    write_tensors(tmp_path / "a.safetensors", [("weight/w", half)], offsets={"weight/w": (2, 0)})
    with pytest.raises(CheckpointError, match="lacks a part of `weight/w`"):
        PartFiles([tmp_path / "a.safetensors"]).full_tensors()


def read_tensors_of(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a file."""
    return {key: tuple(each.shape) for key, each in load_file(path).items()}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_goes_on_on_another_mesh(pool: RankPool, seed: int) -> None:
    draw = random.Random(seed)
    before, after = (
        random_plan(draw, pool).model_copy(update={"precision": "float64"}) for _ in range(2)
    )
    print(describe(before), "->", describe(after))
    require_resumed(pool, before, after)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_run_of_any_mesh_goes_on_under_the_own_runtime_and_back(
    pool: RankPool, seed: int
) -> None:
    draw = random.Random(seed)
    there = random_plan(draw, pool).model_copy(update={"precision": "float64"})
    data, tensor = draw.choice(((1, 1), (2, 1), (4, 1), (1, 2), (2, 2)))
    pair = [there, own_plan(pool, data=data, tensor=tensor)]
    before, after = pair if seed % 2 else reversed(pair)
    print(describe(before), "->", describe(after))
    require_resumed(pool, before, after)
