"""Sparse layers of tensor-parallel ranks: together they compute what the full layer computes."""

import pytest
import torch
from torch import Tensor, nn

from windlass.models.build import build_layer_stack
from windlass.models.check_shardable import sharding_errors
from windlass.models.init_weights import set_parameter
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.schema import SparsityRequest
from windlass.sparsity import BlockSparseLinear

SIZES = {
    "layers": 1, "width": 128, "heads": 8, "kv_heads": 4, "ffn": 256, "vocabulary": 50,
}  # fmt: skip
REQUESTS = {
    "block": SparsityRequest(level=0.5, block=16),
    "block-diagonal": SparsityRequest(level=0.5, block=16, pattern="block-diagonal"),
    "unstructured": SparsityRequest(level=0.9, pattern="unstructured"),
    "2:4": SparsityRequest(pattern="2:4"),
}
EXACT = 1e-12
"""Float64 sums in another order differ by less."""


def sparse_stack(request: SparsityRequest) -> LayerStack:
    return build_layer_stack("llama-tiny", SIZES, device="cpu", sparsity=request)


def rank_layer(stack: LayerStack, degree: int, index: int) -> nn.Module:
    """The block as one rank runs it, with its part of the weights."""
    layer, sharding = stack.layers[1], layer_sharding(stack, 1)
    rank = TensorParallelRank(degree=degree, index=index)
    local = shard_layer(layer, sharding, rank, last=False)
    full = dict(layer.named_parameters())
    for name, shard in param_shards(layer, sharding, rank).items():
        part = shard.extract(full[name].detach()).clone()
        assert part.shape == shard.shape
        set_parameter(local, name, nn.Parameter(part))
    for name, buffer in layer.named_buffers():
        owner, _, leaf = name.rpartition(".")
        local.get_submodule(owner).register_buffer(leaf, buffer)
    return local


def parts(y: Tensor, degree: int) -> list[Tensor]:
    """Queries, keys and values of a rank's outputs."""
    return list(y.split([16 * heads // degree for heads in (8, 4, 4)], dim=-1))


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("pattern", REQUESTS)
def test_the_ranks_outputs_are_those_of_the_full_layer(pattern: str, degree: int):
    stack = sparse_stack(REQUESTS[pattern])
    full = stack.layers[1].double()
    ranks = [rank_layer(stack, degree, index) for index in range(degree)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 128, dtype=torch.float64, generator=generator)
    for path in ("attention.input", "hidden.gate", "hidden.input"):
        outputs = [rank.get_submodule(path)(x) for rank in ranks]
        if path == "attention.input":
            of_parts = zip(*(parts(y, degree) for y in outputs), strict=True)
            joined = torch.cat([torch.cat(part, dim=-1) for part in of_parts], dim=-1)
        else:
            joined = torch.cat(outputs, dim=-1)
        assert (joined - full.get_submodule(path)(x)).abs().max() < EXACT
    for path in ("attention.output", "hidden.output"):
        inputs = full.get_submodule(path).in_features
        x = torch.randn(5, inputs, dtype=torch.float64, generator=generator)
        shares = x.chunk(degree, dim=-1)
        total = sum(
            rank.get_submodule(path)(share) for rank, share in zip(ranks, shares, strict=True)
        )
        assert (total - full.get_submodule(path)(x)).abs().max() < EXACT


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("pattern", ["block", "block-diagonal"])
def test_every_rank_has_equally_many_blocks_and_together_they_have_each_once(
    pattern: str, degree: int
):
    stack = sparse_stack(REQUESTS[pattern])
    layer, sharding = stack.layers[1], layer_sharding(stack, 1)
    shards = [
        param_shards(layer, sharding, TensorParallelRank(degree=degree, index=index))
        for index in range(degree)
    ]
    for path, module in layer.named_modules():
        if isinstance(module, BlockSparseLinear):
            ranges = [shard[f"{path}.values"].ranges[0] for shard in shards]
            taken = [i for of_rank in ranges for start, stop in of_rank for i in range(start, stop)]
            assert sorted(taken) == list(range(len(module.values)))
            assert {shard[f"{path}.values"].shape[0] for shard in shards} == {
                len(module.values) // degree
            }


@pytest.mark.parametrize(
    ("request_", "degree", "columns", "message"),
    [
        (
            SparsityRequest(level=0.625, block=16), 2, 1,
            ("`attention.output` keeps 3 of 8 blocks a row, which 2 ranks cannot share equally; "
            "use a level of 0.75, the nearest that 2 can share, or no tensor parallelism"),
        ),
        (
            SparsityRequest(level=0.5, block=32), 4, 1,
            ("`attention.input` has 16 features on each of 4 ranks, which blocks of 32 do not "
            "divide; lower the degree or `sparsity.block`"),
        ),
        (
            SparsityRequest(level=0.5, block=16), 4, 2,
            "is sparse, which a grid of ranks does not cut; set `parallel.tensor` to one number",
        ),
    ],
)  # fmt: skip
def test_what_a_cut_cannot_divide_is_refused_with_a_way_out(
    request_: SparsityRequest, degree: int, columns: int, message: str
):
    sizes = {**SIZES, "kv_heads": 8} if request_.level == 0.625 else SIZES
    stack = build_layer_stack("gpt-tiny", sizes, device="meta", sparsity=request_)
    errors = sharding_errors(stack, degree, columns=columns)
    assert any(message in error for error in errors), errors
