"""Counts the parameters of a model from its configuration, without torch and without a trace."""

from math import prod

from windlass.capture.analytic.modules.transformer import LayerType, layer_sequence, layer_types
from windlass.capture.analytic.ops.collectives import Rank
from windlass.capture.analytic.record import layer_scope
from windlass.models import ResNetConfig, TransformerConfig


def parameter_count(config: TransformerConfig | ResNetConfig) -> int:
    """Number of parameters, as the graph of the model counts them: what layers share counts once.

    Args:
        config: the model, of tokens or of images.
    """
    if isinstance(config, ResNetConfig):
        return _count_resnet(config)
    counts = {layer: _count_layer(layer) for layer in layer_types(config)}
    if config.image is None:
        return sum(counts[layer] for layer in layer_sequence(config))
    blocks = sum(counts[layer] for layer in layer_sequence(config) if layer.place == "inner")
    return blocks + _count_image_ends(config)


def _count_layer(layer: LayerType) -> int:
    scope = layer_scope(layer, Rank(), "float32")
    layer.build(scope)
    return sum(prod(info.shape) for info, _ in scope.parameters if info.tied_to is None)


def _count_image_ends(config: TransformerConfig) -> int:
    """The patches, class token, positions, final norm and classes of a vision transformer."""
    d, classes = config.width, config.vocabulary
    patches = d * (config.image_shape[0] * config.patch**2 + 1)
    head = classes * (d + config.head_bias)
    return patches + (1 + config.sequence) * d + 2 * d + head


def _count_resnet(config: ResNetConfig) -> int:
    count = _convolution(config.image[0], config.stem_width, 3 if config.stem == "small" else 7)
    inputs = config.stem_width
    for stage, (depth, outputs) in enumerate(zip(config.depths, config.widths, strict=True)):
        halves = stage > 0 or config.halves_first_stage
        if depth and (halves or inputs != outputs):
            count += _convolution(inputs, outputs, 1)  # the shortcut
        for _ in range(depth):
            count += _count_residual_branch(inputs, outputs, is_bottleneck=config.bottleneck)
            inputs = outputs
    return count + config.classes * (inputs + 1)


def _count_residual_branch(inputs: int, outputs: int, *, is_bottleneck: bool) -> int:
    if not is_bottleneck:
        return _convolution(inputs, outputs, 3) + _convolution(outputs, outputs, 3)
    inner = outputs // 4
    ends = _convolution(inputs, inner, 1) + _convolution(inner, outputs, 1)
    return ends + _convolution(inner, inner, 3)


def _convolution(inputs: int, outputs: int, size: int) -> int:
    """A convolution without bias, and the two parameters a channel of the norm behind it."""
    return outputs * (inputs * size**2 + 2)
