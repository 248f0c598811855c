"""Models of images in the catalog: their sizes, and what they refuse."""

import pytest
import torch

from windlass.errors import ModelError
from windlass.models.build import build_layer_stack
from windlass.models.catalog import published_parameter_count


@pytest.mark.parametrize("name", ["vit-b16", "vit-l16", "resnet-18", "resnet-50"])
def test_parameters_are_as_many_as_published(name: str):
    stack = build_layer_stack(name, {}, device="meta")

    count = sum(weight.numel() for layer in stack.layers for weight in layer.parameters())

    assert count == published_parameter_count(name)


@pytest.mark.parametrize(
    ("name", "arguments", "shape"),
    [
        ("vit-tiny", {"input_shape": (3, 12, 20), "classes": 7, "patch": 4}, (3, 12, 20)),
        ("resnet-tiny", {"input_shape": (3, 12, 20), "classes": 7}, (3, 12, 20)),
    ],
)
def test_a_model_is_built_for_images_of_another_shape(
    name: str, arguments: dict[str, int], shape: tuple[int, ...]
):
    stack = build_layer_stack(name, arguments, device="cpu")
    x = torch.randn(2, *shape)
    for layer in stack.layers:
        x = layer(x)

    assert x.shape == (2, 7)
    assert stack.vocabulary == 7


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("vit-tiny", {"patch": 3}, "8 x 8 pixels are no whole number of patches of `patch` 3"),
        ("vit-tiny", {"vocabulary": 9}, "`vocabulary` is none of a model that takes images"),
        ("vit-tiny", {"input_shape": (8, 8)}, r"must be channels, height and width"),
        ("gpt-tiny", {"classes": 9}, "`classes` is of models such as BERT"),
        ("resnet-tiny", {"width": 9}, "`width` is none of a residual network"),
        ("resnet-tiny", {"input_shape": (8, 8)}, "must be channels, height and width"),
    ],
)
def test_arguments_that_a_model_does_not_have_are_refused(
    name: str, arguments: dict[str, int], words: str
):
    with pytest.raises(ModelError, match=words):
        build_layer_stack(name, arguments, device="meta")


def test_a_deviation_in_float64_is_that_of_plain_batch_norms():
    stack = build_layer_stack("resnet-tiny", {}, device="cpu")
    layer = stack.layers[0].double()
    for norm in layer.modules():
        if isinstance(norm, torch.nn.BatchNorm2d):
            plain = torch.nn.BatchNorm2d(norm.num_features).double()
            norm.running_mean, norm.running_var = (
                norm.running_mean.float(),
                norm.running_var.float(),
            )
            x = torch.randn(4, norm.num_features, 3, 3, dtype=torch.float64)

            assert torch.allclose(norm(x), plain(x), atol=1e-12)
            # Kept in float32.
            assert torch.allclose(norm.running_var.double(), plain.running_var, rtol=1e-6)
