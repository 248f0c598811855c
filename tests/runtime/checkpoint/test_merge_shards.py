"""Shards of a layer become the full layer again, or none."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.models import (
    LayerStack,
    TensorParallelRank,
    build_layer_stack,
    layer_sharding,
    param_shards,
)
from windlass.runtime.checkpoint.merge_shards import _LayerMerger
from windlass.runtime.checkpoint.safetensors_io import write_tensors

TINY = {"layers": 1, "width": 16, "heads": 4, "vocabulary": 37, "sequence": 8}


def written(stack: LayerStack, index: int, degree: int, columns: int, folder: Path) -> _LayerMerger:
    """Files of all ranks, each with its shard in two pieces, and what merges them."""
    layer, sharding = stack.layers[index], layer_sharding(stack, index)
    ranks = [TensorParallelRank(degree=degree, index=i, columns=columns) for i in range(degree)]
    shards = [(rank, param_shards(layer, sharding, rank)) for rank in ranks]
    for rank, (_, own) in enumerate(shards):
        pieces: dict[str, Tensor] = {}
        for name, parameter in layer.named_parameters():
            flat = own[name].extract(parameter.detach()).reshape(-1)
            cut = len(flat) // 3
            for begin, piece in ((0, flat[:cut]), (cut, flat[cut:])):
                pieces[f"weight/{stack.names[index]}.{name}@{begin}"] = piece.clone()
        write_tensors(folder / f"{rank}.safetensors", pieces.items())
    return _LayerMerger(stack.names[index], shards)


@pytest.mark.parametrize(("degree", "columns"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_shards_of_all_ranks_are_the_full_layer(
    index: int, degree: int, columns: int, tmp_path: Path
) -> None:
    stack = build_layer_stack("gpt-tiny", TINY, device="cpu")
    merger = written(stack, index, degree, columns, tmp_path)
    for rank in range(degree):
        merger.add(tmp_path / f"{rank}.safetensors", rank)
    full = merger.full_tensors()
    for name, parameter in stack.layers[index].named_parameters():
        assert torch.equal(full[f"weight/{stack.names[index]}.{name}"], parameter)


def test_a_layer_that_lacks_a_rank_is_no_full_one(tmp_path: Path) -> None:
    stack = build_layer_stack("gpt-tiny", TINY, device="cpu")
    merger = written(stack, 1, 2, 1, tmp_path)
    merger.add(tmp_path / "0.safetensors", 0)
    with pytest.raises(CheckpointError, match=r"nothing of `weight/.*` of tensor-parallel rank 1"):
        merger.full_tensors()
