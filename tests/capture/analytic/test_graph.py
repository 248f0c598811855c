"""A graph that is computed from a configuration equals the one that is captured from the model."""

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from factories import catalog_graph
from windlass.capture.analytic import (
    analytic_graph,
    analytic_tensor_shards,
    check_analytic_degrees,
)
from windlass.capture.capture_layers import (
    capture_graph,
    capture_tensor_shards,
    check_tensor_degrees,
)
from windlass.models import catalog
from windlass.models.build import build_layer_stack
from windlass.models.config import ExpertConfig, TransformerConfig
from windlass.models.inspection.shape_inference import fake_state
from windlass.models.layer_stack import LayerStack, layer_stack_from_module
from windlass.models.positions.rope_scaling import RopeScaling
from windlass.models.transformer import build_transformer
from windlass.schema.graph import PRECISION_BYTES, Graph
from windlass.schema.sparsity import SparsityRequest
from windlass.schema.tensor_grid import TensorGrid

SMALL = {"layers": 2, "width": 48, "heads": 4, "vocabulary": 50, "sequence": 90}
FAMILIES: dict[str, tuple[dict[str, float], int]] = {
    "gpt-tiny": ({"dropout": 0.1}, TensorGrid(2, 2)),
    "gpt-j-6b": ({}, 4),
    "gpt-neox-20b": ({}, TensorGrid(1, 2)),
    "llama-tiny": ({"kv_heads": 2, "ffn": 66}, TensorGrid(2, 3)),  # heads divide by rows alone
    "llama3.2-1b": ({"kv_heads": 2}, 2),
    "qwen2.5-0.5b": ({"kv_heads": 2}, TensorGrid(1, 2)),
    "qwen3-0.6b": ({"kv_heads": 2}, TensorGrid(2, 3)),
    "gemma2-2b": ({"kv_heads": 2}, TensorGrid(1, 2)),
    "gemma3-1b": ({"kv_heads": 2, "layers": 7, "split_blocks": True}, 2),
    "bert-tiny": ({"split_blocks": True}, 2),
    "modernbert-base": ({"layers": 4}, TensorGrid(2, 2)),
}
"""Dials of models that together have every branch, and a tensor-parallel degree for each."""
FAST = {"gpt-tiny": 2}
"""The one that is captured in the default suite, in which the FLOP of all families are compared,
and a degree whose capture takes half the time of a grid's."""
SPARSE: dict[str, tuple[dict[str, float], dict[str, object]]] = {
    "llama-tiny": (
        {"kv_heads": 2, "ffn": 192},
        {"level": 0.5, "block": 16, "roles": {"key": 0.0, "projection": 0.0}},
    ),
    "gpt-neox-20b": ({}, {"level": 0.5, "block": 16, "pattern": "block-diagonal"}),
    "bert-tiny": ({"split_blocks": True}, {"level": 0.7, "pattern": "unstructured"}),
}
"""Dials and sparsity of models that together have blocks and masks, and every branch."""
EVERY_DEGREE = (
    2, 3, 4, 6, 8, 16, 32, 64, TensorGrid(2, 2), TensorGrid(4, 2), TensorGrid(2, 4),
    TensorGrid(1, 4), TensorGrid(8, 8), TensorGrid(6, 2),
)  # fmt: skip


def both(
    name: str,
    degrees: tuple[int, ...] = (),
    sparsity: SparsityRequest | None = None,
    **dials: float,
) -> tuple[Graph, Graph]:
    """The captured graph of a model and the computed one, with shards of some degrees."""
    stack = build_layer_stack(name, dials, device="meta", seed=0, sparsity=sparsity)
    config = catalog.apply_model_arguments(catalog.model_config(name), dials)
    config = replace(config, sparsity=sparsity)
    captured = capture_tensor_shards(stack, capture_graph(stack), degrees)
    return captured, analytic_tensor_shards(config, analytic_graph(config), degrees)


