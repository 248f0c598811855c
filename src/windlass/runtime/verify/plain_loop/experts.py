"""Mixtures of experts as a loop over all experts, with a balance loss that autograd derives."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class PlainExperts:
    """Computes each expert for all tokens, and weighs what it gives.

    Args:
        model: whose mixtures are changed.
        batch: global batch in sequences, over which the balance loss is a mean.
    """

    def __init__(self, model: nn.Module, batch: int) -> None:
        self._batch = batch
        self._terms: list[Tensor] = []
        self._routers: list[Any] = [
            module for module in model.modules() if hasattr(module, "balance_scale")
        ]
        for module in model.modules():
            if getattr(module, "router", None) in self._routers:
                module.forward = partial(self._mix, module)

    def balance(self) -> Tensor | float:
        """The balance loss of what ran since the last call, as a share of the batch's."""
        terms, self._terms = self._terms, []
        return sum(terms) / self._batch if terms else 0.0

    def end_step(self) -> None:
        """Moves the bias of each expert by how its tokens of the step compare with the mean."""
        for router in self._routers:
            load, bias = router.load, router.balance_bias
            if bias is not None:
                mean = load.double().mean()
                bias += router.config.balance_bias * torch.sign(mean - load)
            load.zero_()

    def _mix(self, module: Any, x: Tensor) -> Tensor:  # noqa: ANN401  a module of the model
        router, config = module.router, module.router.config
        logits = x @ _weight(router).T
        scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)
        ranked = scores if router.balance_bias is None else scores + router.balance_bias
        chosen = ranked.topk(config.per_token, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        picks = functional.one_hot(chosen, config.count)  # [b s k E]
        if module.training:
            router.load.add_(picks.sum((0, 1, 2)))
            rows = zip(picks, scores, strict=True)
            self._terms += [config.balance_loss * _unevenness(*row) for row in rows]
        if config.capacity is not None:
            slots = config.slots(x.shape[1])
            place = picks.flatten(1, 2).cumsum(1).view_as(picks)
            picks = picks * (place <= slots)
        share = (weights.unsqueeze(-1) * picks).sum(2)  # [b s E]
        y = torch.zeros_like(x)
        for index in range(config.count):
            y = y + share[..., index, None] * _expert(module.experts, index, x)
        if module.shared is None:
            return y
        common = module.shared(x)
        return y + (
            common if module.shared_gate is None else common * module.shared_gate(x).sigmoid()
        )


def _unevenness(picks: Tensor, scores: Tensor) -> Tensor:
    """`sum_e f_e P_e` of one sequence, which is 1 where all experts have the same load.

    Args:
        picks: 1 for each choice of a token, `Int[s k E]`.
        scores: of the router, `Float[s E]`.
    """
    sequence, per_token, count = picks.shape
    f = picks.sum((0, 1)) * count / (sequence * per_token)
    p = (scores / scores.sum(-1, keepdim=True)).mean(0)
    return (f * p).sum()


def _expert(experts: Any, index: int, x: Tensor) -> Tensor:  # noqa: ANN401  a module of the model
    """What one expert gives of all tokens, `[b s d]`."""
    inner = x @ _weight(experts.up)[index].T
    if experts.gate is None:
        approximate = "tanh" if experts.activation == "gelu_tanh" else "none"
        inner = functional.gelu(inner, approximate=approximate)
    else:
        gate = x @ _weight(experts.gate)[index].T
        if experts.activation == "swiglu":
            gate = gate * gate.sigmoid()
        else:
            approximate = "tanh" if experts.activation == "geglu_tanh" else "none"
            gate = functional.gelu(gate, approximate=approximate)
        inner = gate * inner
    return inner @ _weight(experts.down)[index].T


def _weight(module: Any) -> Tensor:  # noqa: ANN401  a module of the model
    """The weight of a layer, or of each expert's, with what its adapter adds."""
    weight: Tensor = module.weight
    if hasattr(module, "lora_a"):
        weight = weight + module.scale * (module.lora_b @ module.lora_a)
    return weight
