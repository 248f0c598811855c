"""Finds a layer in which a token sees the tokens after it, by changing the last one."""

import torch
from torch import Tensor, nn

from windlass.models.layer_stack import LayerStack

_SEQUENCE = 8
_TOLERANCE = 1e-4
"""Difference that counts, as a share of the largest output; rounding leaves much less."""


def layer_that_looks_ahead(stack: LayerStack) -> str | None:
    """The first layer whose output for a token depends on a later token, such as "`1`, a `Block`".

    Layers of one kind are alike, so the first of each is tried.

    Args:
        stack: a model with real weights. Those that are zero become random, because a branch that
            begins at zero would hide what it sees.

    Returns:
        None if no layer does, or one cannot be tried alone.
    """
    length = min(_SEQUENCE, stack.max_sequence or _SEQUENCE)
    outputs: dict[str, Tensor] = {}
    x = torch.zeros((2, length), dtype=torch.int64)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for name, kind, layer in zip(stack.names, stack.kinds, stack.layers, strict=True):
            if kind not in outputs:
                try:
                    outputs[kind], sees_ahead = _try_layer(layer.eval(), x)
                except Exception:  # noqa: BLE001  the user's code may raise anything
                    return None
                if sees_ahead:
                    return f"`{name}`, a `{type(layer).__name__}`"
            x = outputs[kind]
    return None


def _try_layer(layer: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
    """The output for `x[b s ...]`, and whether another last token changes that of earlier ones."""
    for parameter in layer.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.normal_(std=0.1)
    changed = x.clone()
    if x.is_floating_point():
        changed[:, -1] += torch.randn_like(x[:, -1])
    else:
        changed[:, -1] += 1
    output = layer(x)
    difference = (output - layer(changed))[:, :-1].abs().max()
    return output, bool(difference > _TOLERANCE * output.abs().max())
