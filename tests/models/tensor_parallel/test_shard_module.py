"""Twins of layers, without a process group: what they are made of, and in which order they run."""

import pytest
import torch

from windlass.capture.recorder import record_layer
from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank, local_tokens
from windlass.models.tensor_parallel.shard_module import shard_layer

DEGREE = 4


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize(
    "family", ["gpt-tiny", "gpt-j-6b", "gpt-neox-20b", "llama3-8b", "bert-tiny"]
)
def test_all_slices_run_the_same_operations_in_the_same_order(family: str, columns: int):
    dials = {"layers": 1, "width": 32, "heads": 8, "ffn": 64, "vocabulary": 50, "dropout": 0.1}
    chain = build_layer_stack(family, dials, device="meta")
    for index in range(len(chain.layers)):
        first, *others = (operations(chain, index, columns, at) for at in range(DEGREE))
        assert {"gather_parts", "scatter_sum", "sum_slices"} & set(first)
        assert all(other == first for other in others)


def operations(chain: LayerStack, index: int, columns: int, slice_index: int) -> list[str]:
    place = TensorParallelRank(degree=DEGREE, index=slice_index, columns=columns)
    twin = shard_layer(chain.layers[index], layer_sharding(chain, index), place, last=False)

    def make_input() -> torch.Tensor:
        tokens = 8 * columns // DEGREE
        own = torch.empty(2, tokens, 32 // columns)
        return torch.zeros(2, 8, dtype=torch.int64) if index == 0 else own

    recording = record_layer(twin, make_input, dtype=torch.float32, target_shape=None)
    return [call.name for call in recording.trace.calls]


def test_making_a_twin_leaves_the_layer_as_it_was():
    chain = build_layer_stack("gpt-tiny", {"dropout": 0.1}, device="meta")
    layer = chain.layers[1]
    before = repr(layer), [p.shape for p in layer.parameters()]
    shard_layer(layer, layer_sharding(chain, 1), TensorParallelRank(degree=2, index=1), last=False)
    assert (repr(layer), [p.shape for p in layer.parameters()]) == before
    assert not any(module._forward_hooks for module in layer.modules())


def test_a_sequence_that_slices_cannot_share_is_refused():
    with pytest.raises(ModelError, match="10 tokens cannot be cut over 4 slices"):
        local_tokens(torch.zeros(2, 10, 3), TensorParallelRank(degree=4))
