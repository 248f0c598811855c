"""Selective: a forward pass that keeps what its large products give, and runs the rest again.

Products with weights and fused attention take nearly all the time of a layer, the rest (norms,
activation functions, residual sums, dropout) most of the memory. So what the former give is kept,
and the backward pass computes the latter again from it. Products of activations with each other
are run again too: scores of attention that is not fused are as large as they are cheap.

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 5, by torch's selective checkpoints.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

_PRODUCTS = frozenset({torch.ops.aten.mm, torch.ops.aten.addmm})
_FUSED_ATTENTION = "_scaled_dot_product_"
"""How the names of torch's fused attention kernels begin, on every device."""


def selective(run: Callable[..., Tensor], *arguments: object, draws: bool) -> Tensor:
    """What `run` gives, with a backward pass that runs all but its large products again.

    Args:
        run: the forward pass; what it reads must not change before its backward pass.
        arguments: of it.
        draws: whether it draws from torch's own generator, whose state is then kept for it.
    """
    found: Tensor = checkpoint(
        run,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=draws,
        context_fn=partial(create_selective_checkpoint_contexts, _policy),
    )
    return found


def _policy(_: object, call: OpOverload, *__: Any, **___: Any) -> CheckpointPolicy:  # noqa: ANN401  whatever ATen takes
    packet = call.overloadpacket
    if packet in _PRODUCTS or packet.__name__.startswith(_FUSED_ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
