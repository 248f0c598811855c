"""Sums of gradients over the micro-batches of a step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.runtime.optimizer_state.dtypes import wide_dtype
from windlass.runtime.parameters import ModelParameter
from windlass.torch_ext import Device


def add_gradients(
    weights: Sequence[ModelParameter], gradients: list[Tensor | None], *, accumulated: bool
) -> None:
    """Adds the gradients of a micro-batch to those of a layer's weights.

    On an accelerator a few calls convert, copy and add those of small weights together.

    Args:
        gradients: in the same order, handed over; None for a weight that the layer did not use.
        accumulated: whether several micro-batches are accumulated, which happens in float32.
    """
    copied: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    elements = 0
    taken: set[int] = set()
    for weight in reversed(weights):
        gradient = gradients.pop()
        if gradient is None:
            continue
        elements += gradient.numel()
        wide = wide_dtype(gradient.dtype) if accumulated else gradient.dtype
        takes_over = weight.gradient is None and weight.takes_over and gradient.dtype == wide
        if takes_over and type(gradient) is Tensor and gradient.layout == torch.strided:
            # Where nothing is summed over (one sample, to which two weights are added), autograd
            # gives both the same memory: one that is added to would change the other.
            memory = gradient.untyped_storage().data_ptr()
            gradient = gradient.clone() if memory in taken else gradient
            taken.add(memory)
        is_small = elements <= Device.piece_elements and not gradient.is_sparse
        if gradient.is_cpu or takes_over or not is_small:
            weight.add_gradient(gradient, accumulated=accumulated)
        elif weight.gradient is None:
            copied.append((weight.new_gradient(wide), gradient))
        else:
            if gradient.dtype != wide:
                copied.append((torch.empty_like(gradient, dtype=wide), gradient))
                gradient = copied[-1][0]
            added.append((weight.gradient, gradient))
    if copied:
        torch._foreach_copy_([to for to, _ in copied], [of for _, of in copied])
    if added:
        torch._foreach_add_([to for to, _ in added], [of for _, of in added])
