"""Parameters are counted from a configuration as they are in the model that is built from it."""

import pytest

from windlass.capture.analytic import parameter_count
from windlass.capture.capture_layers import capture_graph
from windlass.models import catalog
from windlass.models.build import build_layer_stack

FAST = ("vit-tiny",)
"""The one that is captured in the default suite: blocks of a transformer, and ends of its own."""
FAMILIES = (
    "gpt-tiny", "moe-tiny", "gpt3-175b", "gpt-j-6b", "gpt-neox-20b", "llama3-405b", "llama3.2-1b",
    "mixtral-8x7b", "qwen2.5-7b", "qwen3-30b-a3b", "gemma3-1b", "bert-large", "modernbert-base",
    "vit-l16", "resnet-tiny", "resnet-18", "resnet-50",
)  # fmt: skip
"""One of each family, large ones among them."""


def counted(name: str) -> int:
    return parameter_count(catalog.resnet_config(name) or catalog.model_config(name))


@pytest.mark.parametrize(
    "name",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
        for name in catalog.model_names()
    ],
)
def test_parameters_are_as_many_as_in_the_captured_graph(name: str):
    graph = capture_graph(build_layer_stack(name, {}, device="meta", seed=0))

    assert counted(name) == graph.parameter_count


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_as_many_as_in_the_layers_that_are_built(name: str):
    stack = build_layer_stack(name, {}, device="meta", seed=0)
    weights = {
        f"{layer_name}.{path}": weight.numel()
        for layer_name, layer in zip(stack.names, stack.layers, strict=True)
        for path, weight in layer.named_parameters(remove_duplicate=False)
    }

    owned = weights.keys() - stack.tied_weights.keys()
    assert counted(name) == sum(weights[path] for path in owned)
