"""Low-rank adapters beside frozen linear layers, also those of experts.

Source: Hu et al. 2021, LoRA, arXiv:2106.09685; initial values as in PEFT.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from windlass.errors import ModelError
from windlass.models.fine_tuning.adapter_names import ADAPTER_DROPOUT
from windlass.models.fine_tuning.frozen import matching_weights
from windlass.models.init_weights import keyed_generator
from windlass.schema import LoraRequest


class Adapted(nn.Module):
    """What a linear layer with an adapter has, whatever its base."""

    rank: int
    scale: float
    """What the adapter's output is multiplied with."""
    lora_a: nn.Parameter
    """`[rank in]`, or `[E rank in]` of experts."""
    lora_b: nn.Parameter
    """`[out rank]`, or `[E out rank]` of experts."""
    adapter_names: ClassVar[tuple[str, ...]] = ("lora_a", "lora_b")
    """Names of the factors, which can be drawn without the base."""

    def reset_adapter(self) -> None:
        """Draws A, and sets B to zero: the adapter changes nothing before its first update."""
        if not self.lora_a.is_meta:
            for a in self.lora_a.detach().view(-1, *self.lora_a.shape[-2:]):
                nn.init.kaiming_uniform_(a, a=math.sqrt(5))
            nn.init.zeros_(self.lora_b)


class Adaptable(nn.Module):
    """Linear layers in one module, which knows what they are with an adapter beside each."""

    weight: nn.Parameter
    adapted_unasked: ClassVar[bool] = True
    """Whether adapters stand beside them too where a request names no layers."""

    def with_adapters(self, *, rank: int, scale: float) -> Adapted:
        """The same layers with new adapters, an `Adapted` that shares their weight."""
        raise NotImplementedError


LINEARS = (nn.Linear, Adaptable)
"""Modules beside which an adapter may stand."""


