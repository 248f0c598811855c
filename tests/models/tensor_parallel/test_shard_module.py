"""Sharded layers without process groups: their parts, and the order of their operations."""

import pytest
import torch

from windlass.capture.recording.recorder import record_layer
from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank, local_tokens
from windlass.models.tensor_parallel.parallel_modules import GatherTokens, fill_tokens
from windlass.models.tensor_parallel.shard_module import shard_layer

DEGREE = 4


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(
    "family", ["gpt-tiny", "gpt-j-6b", "gpt-neox-20b", "llama3-8b", "bert-tiny"]
)
def test_all_ranks_run_the_same_operations_in_the_same_order(family: str, columns: int):
    arguments = {"layers": 1, "width": 32, "heads": 8, "ffn": 64, "vocabulary": 50, "dropout": 0.1}
    stack = build_layer_stack(family, arguments, device="meta")
    for index in range(len(stack.layers)):
        first, *others = (operations(stack, index, columns, rank) for rank in range(DEGREE))
        assert {"all_gather", "reduce_scatter", "all_reduce"} & set(first)
        assert all(other == first for other in others)


def operations(stack: LayerStack, index: int, columns: int, rank_index: int) -> list[str]:
    tp_rank = TensorParallelRank(degree=DEGREE, index=rank_index, columns=columns)
    sharded = shard_layer(stack.layers[index], layer_sharding(stack, index), tp_rank, last=False)

    def make_input() -> torch.Tensor:
        tokens = 8 * columns // DEGREE
        vectors = torch.empty(2, tokens, 32 // columns)
        return torch.zeros(2, 8, dtype=torch.int64) if index == 0 else vectors

    recorded = record_layer(sharded, make_input, dtype=torch.float32, target_shape=None)
    return [call.name for call in recorded.trace.calls]


def test_the_zeros_behind_the_last_tokens_of_an_image_reach_no_region():
    arguments = {"layers": 1, "width": 32, "heads": 4, "ffn": 64}
    stack = build_layer_stack("vit-tiny", arguments, device="cpu")
    assert stack.examples is not None
    x = torch.randn(2, stack.examples.positions, 32)
    assert x.shape[1] % 2  # two ranks cannot share them equally
    region = GatherTokens(TensorParallelRank(degree=1), stack.examples.positions)
    seen = region(stack.layers[1], (fill_tokens(x, 2),), {})[0][0]
    assert torch.equal(seen, x)
    filled = fill_tokens(x, 2)
    assert filled.shape[1] == x.shape[1] + 1
    assert not filled[:, -1].any()


def test_sharding_leaves_the_layer_as_it_was():
    stack = build_layer_stack("gpt-tiny", {"dropout": 0.1}, device="meta")
    layer = stack.layers[1]
    before = repr(layer), [p.shape for p in layer.parameters()]
    shard_layer(layer, layer_sharding(stack, 1), TensorParallelRank(degree=2, index=1), last=False)
    assert (repr(layer), [p.shape for p in layer.parameters()]) == before
    assert not any(module._forward_hooks for module in layer.modules())


def test_a_sequence_that_ranks_cannot_share_is_refused():
    with pytest.raises(ModelError, match="10 tokens cannot be sharded over 4 ranks"):
        local_tokens(torch.zeros(2, 10, 3), TensorParallelRank(degree=4))
