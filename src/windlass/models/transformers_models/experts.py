"""Experts of transformers by products whose sizes do not depend on what the router chose.

The library's own grouped products have no fake tensors in float32 and are not compiled there. This
is its `grouped_mm` path, with our operator for the products.
"""

from typing import Any

import torch
from torch import Tensor

from windlass.models.experts.grouped_products import grouped_linear

NAME = "windlass"
"""Under which transformers knows it."""


def register_experts() -> None:
    """Tells transformers of this way to compute experts."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(module: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:  # noqa: ANN401
    """The sum of the chosen experts' outputs, `[t d]`.

    Args:
        module: experts of transformers, whose attributes say how its weights lie.
        x: `Float[t d]`.
        index: the experts of each token, `Int[t k]`.
        weights: their factors, `Float[t k]`.
    """
    chosen = index.shape[-1]
    experts, order = torch.sort(index.reshape(-1), stable=True)
    counts = torch.zeros(module.num_experts, dtype=torch.int64, device=x.device)
    counts = counts.scatter_add(0, experts, torch.ones_like(experts))
    rows = x[order // chosen]
    first = "gate_up_proj" if module.has_gate else "up_proj"
    hidden = _product(module, first, rows, experts, counts)
    activate = module._apply_gate if module.has_gate else module.act_fn  # noqa: SLF001  its hook
    hidden = activate(hidden)
    y = _product(module, "down_proj", hidden, experts, counts)
    if module.has_post_expert_norm:
        y = module.post_expert_norm(y)
    y = y * weights.reshape(-1)[order].unsqueeze(-1)
    restored = torch.zeros_like(y).index_copy(0, order, y)
    return restored.view(len(x), chosen, -1).sum(1).to(x.dtype)


def _product(module: Any, name: str, x: Tensor, experts: Tensor, counts: Tensor) -> Tensor:  # noqa: ANN401
    weight = getattr(module, name)
    weight = weight.transpose(1, 2) if module.is_transposed else weight
    y = grouped_linear(x.to(weight.dtype), weight, counts)
    return y + getattr(module, f"{name}_bias")[experts] if module.has_bias else y