def assert_equal(captured: Graph, computed: Graph) -> None:
    """Compares op by op first, so that a failure says which one differs."""
    kinds = {1: (captured.kinds, computed.kinds)} | {
        degree: (kinds, computed.tensor_shards[degree])
        for degree, kinds in captured.tensor_shards.items()
    }
    for degree, (expected, found) in kinds.items():
        assert list(expected) == list(found)
        for name, kind in expected.items():
            costs = zip(
                (*kind.costs, *kind.selective_costs, *kind.fused_costs),
                (*found[name].costs, *found[name].selective_costs, *found[name].fused_costs),
                strict=True,
            )
            for one, other in costs:
                where = f"{name} in {one.precision} at degree {degree}"
                for op, computed_op in zip(
                    (*one.forward, *one.backward), (*other.forward, *other.backward), strict=False
                ):
                    assert op == computed_op, where
                assert one == other, where
    assert captured == computed
    assert captured.label == computed.label
    assert captured.to_json() == computed.to_json()


@pytest.mark.parametrize(
    ("name", "degree"),
    [
        *FAST.items(),
        *(pytest.param(name, each[1], marks=pytest.mark.slow) for name, each in FAMILIES.items()),
    ],
)
def test_a_computed_graph_and_its_shards_equal_the_captured_ones_to_the_byte(
    name: str, degree: int
):
    dials, _ = FAMILIES[name]

    captured, computed = both(name, (degree,), **{**SMALL, **dials})

    assert degree in captured.tensor_shards
    assert_equal(captured, computed)


EXPERTS: dict[str, dict[str, Any]] = {
    "loss": {"balance_loss": 0.01, "every": 2},
    "bias, capacity": {"balance_bias": 0.1, "capacity": 1.2, "scores": "sigmoid"},
    "gated shared": {"shared_ffn": 40, "shared_gate": True},
}
DEGREES = [
    ("gated shared", 1), ("gated shared", 2),
    ("loss", 2), ("loss", TensorGrid(2, 2)),
    ("bias, capacity", 2), ("bias, capacity", TensorGrid(1, 2)),
    ("gated shared", TensorGrid(2, 4)),  # the inner features divide by rows alone
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "degree"),
    [DEGREES[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in DEGREES[1:])],
)
def test_a_computed_graph_and_its_shards_have_the_ops_of_experts(kind: str, degree: int):
    config = catalog.apply_model_arguments(catalog.model_config("llama-tiny"), SMALL)
    config = replace(config, experts=ExpertConfig(count=4, ffn=24, **EXPERTS[kind]))
    with torch.device("meta"):
        module = build_transformer(config)
    stack = layer_stack_from_module(
        module, config.name, vocabulary=config.vocabulary, max_sequence=config.sequence
    )

    degrees = (degree,) if degree > 1 else ()
    captured = capture_tensor_shards(stack, capture_graph(stack), degrees)
    assert captured.tensor_shards.keys() == {*degrees}
    assert_equal(captured, analytic_tensor_shards(config, analytic_graph(config), degrees))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(type="linear", factor=4.0),
        RopeScaling(type="yarn", factor=4.0, original_sequence=64),
    ],
    ids=lambda scaling: scaling.type,
)
def test_a_computed_graph_has_the_ops_that_scale_rotary_angles(scaling: RopeScaling):
    config = catalog.apply_model_arguments(catalog.model_config("llama-tiny"), SMALL)
    config = replace(config, rope_scaling=scaling)
    with torch.device("meta"):
        module = build_transformer(config)
    stack = layer_stack_from_module(
        module, config.name, vocabulary=config.vocabulary, max_sequence=config.sequence
    )

    assert_equal(capture_graph(stack), analytic_graph(config))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPARSE)
def test_a_computed_sparse_graph_and_its_shards_equal_the_captured_ones_to_the_byte(name: str):
    dials, request = SPARSE[name]

    captured, computed = both(
        name, (2,), SparsityRequest.model_validate(request), **{**SMALL, "width": 64, **dials}
    )

    assert_equal(captured, computed)


