"""A graph predicts what one tensor-parallel rank does."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from measured_memory import MeasuredMemory, measure_memory
from torch.testing._internal.distributed.fake_pg import FakeStore

from factories import catalog_graph
from windlass.capture.capture_layers import capture_tensor_shards
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.schema.graph import PRECISION_BYTES, Graph, LayerCost, LayerKind, Precision
from windlass.schema.tensor_grid import TensorGrid, grid_columns

Sharded = Callable[..., tuple[LayerStack, Graph]]

SMALL = {"layers": 1, "width": 256, "heads": 4, "vocabulary": 3000, "sequence": 160}
GROUPED = {**SMALL, "heads": 8, "kv_heads": 4, "ffn": 672}
FAMILIES = {"gpt-tiny": SMALL, "gpt-neox-20b": SMALL, "llama-tiny": GROUPED}
GRID = TensorGrid(2, 2)
UNEVEN = {**SMALL, "vocabulary": 3001}
MICRO, SEQUENCE, WIDTH = 3, 128, 256


@pytest.fixture(scope="module")
def sharded() -> Sharded:
    """`sharded(name, 2, 4, layers=1)`: a stack without memory, and its graph at degrees 2 and 4.

    The graph is the computed one, which equals a captured one: `analytic/test_graph.py`.
    """

    def computed(name: str, *degrees: int, **arguments: int) -> tuple[LayerStack, Graph]:
        stack = build_layer_stack(name, arguments, device="meta", seed=0)
        return stack, catalog_graph(name, *degrees, **arguments)

    return computed


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_of_a_block_all_gathers_and_reduce_scatters_all_tokens_twice(
    sharded: Sharded, name: str
):
    """Each moves `b s d` numbers. Source: Korthikanti et al. 2022, arXiv:2205.05198, 4.2.2."""
    stack, graph = sharded(name, 2, 4, GRID, **FAMILIES[name])
    for degree in (2, 4):
        kind = graph.shard(degree).kinds[stack.kinds[1]]
        for cost in kind.costs:
            full = MICRO * SEQUENCE * WIDTH * PRECISION_BYTES[cost.precision]
            for ops in (cost.forward, cost.backward):
                found = [op.collective for op in ops if op.collective is not None]
                assert (
                    sorted(each.kind for each in found)
                    == ["all_gather"] * 2 + ["reduce_scatter"] * 2
                )
                assert all(each.nbytes.at(MICRO, SEQUENCE) == full for each in found)


def test_a_block_in_a_grid_communicates_tokens_in_columns_and_features_in_rows(sharded: Sharded):
    """With 2 rows and 2 columns: `d/c` of each token, and `f/r` of the sharded features."""
    stack, graph = sharded("gpt-tiny", 2, 4, GRID, **SMALL)
    cost = graph.shard(GRID).kinds[stack.kinds[1]].cost("float32", compiled=False)
    number = MICRO * SEQUENCE * 4
    d = number * WIDTH // 2
    region = [("all_gather", "tokens", d), ("reduce_scatter", "tokens", d)]
    # Queries, keys and values leave the column fused, and the feed-forward width is 4 d.
    features = [
        ("reduce_scatter", 3 * d),
        ("all_gather", d),
        ("reduce_scatter", 4 * d),
        ("all_gather", 4 * d),
    ]
    moments = [("all_reduce", "features", 3 * number // 2)] * 2  # of local tokens
    expected = region * 2 + [(how, "features", nbytes) for how, nbytes in features]
    found = [
        (op.collective.kind, op.collective.axis, op.collective.nbytes.at(MICRO, SEQUENCE))
        for op in cost.forward
        if op.collective is not None
    ]
    assert sorted(found) == sorted(expected + moments)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_embedding_all_reduces_its_rows_and_the_head_all_gathers_its_input(
    sharded: Sharded, name: str
):
    stack, graph = sharded(name, 2, 4, GRID, **FAMILIES[name])
    kinds = graph.shard(2).kinds
    first, last = (kinds[stack.kinds[at]].cost("float32", compiled=False) for at in (0, -1))
    tokens = MICRO * SEQUENCE
    full, number = tokens * WIDTH * 4, tokens * 4
    assert collectives(first) == ([("all_reduce", full)], [("all_reduce", full)])
    # The largest logit, then the sum of exponentials and the target's logit together.
    losses = [("all_reduce", number), ("all_reduce", 2 * number)]
    assert collectives(last) == ([("all_gather", full), *losses], [("reduce_scatter", full)])


def collectives(cost: LayerCost) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    forward, backward = (
        [
            (op.collective.kind, op.collective.nbytes.at(MICRO, SEQUENCE))
            for op in ops
            if op.collective
        ]
        for ops in (cost.forward, cost.backward)
    )
    return forward, backward


@pytest.mark.parametrize("name", FAMILIES)
def test_all_ranks_together_do_the_products_and_attention_of_the_full_layer(
    sharded: Sharded, name: str
):
    _, graph = sharded(name, 2, 4, GRID, **FAMILIES[name])
    for degree in (2, 4, GRID):
        sharded_flop = degree * graph.shard(degree).micro_batch_flop(MICRO, SEQUENCE)
        assert sharded_flop == graph.micro_batch_flop(MICRO, SEQUENCE)


@pytest.mark.parametrize("degree", [2, 4, GRID])
def test_a_rank_has_the_parameters_of_its_shards_even_of_an_uneven_vocabulary(
    sharded: Sharded, degree: int
):
    stack, graph = sharded("gpt-tiny", degree, **UNEVEN)
    for index in range(degree):
        kinds = graph.shard(degree, index).kinds
        for at, kind in enumerate(stack.kinds):
            tp_rank = TensorParallelRank(
                degree=int(degree), index=index, columns=grid_columns(degree)
            )
            expected = param_shards(stack.layers[at], layer_sharding(stack, at), tp_rank)
            assert {p.name: (p.shape, p.replicated_over) for p in kinds[kind].parameters} == {
                name: (shard.shape, shard.replicated_over) for name, shard in expected.items()
            }


def test_degrees_that_are_impossible_are_recorded_with_a_fix(sharded: Sharded):
    graph = capture_tensor_shards(*sharded("llama-tiny", **GROUPED), (3, 8))
    assert not graph.tensor_shards
    assert all("use a degree that divides" in graph.unshardable[degree][0] for degree in (3, 8))
    short = capture_tensor_shards(*sharded("gpt-tiny", **{**SMALL, "sequence": 16}), (4,))
    assert short.unshardable[4] == (
        (
            "model `gpt-tiny` takes sequences of at most 16 tokens, must take 21 to be captured on "
            "4 ranks; lower the degree"
        ),
    )


def test_a_sharded_embedding_looks_up_rows_as_the_full_one_does(sharded: Sharded):
    stack, graph = sharded("gpt-tiny", 2, 4, GRID, **SMALL)
    kinds = [graph.shard(degree).kinds[stack.kinds[0]] for degree in (1, 2, 4)]
    assert all(kind.is_embedding for kind in kinds)
    assert [rows(kind) for kind in kinds] == [MICRO * 4 * WIDTH] * 3


def rows(kind: LayerKind) -> int:
    return kind.pass_gradient_elements(MICRO, 4)[0]


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[str, str, str]]:
    """Torch's fake process groups, which allocate as real ones do and send nothing.

    They are those of four ranks, of a grid's first column and of its first row.
    """
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    assert dist.group.WORLD is not None
    column, row = dist.new_group([0, 2]), dist.new_group([0, 1])
    yield dist.group.WORLD.group_name, column.group_name, row.group_name
    dist.destroy_process_group()


def measured_and_predicted(
    sharded: Sharded, groups: tuple[str, str, str], name: str, index: int, precision: Precision, *,
    compiled: bool, selective: bool = False, degree: int = 4,
) -> tuple[MeasuredMemory, LayerCost]:  # fmt: skip
    """Measured bytes of the first of four ranks of a layer, and its predicted cost."""
    stack, graph = sharded(name, 2, 4, GRID, **FAMILIES[name])
    all_group, column, row = groups
    columns = grid_columns(degree)
    tp_rank = TensorParallelRank(
        degree=4, columns=columns, group_name=all_group, column_group_name=column,
        row_group_name=row,
    )  # fmt: skip
    layers = tuple(
        shard_layer(layer, layer_sharding(stack, at), tp_rank, last=at == 2).to_empty(device="cpu")
        for at, layer in enumerate(stack.layers)
    )
    measured = measure_memory(
        replace(stack, layers=layers),
        index,
        getattr(torch, precision),
        micro_batch=MICRO,
        sequence=SEQUENCE,
        compiled=compiled,
        selective=selective,
        rows=tp_rank.rows,
        columns=columns,
    )
    kind = graph.shard(degree).kinds[stack.kinds[index]]
    return measured, kind.cost(precision, compiled=compiled, selective=selective)


def peaks(cost: LayerCost) -> tuple[float, float]:
    forward, backward = (
        max(op.live_bytes.at(MICRO, SEQUENCE) for op in ops)
        for ops in (cost.forward, cost.backward)
    )
    return forward, backward


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("degree", [4, GRID], ids=str)
def test_an_eager_rank_takes_the_bytes_that_its_graph_predicts(
    sharded: Sharded, groups: tuple[str, str, str], name: str, index: int, precision: Precision,
    degree: int,
):  # fmt: skip
    measured, cost = measured_and_predicted(
        sharded, groups, name, index, precision, compiled=False, degree=degree
    )
    forward, backward = peaks(cost)
    # In bfloat16 attention accumulates in internal float32 buffers, one for each of two threads.
    scratch = 48 * 2**10 * 2 if precision == "bfloat16" else 1024
    assert cost.saved_bytes.at(MICRO, SEQUENCE) == pytest.approx(
        measured.saved, rel=0.001, abs=1024
    )
    assert forward == pytest.approx(measured.forward_peak, rel=0.001, abs=scratch)
    # Gradients of parameters count for the caller.
    low, high = measured.backward_peak - measured.gradients, measured.backward_peak
    assert low * 0.98 - scratch <= backward <= high * 1.02


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("degree", [4, GRID], ids=str)
def test_a_rank_with_selective_checkpointing_saves_the_bytes_that_its_graph_predicts(
    sharded: Sharded, groups: tuple[str, str, str], name: str, precision: Precision, degree: int
):
    measured, cost = measured_and_predicted(
        sharded, groups, name, 1, precision, compiled=False, selective=True, degree=degree
    )
    forward, _ = peaks(cost)
    scratch = 48 * 2**10 * 2 if precision == "bfloat16" else 1024
    assert cost.saved_bytes.at(MICRO, SEQUENCE) == pytest.approx(
        measured.saved, rel=0.001, abs=1024
    )
    assert forward == pytest.approx(measured.forward_peak, rel=0.001, abs=scratch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_compiled_rank_takes_the_bytes_that_its_graph_predicts(
    sharded: Sharded, groups: tuple[str, str, str], name: str, index: int, precision: Precision
):
    torch.compiler.reset()  # after many other compilations in one process torch runs things eagerly
    measured, cost = measured_and_predicted(sharded, groups, name, index, precision, compiled=True)
    forward, backward = peaks(cost)
    assert cost.saved_bytes.at(MICRO, SEQUENCE) == pytest.approx(measured.saved, rel=0.1, abs=1024)
    assert forward == pytest.approx(measured.forward_peak, rel=0.1)
    low, high = measured.backward_peak - measured.gradients, measured.backward_peak
    assert low * 0.9 <= backward <= high * 1.1
