"""Scores of absent blocks: norms of the dense gradient, from the ordinary backward pass."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from windlass.models.layer_stack import LayerStack
from windlass.runtime.block_scores import block_norms
from windlass.runtime.layer_templates import LayerTemplate
from windlass.schema.sparsity import SparsityRequest
from windlass.sparsity.block_sparse_linear import BlockSparseLinear

BLOCK = 16
CLOSE = 1e-5
"""Relative tolerance: sums of a few hundred products, rounded to 6e-8 each, in another order."""


@pytest.fixture
def block(gpt: Callable[..., LayerStack]) -> nn.Module:
    """A transformer block whose linear layers keep half of their blocks."""
    return gpt(width=64, sparsity=SparsityRequest(level=0.5, block=BLOCK)).layers[1]


def scores_of(template: LayerTemplate, layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The scores that a backward pass gives."""
    weights = [weight.detach().requires_grad_() for weight in layer.parameters()]
    y = template(weights, list(layer.buffers()), None, x, seed=1)
    return list(torch.autograd.grad(y.square().sum(), template.score_leaves))


def dense_gradient_norms(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Squared norms of the blocks of each dense gradient, by torch's own linear layers."""
    dense = copy.deepcopy(layer)
    linears = []
    for path, module in list(dense.named_modules()):
        if isinstance(module, BlockSparseLinear):
            linear = nn.Linear(module.in_features, module.out_features)
            linear.weight = nn.Parameter(module.dense_weight().detach())
            linear.bias = module.bias
            owner, _, leaf = path.rpartition(".")
            setattr(dense.get_submodule(owner), leaf, linear)
            linears.append(linear)
    dense(x).square().sum().backward()
    grids = [
        each.weight.grad.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)) for each in linears
    ]
    return [grid.square().sum((1, 3)) for grid in grids]


def test_scores_are_the_block_norms_of_the_dense_gradient(block: nn.Module) -> None:
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(0))
    template = LayerTemplate(block, last=False, compiled=False)
    template.score_blocks(torch.device("cpu"))
    template.ask_for_scores(active=True)

    scores = scores_of(template, block, x)

    expected = dense_gradient_norms(block, x)
    assert len(scores) == len(expected) == 4
    for one, other in zip(scores, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE * float(other.max()))


def test_scores_and_norms_of_float64_are_no_less_wide(block: nn.Module) -> None:
    template = LayerTemplate(block, last=False, compiled=False)
    template.score_blocks(torch.device("cpu"), torch.float64)
    template.ask_for_scores(active=True)
    wide = copy.deepcopy(block).double()
    scores = scores_of(template, wide, torch.randn(2, 16, 64, dtype=torch.float64))
    assert {score.dtype for score in scores} == {torch.float64}
    values = torch.rand(3, BLOCK, BLOCK, dtype=torch.float64)
    assert block_norms(values).tolist() == [float(each.norm()) for each in values]


def test_scores_are_zero_at_steps_that_need_none(block: nn.Module) -> None:
    template = LayerTemplate(block, last=False, compiled=False)
    template.score_blocks(torch.device("cpu"))
    assert not any(score.any() for score in scores_of(template, block, torch.randn(2, 16, 64)))


def test_a_template_has_no_scores_unless_they_are_asked_for(block: nn.Module) -> None:
    assert LayerTemplate(block, last=False, compiled=False).score_leaves == ()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_compiled_code_gives_the_same_scores_and_is_not_compiled_again(block: nn.Module) -> None:
    x = torch.randn(2, 16, 64)
    eager, compiled = (LayerTemplate(block, last=False, compiled=c) for c in (False, True))
    for template in (eager, compiled):
        template.score_blocks(torch.device("cpu"))
    assert not any(score.any() for score in scores_of(compiled, block, x))
    with torch.compiler.set_stance("fail_on_recompile"):
        for template in (eager, compiled):
            template.ask_for_scores(active=True)
        for one, other in zip(
            scores_of(eager, block, x), scores_of(compiled, block, x), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=CLOSE, atol=CLOSE * float(one.max()))
        for buffer in block.buffers():
            buffer.copy_(buffer.flip(0))  # another mask
        scores_of(compiled, block, x)
