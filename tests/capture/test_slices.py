"""What a graph says of slices is what a slice of the layer does."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from measuring import Weighed, weigh
from torch.testing._internal.distributed.fake_pg import FakeStore

from windlass.capture.capture_layers import capture_tensor_shards
from windlass.models.layer_stack import LayerStack, layer_sharding
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.models.tensor_parallel.shard_module import shard_layer
from windlass.models.tensor_parallel.shard_params import param_shards
from windlass.schema.graph import PRECISION_BYTES, Graph, LayerCost, LayerKind, Precision
from windlass.schema.tensor_grid import TensorGrid, grid_columns

Captured = Callable[..., tuple[LayerStack, Graph]]

SMALL = {"layers": 1, "width": 256, "heads": 4, "vocabulary": 3000, "sequence": 160}
GROUPED = {**SMALL, "heads": 8, "kv_heads": 4, "ffn": 672}
FAMILIES = {"gpt-tiny": SMALL, "gpt-neox-20b": SMALL, "llama-tiny": GROUPED}
GRID = TensorGrid(2, 2)
UNEVEN = {**SMALL, "vocabulary": 3001}
MICRO, SEQUENCE, WIDTH = 3, 128, 256


@pytest.fixture(scope="module")
def cut(captured: Captured) -> Callable[..., tuple[LayerStack, Graph]]:
    """`cut(name, 2, 4, layers=1)`: a chain without memory, and its graph in 2 and 4 slices."""
    known: dict[str, tuple[LayerStack, Graph]] = {}

    def found(name: str, *degrees: int, **dials: int) -> tuple[LayerStack, Graph]:
        key = f"{name} {degrees} {dials}"
        if key not in known:
            chain, graph = captured(name, **dials)
            known[key] = chain, capture_tensor_shards(chain, graph, degrees)
        return known[key]

    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_pass_of_a_block_gathers_and_scatters_all_tokens_twice_each(cut: Captured, name: str):
    """Of `b s d` numbers each. Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2."""
    chain, graph = cut(name, 2, 4, **FAMILIES[name])
    for degree in (2, 4):
        kind = graph.shard(degree).kinds[chain.kinds[1]]
        for cost in kind.costs:
            whole = MICRO * SEQUENCE * WIDTH * PRECISION_BYTES[cost.precision]
            for ops in (cost.forward, cost.backward):
                found = [op.collective for op in ops if op.collective is not None]
                assert (
                    sorted(each.kind for each in found)
                    == ["all_gather"] * 2 + ["reduce_scatter"] * 2
                )
                assert all(each.nbytes.at(MICRO, SEQUENCE) == whole for each in found)


def test_a_block_in_a_grid_exchanges_tokens_in_columns_and_features_in_rows(cut: Captured):
    """Of 2 rows and 2 columns: `d/c` of each token, and `f/r` of what is cut inside."""
    chain, graph = cut("gpt-tiny", 2, 4, GRID, **SMALL)
    cost = graph.shard(GRID).kinds[chain.kinds[1]].cost("float32", compiled=False)
    number = MICRO * SEQUENCE * 4
    d = number * WIDTH // 2
    region = [("all_gather", "tokens", d), ("reduce_scatter", "tokens", d)]
    # Queries, keys and values leave the column side by side, and the hidden features are 4 d.
    features = [
        ("reduce_scatter", 3 * d),
        ("all_gather", d),
        ("reduce_scatter", 4 * d),
        ("all_gather", 4 * d),
    ]
    moments = [("all_reduce", "features", 3 * number // 2)] * 2  # of own tokens
    due = region * 2 + [(how, "features", nbytes) for how, nbytes in features]
    found = [
        (op.collective.kind, op.collective.axis, op.collective.nbytes.at(MICRO, SEQUENCE))
        for op in cost.forward
        if op.collective is not None
    ]
    assert sorted(found) == sorted(due + moments)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_embedding_sums_its_rows_and_the_head_gathers_its_input(cut: Captured, name: str):
    chain, graph = cut(name, 2, 4, **FAMILIES[name])
    kinds = graph.shard(2).kinds
    first, last = (kinds[chain.kinds[at]].cost("float32", compiled=False) for at in (0, -1))
    tokens = MICRO * SEQUENCE
    whole, number = tokens * WIDTH * 4, tokens * 4
    assert exchanged(first) == ([("all_reduce", whole)], [("all_reduce", whole)])
    # The largest logit, then the sum of exponentials and the target's logit together.
    losses = [("all_reduce", number), ("all_reduce", 2 * number)]
    assert exchanged(last) == ([("all_gather", whole), *losses], [("reduce_scatter", whole)])


def exchanged(cost: LayerCost) -> tuple[list[tuple[str, float]], list[tuple[str, float]]]:
    forward, backward = (
        [(op.collective.kind, op.collective.nbytes.at(MICRO, SEQUENCE)) for op in ops if op.collective]
        for ops in (cost.forward, cost.backward)
    )
    return forward, backward


@pytest.mark.parametrize("name", FAMILIES)
def test_products_and_attention_of_all_slices_are_those_of_the_whole(cut: Captured, name: str):
    _, graph = cut(name, 2, 4, GRID, **FAMILIES[name])
    for degree in (2, 4, GRID):
        sliced_flop = degree * graph.shard(degree).micro_batch_flop(MICRO, SEQUENCE)
        assert sliced_flop == graph.micro_batch_flop(MICRO, SEQUENCE)


@pytest.mark.parametrize("degree", [2, 4, GRID])
def test_a_slice_has_the_parameters_of_its_pieces_also_of_an_uneven_vocabulary(
    cut: Captured, degree: int
):
    chain, graph = cut("gpt-tiny", 2, 4, GRID, **UNEVEN)
    for index in range(degree):
        kinds = graph.shard(degree, index).kinds
        for at, kind in enumerate(chain.kinds):
            place = TensorParallelRank(degree=int(degree), index=index, columns=grid_columns(degree))
            due = param_shards(chain.layers[at], layer_sharding(chain, at), place)
            assert {p.name: (p.shape, p.replicated_over) for p in kinds[kind].parameters} == {
                name: (piece.shape, piece.replicated_over) for name, piece in due.items()
            }


def test_degrees_that_cannot_be_are_noted_with_the_way_out(cut: Captured):
    _, graph = cut("llama-tiny", 3, 8, **GROUPED)
    assert not graph.tensor_shards
    assert all("take a degree that divides" in graph.unshardable[degree][0] for degree in (3, 8))
    _, short = cut("gpt-tiny", 4, **{**SMALL, "sequence": 16})
    assert short.unshardable[4] == (
        (
            "model `gpt-tiny` takes sequences of at most 16 tokens, must take 21 to be measured in "
            "4 slices; lower the degree"
        ),
    )


def test_a_slice_looks_rows_up_as_its_whole_layer_does(cut: Captured):
    chain, graph = cut("gpt-tiny", 2, 4, **SMALL)
    kinds = [graph.shard(degree).kinds[chain.kinds[0]] for degree in (1, 2, 4)]
    assert all(kind.is_embedding for kind in kinds)
    assert [rows(kind) for kind in kinds] == [MICRO * 4 * WIDTH] * 3


def rows(kind: LayerKind) -> int:
    return kind.pass_gradient_elements(MICRO, 4)[0]


@pytest.fixture(scope="module")
def groups() -> Iterator[tuple[str, str, str]]:
    """Torch's own stand-ins for process groups: they allocate as any, and send nothing.

    Of four slices, of a grid's first column and of its first row.
    """
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    assert dist.group.WORLD is not None
    column, row = dist.new_group([0, 2]), dist.new_group([0, 1])
    yield dist.group.WORLD.group_name, column.group_name, row.group_name
    dist.destroy_process_group()


def seen_and_said(
    cut: Captured, groups: tuple[str, str, str], name: str, index: int, precision: Precision, *,
    compiled: bool, selectively: bool = False, slices: int = 4,
) -> tuple[Weighed, LayerCost]:  # fmt: skip
    """Bytes of the first of four slices of a layer, run, and its graph."""
    chain, graph = cut(name, 2, 4, GRID, **FAMILIES[name])
    whole, column, row = groups
    columns = grid_columns(slices)
    place = TensorParallelRank(
        degree=4, columns=columns, group_name=whole, column_group_name=column, row_group_name=row
    )  # fmt: skip
    twins = tuple(
        shard_layer(layer, layer_sharding(chain, at), place, last=at == 2).to_empty(device="cpu")
        for at, layer in enumerate(chain.layers)
    )
    seen = weigh(
        replace(chain, layers=twins),
        index,
        getattr(torch, precision),
        micro=MICRO,
        sequence=SEQUENCE,
        compiled=compiled,
        selectively=selectively,
        rows=place.rows,
        columns=columns,
    )
    kind = graph.shard(slices).kinds[chain.kinds[index]]
    return seen, kind.cost(precision, compiled=compiled, selective=selectively)


def peaks(cost: LayerCost) -> tuple[float, float]:
    forward, backward = (
        max(op.live_bytes.at(MICRO, SEQUENCE) for op in ops)
        for ops in (cost.forward, cost.backward)
    )
    return forward, backward


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("slices", [4, GRID], ids=str)
def test_a_slice_run_as_written_takes_the_bytes_that_its_graph_says(
    cut: Captured, groups: tuple[str, str, str], name: str, index: int, precision: Precision,
    slices: int,
):  # fmt: skip
    seen, cost = seen_and_said(cut, groups, name, index, precision, compiled=False, slices=slices)
    forward, backward = peaks(cost)
    # In bfloat16 attention sums in hidden float32: so much for each of two threads.
    scratch = 48 * 2**10 * 2 if precision == "bfloat16" else 1024
    assert cost.saved_bytes.at(MICRO, SEQUENCE) == pytest.approx(seen.kept, rel=0.001, abs=1024)
    assert forward == pytest.approx(seen.forward_peak, rel=0.001, abs=scratch)
    # The caller counts gradients of parameters.
    low, high = seen.backward_peak - seen.gradients, seen.backward_peak
    assert low * 0.98 - scratch <= backward <= high * 1.02


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
@pytest.mark.parametrize("slices", [4, GRID], ids=str)
def test_a_slice_that_keeps_only_large_products_keeps_the_bytes_that_its_graph_says(
    cut: Captured, groups: tuple[str, str, str], name: str, precision: Precision, slices: int
):
    seen, cost = seen_and_said(
        cut, groups, name, 1, precision, compiled=False, selectively=True, slices=slices
    )
    forward, _ = peaks(cost)
    scratch = 48 * 2**10 * 2 if precision == "bfloat16" else 1024
    assert cost.saved_bytes.at(MICRO, SEQUENCE) == pytest.approx(seen.kept, rel=0.001, abs=1024)
    assert forward == pytest.approx(seen.forward_peak, rel=0.001, abs=scratch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny"])
def test_a_compiled_slice_takes_the_bytes_that_its_graph_says(
    cut: Captured, groups: tuple[str, str, str], name: str, index: int, precision: Precision
):
    torch.compiler.reset()  # after many other compilations in one process torch runs things eagerly
    seen, cost = seen_and_said(cut, groups, name, index, precision, compiled=True)
    forward, backward = peaks(cost)
    assert cost.saved_bytes.at(MICRO, SEQUENCE) == pytest.approx(seen.kept, rel=0.1, abs=1024)
    assert forward == pytest.approx(seen.forward_peak, rel=0.1)
    low, high = seen.backward_peak - seen.gradients, seen.backward_peak
    assert low * 0.9 <= backward <= high * 1.1