class LoraLinear(nn.Linear, Adapted):
    """A frozen linear layer with an adapter: `x W^T + b + scale (dropout(x) A^T) B^T`.

    Args:
        base: the linear layer, whose weight and bias it takes over under the same names.
        scale: what the adapter's output is multiplied with.
        dropout: probability that an input of the adapter is dropped in training.
    """

    def __init__(self, base: nn.Linear, *, rank: int, scale: float, dropout: float = 0.0) -> None:
        nn.Module.__init__(self)
        vars(self).update(vars(base))
        # The base keeps its own tables.
        self._parameters, self._modules = dict(base._parameters), dict(base._modules)  # noqa: SLF001
        self.base_type = type(base)
        """Draws the weights of the base."""
        self.rank, self.scale = rank, scale
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_empty(base.out_features, rank))
        if dropout > 0:
            self.add_module(ADAPTER_DROPOUT, nn.Dropout(dropout))

    def reset_parameters(self) -> None:
        """Draws the weights of the base, then those of the adapter."""
        self.base_type.reset_parameters(self)
        self.reset_adapter()

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[... in]` to `[... out]`."""
        base = functional.linear(x, self.weight, self.bias)
        return torch.add(base, self.adapter_output(x), alpha=self.scale)

    def adapter_output(self, x: Tensor) -> Tensor:
        """What the adapter gives for `[... in]`, without its scale, `[... out]`."""
        dropout = self._modules.get(ADAPTER_DROPOUT)
        inputs = x if dropout is None else dropout(x)
        return functional.linear(functional.linear(inputs, self.lora_a), self.lora_b)

    def extra_repr(self) -> str:
        """Sizes and rank."""
        return f"{super().extra_repr()}, rank={self.rank}, scale={self.scale:g}"


class RowLoraLinear(LoraLinear):
    """A row-parallel rank's part: it takes the rank's inputs and gives a partial sum.

    The partial sums of the ranks' products with A add up in the product with B, which all have.
    """

    ranks: int

    def forward(self, x: Tensor) -> Tensor:
        """Maps `[b s in/t]` to a partial sum of `[b s out]`."""
        # Each rank adds its share of the bias, as in `RowLinear`.
        bias = None if self.bias is None else self.bias * (1 / self.ranks)
        base = functional.linear(x, self.weight, bias)
        return torch.add(base, self.adapter_output(x), alpha=self.scale)


def add_adapters(
    model: nn.Module, name: str, layers: Sequence[str], request: LoraRequest, *, seed: int
) -> None:
    """Puts adapters beside linear layers, in place, and freezes what is not to be trained whole.

    Args:
        model: a sequence of layers, on the meta device or with real weights.
        layers: names of the layers in order; those between the first and the last are blocks.

    Raises:
        ModelError: a pattern matches nothing, or a linear layer without its usual product; experts
            should get adapters with dropout; or a weight would be trained beside its adapter.
    """
    model.requires_grad_(requires_grad=False)
    targets = _targets(model, name, layers[1:-1], request)
    _train_whole(model, name, targets, request.trained or ())
    for path in targets:
        base = model.get_submodule(path)
        adapted = _adapted(base, path, name, request)
        with keyed_generator(seed, f"{path}.lora"):
            adapted.reset_adapter()
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, adapted.train(base.training))


def _train_whole(
    model: nn.Module, name: str, targets: Sequence[str], patterns: Sequence[str]
) -> None:
    """Lets the weights train whose names match a pattern."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = tuple(parameters)
    for pattern in patterns:
        matching = matching_weights(names, pattern, name, "lora.trained", names[-1])
        adapted = [path for path in matching if path.rpartition(".")[0] in targets]
        if adapted:
            raise ModelError(
                f"`lora.trained` has `{pattern}`, and beside `{adapted[0]}` stands an adapter; "
                "leave the layer out of `lora.targets` or of `lora.trained`"
            )
        for path in matching:
            parameters[path].requires_grad = True


def _adapted(base: nn.Module, path: str, model: str, request: LoraRequest) -> Adapted:
    """A linear layer of a model with a new adapter beside it."""
    rank, scale = _rank(path, request), request.scale
    if isinstance(base, Adaptable):
        if request.dropout:
            raise ModelError(
                f"`lora.dropout` = {request.dropout:g} with adapters beside `{path}` of `{model}`: "
                "those of routers and experts have none, as in PEFT; set `lora.dropout` = 0, or "
                "name other layers in `lora.targets`"
            )
        return base.with_adapters(rank=rank, scale=scale)
    if not isinstance(base, nn.Linear) or type(base).forward is not nn.Linear.forward:
        raise ModelError(
            f"`{path}` of model `{model}` is a `{type(base).__name__}` with a product of its "
            "own, beside which no adapter stands; name other layers in `lora.targets`"
        )
    return LoraLinear(base, rank=rank, scale=scale, dropout=request.dropout)


def _targets(model: nn.Module, name: str, blocks: Sequence[str], request: LoraRequest) -> list[str]:
    """Full names of the linear layers that get an adapter."""
    modules = {p: module for p, module in model.named_modules() if isinstance(module, LINEARS)}
    linears = list(modules)
    if request.targets is None:
        inner = tuple(f"{block}." for block in blocks)
        targets = [
            path
            for path, module in modules.items()
            if (path.startswith(inner) or path in blocks)
            and (not isinstance(module, Adaptable) or module.adapted_unasked)
        ]
        if not targets:
            raise ModelError(
                f"model `{name}` has no linear layer between its first and its last layer; name "
                "the layers that get an adapter in `lora.targets`"
            )
        return targets
    for pattern in request.targets:
        if not any(is_target(path, pattern) for path in linears):
            raise ModelError(
                f"`lora.targets` has `{pattern}`, and no linear layer of `{name}` has a name that "
                f"ends so; it has {', '.join(f'`{path}`' for path in linears[:6]) or 'none'}"
            )
    return [path for path in linears if any(is_target(path, each) for each in request.targets)]


def _rank(path: str, request: LoraRequest) -> int:
    """The rank of a layer's adapter: that of the first pattern that matches, or that of all."""
    others = (request.ranks or {}).items()
    return next((rank for pattern, rank in others if is_target(path, pattern)), request.rank)


def is_target(path: str, pattern: str) -> bool:
    """Whether a pattern matches a name, or its end behind a dot."""
    return fnmatchcase(path, pattern) or fnmatchcase(path, f"*.{pattern}")
