"""Graphs of models whose inputs are images or numbers, and whose hidden shapes change."""

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from windlass.capture.capture_layers import capture_graph
from windlass.models.build import build_layer_stack
from windlass.models.layer_stack import LayerStack, layer_stack_from_module

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: (
        sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, query, key, value, *_, **__: sdpa_backward_flop_count(
            gradient, query, key, value
        )
    ),
}
"""What torch's counter does not know of a CPU."""


def convolutions() -> nn.Module:
    """Images of 1 x 8 x 8 to 5 classes, with another shape behind each layer."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU()),
        nn.Sequential(nn.ConvTranspose2d(6, 3, 3, stride=2), nn.ReLU()),
        nn.Flatten(),
        nn.Linear(3 * 7 * 7, 5),
    )


def counted_flop(stack: LayerStack, batch: int) -> int:
    """What torch counts of a real forward and backward pass."""
    assert stack.examples is not None
    x = torch.randn(batch, *stack.examples.inputs)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        for layer in stack.layers:
            x = layer(x)
        x.sum().backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("name", ["convolutions", "vit-tiny"])
def test_flop_are_what_torch_counts(name: str):
    stack = (
        layer_stack_from_module(convolutions(), name, input_shape=(1, 8, 8))
        if name == "convolutions"
        else build_layer_stack(name, {"layers": 1}, device="cpu")
    )
    graph = capture_graph(stack)
    assert graph.examples is not None

    for batch in (1, 7):
        assert graph.micro_batch_flop(batch, graph.examples.positions) == counted_flop(stack, batch)


def test_every_boundary_has_the_bytes_of_its_own_shape():
    stack = layer_stack_from_module(convolutions(), "mine", input_shape=(1, 8, 8))

    graph = capture_graph(stack)

    costs = [kind.cost("float32", compiled=False) for kind in graph.layer_kinds()]
    sizes = [cost.output_bytes.at(3, 1) for cost in costs]
    shapes = [4 * 8 * 8] * 2 + [6 * 3 * 3] * 2 + [3 * 7 * 7] * 3
    assert sizes[:-1] == [3 * 4 * size for size in shapes]
    assert sizes[-1] == 4  # the loss
    assert graph.example_bytes(1, 4) == 4 * 64 + 8


def test_equal_modules_with_inputs_of_other_shapes_are_kinds_of_their_own():
    halving = [nn.MaxPool2d(2) for _ in range(2)]
    module = nn.Sequential(nn.Conv2d(1, 2, 1), *halving, nn.Flatten(), nn.Linear(8, 3))

    stack = layer_stack_from_module(module, "mine", input_shape=(1, 8, 8))

    assert stack.kinds == ("conv2d", "max_pool2d", "max_pool2d2", "flatten", "linear")
    assert capture_graph(stack).vocabulary == 3


def test_attention_says_how_many_positions_an_image_has():
    stack = build_layer_stack("vit-tiny", {"layers": 1, "patch": 4}, device="meta")

    assert stack.examples is not None
    assert stack.examples.positions == 1 + 2 * 2
