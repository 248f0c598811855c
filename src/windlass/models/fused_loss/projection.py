"""Makes a layer's last projection compute the loss, or logits of a padded vocabulary."""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.nn import functional

from windlass.models.fused_loss.linear_cross_entropy import linear_cross_entropy
from windlass.models.inspection.shape_inference import fake_state
from windlass.models.loss import has_own_loss
from windlass.models.sentences import token_output
from windlass.schema import VOCABULARY_MULTIPLE

_TARGETS = "targets"
_TOKENS = (2, 4)
"""Micro-batch and sequence of the trial run of a layer."""


class LossProjection(nn.Linear):
    """A projection to the vocabulary that gives the loss of `targets`, or logits without them."""

    targets: Tensor | None
    z_loss: float

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to the mean cross-entropy of `targets`, else to logits `[b s v]`."""
        if self.targets is None:
            return super().forward(x)
        return linear_cross_entropy(x, self.weight, self.bias, self.targets, self.z_loss)


class PaddedProjection(nn.Linear):
    """A projection to the vocabulary that accelerators compute in whole tiles.

    Tensor cores take about twice as long for a product with a side that is no multiple of 8, such
    as GPT-2's 50,257 entries. Rows of zeros follow a copy of the weight, and their logits are cut
    off: checkpoints hold the vocabulary as it is, and no loss sees more.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s d]` to logits `[b s v]`."""
        if x.is_cpu or x.is_meta:
            return super().forward(x)
        return padded_linear(x, self.weight, self.bias)


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`, computed with outputs up to a multiple of `VOCABULARY_MULTIPLE`.

    Args:
        x: `Float[b s d]`.
        weight: `Float[v d]`.
        bias: `Float[v]`, or None for none.
    """
    entries = weight.shape[0]
    rows = -entries % VOCABULARY_MULTIPLE
    weight = functional.pad(weight, (0, 0, 0, rows))
    bias = None if bias is None else functional.pad(bias, (0, rows))
    return functional.linear(x, weight, bias)[..., :entries]


def can_fuse_loss(layer: nn.Module, width: int) -> bool:
    """Whether what a layer says of tokens is what its last `nn.Linear` gives, without own loss.

    Args:
        layer: the last layer of a model, on any device; it runs on fake tensors.
    """
    path, projection = _last_linear(layer)
    if path is None or projection is None or has_own_loss(layer):
        return False
    outputs: list[Tensor] = []
    hook = projection.register_forward_hook(lambda *call: outputs.append(call[-1]))
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            y = functional_call(layer, fake_state(layer), (torch.empty(*_TOKENS, width),))
            return len(outputs) == 1 and outputs[0] is token_output(y)
    finally:
        hook.remove()


def fuse_loss(layer: nn.Module, z_loss: float = 0.0) -> str:
    """Makes the last `nn.Linear` of a layer a `LossProjection`.

    Args:
        layer: a layer for which `can_fuse_loss` is true; it is changed in place.
        z_loss: factor of the mean of `log^2 Z`, whose gradient is added.

    Returns:
        The name of the buffer that takes the targets, `Int[b s]`.
    """
    path, projection = _last_linear(layer)
    if path is None or projection is None:
        raise TypeError(f"`{type(layer).__name__}` has no `nn.Linear`")
    # Parameters, and what a subclass adds, stay as they are.
    projection.__class__ = LossProjection
    projection.register_buffer(_TARGETS, None, persistent=False)
    projection.z_loss = z_loss  # type: ignore[assignment]  # its class has just changed
    return f"{path}.{_TARGETS}" if path else _TARGETS


def pad_vocabulary(layer: nn.Module) -> None:
    """Lets accelerators pad the last `nn.Linear` of a layer, where its outputs are no whole tiles.

    Args:
        layer: the last layer of a model; it is changed in place.
    """
    _, projection = _last_linear(layer)
    if projection is not None and projection.out_features % VOCABULARY_MULTIPLE:
        projection.__class__ = PaddedProjection


def _last_linear(layer: nn.Module) -> tuple[str, nn.Linear] | tuple[None, None]:
    """The last plain `nn.Linear` of a layer with its name, in the order of definition."""
    found = [
        (path, module)
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
        and type(module).forward is nn.Linear.forward
        and "weight" in module._parameters  # noqa: SLF001  a parametrization computes it
    ]
    return found[-1] if found else (None, None)
