"""Where the frozen weights of a model stand in files, and in which numbers."""

import torch

from windlass.models.huggingface.weight_places import WeightPlace
from windlass.models.layer_stack import LayerStack
from windlass.schema import Precision

_FORMATS: dict[torch.dtype, Precision] = {
    torch.float64: "float64", torch.float32: "float32", torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}  # fmt: skip


def base_places(stack: LayerStack) -> dict[str, WeightPlace]:
    """Where all frozen weights stand, by full name; none if one of them stands nowhere as it is."""
    source = stack.weights
    shapes = {
        f"{name}.{path}": tuple(parameter.shape)
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, parameter in layer.named_parameters()
        if not parameter.requires_grad and f"{name}.{path}" not in stack.tied_weights
    }
    if source is None or not shapes.keys() <= source.parameters:
        return {}
    found = {name: source.place(name) for name in shapes}
    places = {name: place for name, place in found.items() if place is not None}
    return places if {n: place.shape for n, place in places.items()} == shapes else {}


def base_format(stack: LayerStack) -> Precision | None:
    """The numbers that can hold all frozen weights as they stand in files; None as above."""
    dtypes = {place.torch_dtype for place in base_places(stack).values()}
    if not dtypes <= _FORMATS.keys() or not dtypes:
        return None
    widest, *others = dtypes
    for each in others:
        widest = torch.promote_types(widest, each)
    return _FORMATS[widest]