def test_a_sparse_weight_has_the_flop_bytes_and_parameters_of_its_kept_blocks():
    sparsity = SparsityRequest(level=0.75, block=16)
    dense, sparse = (
        catalog_graph("gpt-tiny", sparsity=asked, **{**SMALL, "width": 128})
        for asked in (None, sparsity)
    )
    block, kept = (graph.kinds["block"] for graph in (dense, sparse))
    weights = sum(p.count for p in block.parameters if len(p.shape) == 2)

    assert block.parameter_count - kept.parameter_count == 0.75 * weights
    for cost, dense_cost in zip(kept.costs, block.costs, strict=True):
        for ops, dense_ops in (
            (cost.forward, dense_cost.forward), (cost.backward, dense_cost.backward),
        ):  # fmt: skip
            flop, dense_flop = (
                sum(op.flop.bs for op in each if op.kind == "matmul") for each in (ops, dense_ops)
            )
            assert flop == 0.25 * dense_flop
        # The section saves the inner features before the activation, and not those after it.
        inner = 4 * 128 * PRECISION_BYTES[cost.precision]
        assert cost.saved_bytes.bs == dense_cost.saved_bytes.bs - inner


@pytest.mark.slow
@pytest.mark.parametrize("name", catalog.text_model_names())
def test_every_catalog_model_has_the_graph_that_is_captured(name: str):
    captured, computed = both(name, EVERY_DEGREE, sequence=4096)

    assert_equal(captured, computed)


def test_a_degree_that_is_impossible_has_the_reasons_that_modules_give():
    degrees = (3, 5, 64, TensorGrid(2, 5), TensorGrid(3, 7), TensorGrid(1, 5), TensorGrid(8, 8))
    for name, (changes, _) in FAMILIES.items():
        dials = {**SMALL, "sequence": 4096, **changes}
        stack = build_layer_stack(name, dials, device="meta", seed=0)
        config = catalog.apply_model_arguments(catalog.model_config(name), dials)
        graph = analytic_graph(config)

        found = check_analytic_degrees(config, graph, degrees).unshardable

        assert found == check_tensor_degrees(stack, graph, degrees).unshardable
        assert found.keys() >= {3, 5, 64}


def test_a_graph_is_computed_without_torch():
    code = (
        "import sys; from windlass.capture import analytic_graph; "
        "from windlass.models import model_config; "
        "analytic_graph(model_config('gpt3-175b')); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def smallest_of_each_family() -> list[str]:
    """One model of each family of the catalog, the first."""
    by_family: dict[str, str] = {}
    for name in catalog.text_model_names():
        by_family.setdefault(catalog._entry(name)["family"], name)
    return list(by_family.values())


@pytest.mark.parametrize(
    "name",
    [
        name if name in smallest_of_each_family() else pytest.param(name, marks=pytest.mark.slow)
        for name in catalog.text_model_names()
    ],
)
def test_flop_equal_those_of_torchs_counter_on_every_catalog_model(name: str):
    stack = build_layer_stack(name, {"layers": 2}, device="meta", seed=0)
    config = catalog.apply_model_arguments(catalog.model_config(name), {"layers": 2})

    torch_and_experts = torch_counts(stack, 3, 129) + expert_flop(config, 3 * 129)
    assert analytic_graph(config).micro_batch_flop(3, 129) == torch_and_experts


def expert_flop(config: TransformerConfig, tokens: int) -> int:
    """FLOP of the chosen experts, whose operators torch's counter does not know.

    A gated expert has three products, and each has two more in the backward pass.
    """
    if config.experts is None:
        return 0
    rows = tokens * config.experts.per_token
    blocks = sum(config.experts.has_experts(block) for block in range(config.layers))
    return blocks * 3 * 3 * 2 * rows * config.width * config.experts.ffn


def torch_counts(stack: LayerStack, micro_batch: int, sequence: int) -> int:
    """FLOP of the whole stack by torch's own counter, which lacks only the CPU's attention."""
    aten = torch.ops.aten
    attention = {
        aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
            q, k, v
        ),
        aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *_, **__: (
            sdpa_backward_flop_count(g, q, k, v)
        ),
    }
    with FakeTensorMode(), FlopCounterMode(display=False, custom_mapping=attention) as counter:
        x: Tensor = torch.zeros(micro_batch, sequence, dtype=torch.int64)
        for layer in stack.layers:
            x = functional_call(layer, fake_state(layer), (x,))
        targets = torch.zeros(micro_batch * sequence, dtype=torch.int64)
        functional.cross_entropy(x.float().flatten(0, 1), targets).backward()
    return counter.get_total_flops()
