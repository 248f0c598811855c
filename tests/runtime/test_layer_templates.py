"""Layer templates."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn import functional

from windlass.models.layer_stack import LayerStack
from windlass.models.loss import mean_cross_entropy
from windlass.models.tensor_parallel.collectives import TensorParallelRank
from windlass.runtime.keyed_dropout import DropoutKeys, layer_key, sample_keys
from windlass.runtime.layer_templates import LayerTemplate, layer_templates


def keys(step: int, layer: str, count: int = 2):
    return DropoutKeys(
        samples=sample_keys(0, step, 0, count),
        layer=layer_key(layer),
        active=torch.ones((), dtype=torch.int64),
    )


def test_a_template_has_the_output_of_its_layer(gpt: Callable[..., LayerStack]):
    stack = gpt()
    layer = stack.layers[1]
    x = torch.randn(2, 16, 32)
    template = LayerTemplate(layer, last=False, compiled=False)
    assert torch.equal(template(list(layer.parameters()), [], None, x, seed=0), layer(x))


def test_a_template_uses_no_memory(gpt: Callable[..., LayerStack]):
    for template in layer_templates(gpt(), compiled=False):
        assert all(tensor.is_meta for tensor in template._module.parameters())


def test_creating_a_template_does_not_change_the_layer(gpt: Callable[..., LayerStack]):
    stack = gpt(dropout=0.1)
    layer = stack.layers[1].eval()
    before = [type(module) for module in layer.modules()]
    LayerTemplate(layer, last=False, compiled=False)
    assert [type(module) for module in layer.modules()] == before
    assert not layer.training
    assert not any(parameter.is_meta for parameter in layer.parameters())


def test_layers_of_one_type_share_a_template(gpt: Callable[..., LayerStack]):
    templates = layer_templates(gpt(layers=4), compiled=False)
    assert len(templates) == 6
    assert len(set(map(id, templates))) == 3


def test_a_single_tensor_parallel_rank_has_the_full_layer(gpt: Callable[..., LayerStack]):
    stack = gpt()
    template = layer_templates(stack, compiled=False, tp_rank=TensorParallelRank(degree=1))[-1]
    x, y = torch.randn(2, 16, 32), torch.randint(0, 10, (2, 16))
    loss = template(list(stack.layers[-1].parameters()), [], None, x, y, seed=0)
    assert torch.equal(loss, mean_cross_entropy(stack.layers[-1](x), y))


def test_the_loss_of_float64_logits_is_computed_in_float64():
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.randint(0, 5, (2, 3))
    wanted = -logits.log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    assert abs(mean_cross_entropy(logits, targets) - wanted) < 1e-14


def test_the_last_template_returns_the_loss(gpt: Callable[..., LayerStack]):
    stack = gpt()
    layer = stack.layers[-1]
    x, y = torch.randn(2, 16, 32), torch.randint(0, 10, (2, 16))
    template = LayerTemplate(layer, last=True, compiled=False)
    loss = template(list(layer.parameters()), [], None, x, y, seed=0)
    assert torch.equal(loss, mean_cross_entropy(layer(x), y))


def test_twelve_blocks_and_several_steps_compile_once(
    gpt: Callable[..., LayerStack], monkeypatch: pytest.MonkeyPatch
):
    counter = CompileCounter()
    compile_with_torch = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_with_torch(f, backend=counter, **options)
    )
    stack = gpt(layers=12, dropout=0.1)
    templates = layer_templates(stack, compiled=True)
    for step in (1, 2):
        x = torch.randn(2, 16, 32)
        for index in range(1, 13):
            weights = [
                p.detach().clone().requires_grad_() for p in stack.layers[index].parameters()
            ]
            x = x.detach().requires_grad_()
            x = templates[index](weights, [], keys(step, stack.names[index]), x, seed=0)
    assert counter.frame_count == 1


def test_more_layer_types_compile_than_torch_caches_entries_per_code_object(
    gpt: Callable[..., LayerStack], monkeypatch: pytest.MonkeyPatch
):
    counter = CompileCounter()
    compile_with_torch = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f, **options: compile_with_torch(f, backend=counter, **options)
    )
    layer = gpt().layers[1]
    for width in range(9):
        template = LayerTemplate(layer, last=False, compiled=True)
        template(list(layer.parameters()), [], None, torch.randn(2, 2 + width, 32), seed=0)
    assert counter.frame_count == 9


class UnkeyedDropout(nn.Module):
    """Draws from torch's generator instead of from keys."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x * self.scale, 0.5, training=self.training)


@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_unkeyed_draws_depend_on_the_seed_only(compiled: bool):
    layer, x = UnkeyedDropout(), torch.ones(2, 8, 32)
    template = LayerTemplate(layer, last=False, compiled=compiled)
    before = torch.random.get_rng_state()
    outputs = [template([layer.scale], [], None, x, seed=seed) for seed in (5, 5, 6)]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(template.evaluate([layer.scale], [], x), x)
    assert torch.equal(template.raw_output([layer.scale], [], x), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, while it compiles
def test_a_wide_layer_with_dropout_compiles_forward_and_backward():
    layer = nn.Sequential(nn.LayerNorm(1024), nn.Dropout(0.1))
    template = LayerTemplate(layer, last=False, compiled=True)
    weights = [p.detach().requires_grad_() for p in layer.parameters()]
    x = torch.randn(1, 256, 1024, requires_grad=True)
    output = template(weights, [], keys(1, "wide", 1), x, seed=0)
    given = torch.autograd.grad(output.sum(), x)
    assert torch.isfinite(given[0]).all()


def test_a_parameter_with_two_names_in_a_layer_is_one_parameter():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.there, self.back = nn.Linear(3, 3), nn.Linear(3, 3)
            self.back.weight = self.there.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.back(self.there(x))

    layer, x = Twice(), torch.randn(2, 3)
    template = LayerTemplate(layer, last=False, compiled=False)
    output = template([p.detach() for p in layer.parameters()], [], None, x, seed=0)
    assert torch.equal(output, layer(x))
