"""Reading a module as a layer stack."""

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn

from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import layer_stack_from_module, materialize_layer


class Residual(nn.Module):
    def __init__(self, width: int = 8, slope: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.activation = nn.LeakyReLU(slope)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.activation(self.linear(x))


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, 8)
        self.places = nn.Embedding(16, 8)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))


def model(*blocks: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(enter=Positions(), blocks=nn.Sequential(*blocks), leave=nn.Linear(8, 40))
    )


def test_nested_sequences_become_one_stack_with_the_names_of_the_state_dict():
    module = model(Residual(), Residual())

    stack = layer_stack_from_module(module, "mine")

    assert stack.names == ("enter", "blocks.0", "blocks.1", "leave")
    full = {
        f"{name}.{path}"
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, _ in layer.named_parameters()
    }
    assert full == set(module.state_dict())


def test_vocabulary_and_longest_sequence_are_found():
    stack = layer_stack_from_module(model(Residual()), "mine")

    assert (stack.vocabulary, stack.max_sequence) == (40, 16)


def test_equal_layers_are_one_kind():
    assert (
        len(set(layer_stack_from_module(model(Residual(), Residual(), Residual()), "mine").kinds))
        == 3
    )


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(lambda: Residual(slope=0.2), id="a setting deep inside"),
        pytest.param(lambda: Residual().to(torch.float64), id="another dtype"),
        pytest.param(lambda: Residual().eval(), id="another mode"),
        pytest.param(lambda: nn.Linear(8, 8), id="another type"),
        pytest.param(lambda: hooked(Residual()), id="a hook"),
        pytest.param(lambda: frozen(Residual()), id="a weight that does not learn"),
    ],
)
def test_layers_that_differ_are_not_one_kind(other: Callable[[], nn.Module]):
    twin = other()
    module = nn.Sequential(Positions(), Residual(), twin, nn.Linear(8, 40))

    kinds = layer_stack_from_module(module, "mine", vocabulary=40).kinds

    assert len(set(kinds)) == 4


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def frozen(module: nn.Module) -> nn.Module:
    next(module.parameters()).requires_grad_(False)
    return module


def test_a_shared_weight_is_tied_to_its_first_occurrence():
    module = model(Residual())
    module.leave.weight = module.enter.tokens.weight

    assert layer_stack_from_module(module, "mine").tied_weights == {
        "leave.weight": "enter.tokens.weight"
    }


def test_all_weights_of_a_repeated_layer_are_tied():
    block = Residual()

    ties = layer_stack_from_module(model(block, block), "mine").tied_weights

    assert ties == {
        "blocks.1.linear.weight": "blocks.0.linear.weight",
        "blocks.1.linear.bias": "blocks.0.linear.bias",
    }


def test_a_module_that_is_no_sequence_is_refused_with_a_hint():
    with pytest.raises(ModelError, match=r"a `Residual`.*return an `nn\.Sequential`"):
        layer_stack_from_module(Residual(), "mine")


def test_layers_that_do_not_fit_together_are_named():
    with pytest.raises(ModelError, match=r"layer `blocks\.1` of model `mine` does not take"):
        layer_stack_from_module(model(Residual(), Residual(9)), "mine")


def test_a_stack_that_gives_no_logits_is_refused():
    module = nn.Sequential(nn.Embedding(4, 8), nn.Flatten())

    with pytest.raises(ModelError, match=r"gives \[2, 32\] for tokens \[2, 4\]"):
        layer_stack_from_module(module, "mine")


def test_a_module_without_reset_parameters_cannot_be_built_alone():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    with torch.device("meta"):
        module = nn.Sequential(nn.Embedding(4, 8), Scale(), nn.Linear(8, 4))

    with pytest.raises(ModelError, match="`1`, a `Scale`, has no `reset_parameters`"):
        materialize_layer(layer_stack_from_module(module, "mine"), 1, seed=0, device="cpu")


def test_a_layer_with_real_weights_is_returned_itself():
    stack = layer_stack_from_module(model(Residual()), "mine")
    assert materialize_layer(stack, 1, seed=5, device="cpu") is stack.layers[1]


def test_a_tied_parameter_that_its_owner_has_takes_no_memory_when_asked():
    stack = build_layer_stack("gpt-tiny", {}, device="meta", seed=1)
    tied = next(iter(stack.tied_weights))
    last = len(stack.layers) - 1

    bare = materialize_layer(stack, last, seed=1, device="cpu", tied=False)
    full = materialize_layer(stack, last, seed=1, device="cpu")

    path = tied.removeprefix(f"{stack.names[last]}.")
    assert bare.get_parameter(path).numel() == 0
    for name, parameter in bare.named_parameters():
        if name != path:
            assert torch.equal(parameter, full.get_parameter(name))
