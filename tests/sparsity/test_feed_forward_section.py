"""The feed-forward section, against the same layers one after the other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.sparsity import feed_forward_section
from windlass.sparsity.block_sparse_linear import BlockPart, BlockSparseLinear
from windlass.sparsity.feed_forward_section import block_feed_forward

WIDTH, INNER = 128, 384
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-6}
"""Largest error relative to the largest element, against both layers in float64: float32 sums of up
to 700 tokens, and three roundings to 2^-9 on the way in bfloat16."""


def layers(dtype: torch.dtype, *, block: int = 32, bias: bool = True) -> list[BlockSparseLinear]:
    torch.manual_seed(0)
    up, down = (
        BlockSparseLinear(
            inputs, outputs, bias=bias, block=block, parts=[BlockPart(outputs // block, kept)]
        )
        for inputs, outputs, kept in ((WIDTH, INNER, 2), (INNER, WIDTH, 6))
    )
    return [layer.to(dtype) for layer in (up, down)]


def one_by_one(x: Tensor, up: nn.Module, down: nn.Module, *, approximate: str) -> Tensor:
    return down(functional.gelu(up(x), approximate=approximate))


def results(
    run: Callable[..., Tensor | None], x: Tensor, up: nn.Module, down: nn.Module, approximate: str
) -> list[Tensor]:
    """The outputs and all gradients, in float64."""
    x = x.clone().requires_grad_()
    y = run(x, up, down, approximate=approximate)
    assert y is not None
    wanted = [x, *up.parameters(), *down.parameters()]
    given = torch.linspace(0.1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return [each.double() for each in (y, *torch.autograd.grad(y, wanted, given))]


@pytest.mark.parametrize("tokens", [1, 129, 700])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_section_equals_its_layers_one_by_one(dtype: torch.dtype, approximate: str, tokens: int):
    up, down = layers(dtype)
    x = torch.randn(1, tokens, WIDTH, dtype=dtype)

    found = results(block_feed_forward, x, up, down, approximate)

    exact = results(one_by_one, x.double(), up.double(), down.double(), approximate)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).abs().max() <= TOLERANCE[dtype] * other.abs().max()


@pytest.mark.parametrize("bias", [True, False])
def test_without_compiled_code_it_runs_layer_by_layer(monkeypatch: pytest.MonkeyPatch, bias: bool):
    up, down = layers(torch.float32, bias=bias)
    x = torch.randn(2, 50, WIDTH)
    compiled = results(block_feed_forward, x, up, down, "none")
    monkeypatch.setattr(feed_forward_section, "_load", lambda: None)

    found = results(block_feed_forward, x, up, down, "none")

    for one, other in zip(found, compiled, strict=True):
        assert (one - other).abs().max() <= TOLERANCE[torch.float32] * other.abs().max()


def test_it_saves_inner_features_once():
    up, down = layers(torch.float32)
    x, sizes = torch.randn(65, WIDTH, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        block_feed_forward(x, up, down, approximate="none")
    assert sizes.count(65 * INNER) == 1


def test_threads_change_no_bit():
    up, down = layers(torch.float32)
    x, threads = torch.randn(300, WIDTH), torch.get_num_threads()
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(results(block_feed_forward, x, up, down, "none"))
    torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_evaluation_keeps_nothing_and_gives_the_same(dtype: torch.dtype):
    up, down = layers(dtype)
    x = torch.randn(100, WIDTH, dtype=dtype)
    with torch.no_grad():
        y = block_feed_forward(x, up, down, approximate="none")
    assert y is not None
    assert torch.equal(y, results(block_feed_forward, x, up, down, "none")[0].to(dtype))


def test_layers_that_are_watched_dense_or_of_other_blocks_run_by_themselves():
    up, down = layers(torch.float32)
    x = torch.randn(4, WIDTH)
    assert block_feed_forward(x, nn.Linear(WIDTH, INNER), down, approximate="none") is None
    other = layers(torch.float32, block=64)[1]
    assert block_feed_forward(x, up, other, approximate="none") is None
    up.register_forward_hook(lambda *_: None)
    assert block_feed_forward(x, up, down, approximate="none") is None
