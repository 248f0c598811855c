"""Fake tensors take the same path through torch as real ones."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from measured_memory import make_input, runner
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack
from windlass.schema.graph import Graph

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v)
    ),
}


SMALL = {"layers": 1, "vocabulary": 500}
QUICK = (
    ("gpt-tiny", 0, "float32"), ("gpt-tiny", 1, "bfloat16"), ("gpt-tiny", 2, "float32"),
    ("gpt-tiny", 2, "bfloat16"),
)  # fmt: skip
"""A capture of one model in the fast suite, of which each layer is run."""


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        self.seen.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "index", "precision"),
    [
        pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
        for each in product(("gpt-tiny", "llama-tiny"), (0, 1, 2), ("float32", "bfloat16"))
    ],
)
def test_a_real_run_calls_the_ops_of_the_graph_in_their_order(
    captured: Callable[..., tuple[LayerStack, Graph]], name: str, index: int, precision: str
):
    stack = build_layer_stack(name, SMALL, device="cpu", seed=0)
    _, graph = captured(name, **SMALL)
    cost = graph.kinds[stack.kinds[index]].cost(precision, compiled=False)
    dtype = getattr(torch, precision)
    layer = stack.layers[index].to(dtype)
    weights = dict(layer.named_parameters())
    x = make_input(stack, index, 4, 100, dtype)
    run = runner(layer, loss=index == 2)

    for module in layer.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = True  # as in a run
    with Names() as names:
        y = run(weights, x)
        wanted = [*weights.values()] + [x] * x.requires_grad
        for gradient in torch.autograd.grad(y, wanted, torch.ones_like(y)):
            if gradient.is_sparse:
                gradient.coalesce()
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        run(weights, x).sum().backward()

    ops = (*cost.forward, *cost.backward)
    expected = [op.name for op in ops]
    assert [seen for seen in names.seen if seen in set(expected)] == expected
    assert sum(op.flop.at(4, 100) for op in ops) == counter.get_total_flops()
