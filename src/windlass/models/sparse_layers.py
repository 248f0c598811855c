"""Replaces linear layers of a model by sparse ones, by their roles or by patterns of names."""

from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from windlass.errors import InputErrors, ModelError
from windlass.models.init_weights import keyed_generator
from windlass.schema import SparsityRequest
from windlass.sparsity import (
    BlockPart,
    BlockSparseLinear,
    MaskedLinear,
    MaskedPart,
    WeightPart,
    kept_counts,
)

RoleOutputs = tuple[tuple[str, int], ...]
"""The roles that are fused in the outputs of a linear layer, each with its number of outputs."""


class Sparsifiable:
    """A module that knows the roles of its linear layers."""

    def sparse_roles(self) -> Mapping[str, RoleOutputs]:
        """Roles of the outputs of each linear layer, by path inside the module."""
        raise NotImplementedError


def make_sparse(model: nn.Module, name: str, request: SparsityRequest, *, seed: int) -> None:
    """Replaces linear layers of a model by sparse ones, in place.

    Args:
        model: a sequence of layers. On the meta device its sparse layers draw masks and weights
            later; otherwise they keep their weights where the mask does, and the mask depends on
            the seed and the layer's full name alone.
        name: the model's name in messages.
        request: which layers, and what is absent in them.
        seed: random seed of all weights of the model.

    Raises:
        ModelError: what cannot be, with a way out.
        InputErrors: several such faults.
    """
    roles = _selected_roles(model, name, request)
    linears = {path: model.get_submodule(path) for path in roles}
    parts = Counter(
        WeightPart(role, outputs, _linear(linears[path]).in_features)
        for path, parts_of_linear in roles.items()
        for role, outputs in parts_of_linear
    )
    counts = kept_counts(request, parts)
    for path, linear in linears.items():
        inputs = _linear(linear).in_features
        kept = {part: counts[WeightPart(*part, inputs)] for part in roles[path]}
        sparse = _sparse_layer(_linear(linear), request, roles[path], kept, seed=seed, name=path)
        if sparse is not None:
            owner, _, leaf = path.rpartition(".")
            setattr(model.get_submodule(owner), leaf, sparse)


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"a `{type(module).__name__}` is no linear layer")
    return module


def _sparse_layer(
    linear: nn.Linear,
    request: SparsityRequest,
    roles: RoleOutputs,
    kept: Mapping[tuple[str, int], int],
    *,
    seed: int,
    name: str,
) -> BlockSparseLinear | MaskedLinear | None:
    """The sparse layer in place of a linear one; None if all of it is kept."""
    inputs, outputs, block = linear.in_features, linear.out_features, request.block
    std: float | None = getattr(linear, "std", None)
    bias = linear.bias is not None
    layer: BlockSparseLinear | MaskedLinear
    with keyed_generator(seed, name), torch.device(linear.weight.device):
        if request.is_blocked:
            parts = [BlockPart(part[1] // block, kept[part]) for part in roles]
            if all(part.kept * block == inputs for part in parts):
                return None
            diagonal = request.pattern == "block-diagonal"
            layer = BlockSparseLinear(
                inputs, outputs, bias=bias, block=block, parts=parts, std=std, diagonal=diagonal
            )
        else:
            masked = [MaskedPart(part[1], kept[part]) for part in roles]
            if all(part.kept == part.outputs * inputs for part in masked):
                return None
            layer = MaskedLinear(
                inputs, outputs, bias=bias, parts=masked, n_of_m=request.n_of_m, std=std
            )
    layer.to(linear.weight.dtype)
    if not linear.weight.is_meta:
        layer.take_dense_weight(linear.weight)
        if linear.bias is not None and layer.bias is not None:
            layer.bias.data.copy_(linear.bias)
    return layer.train(linear.training)


def _selected_roles(
    model: nn.Module, name: str, request: SparsityRequest
) -> dict[str, RoleOutputs]:
    """The roles of each linear layer that becomes sparse, by its full name.

    Raises:
        ModelError: none is selected, or one that cannot be sparse.
        InputErrors: several such faults.
    """
    known = dict(_known_roles(model))
    if request.module_patterns is None:
        if not known:
            example = next(_linear_names(model), "blocks.*.up")
            raise ModelError(
                f"model `{name}` does not say what its weights do; name the linear layers that "
                f"become sparse in `sparsity.modules`, such as `{example}`, with `*` for one name "
                "between dots"
            )
        return known
    selected: dict[str, RoleOutputs] = {}
    faults: list[str] = []
    modules = dict(model.named_modules())
    for pattern in request.module_patterns:
        matches = [path for path in modules if _matches(path, pattern)]
        linears = [path for path in matches if isinstance(modules[path], nn.Linear)]
        if not linears and not any(isinstance(modules[m], nn.Embedding) for m in matches):
            example = next(_linear_names(model), None)
            such = f", such as `{example}`" if example else ""
            faults.append(
                f"`sparsity.modules` = `{pattern}` matches no linear layer of `{name}`; write a "
                f"name as in parameter names{such}, with `*` for one name between dots"
            )
        faults += filter(None, (_dense_reason(model, modules, path) for path in matches))
        for path in linears:
            linear = _linear(modules[path])
            selected.setdefault(path, known.get(path, ((pattern, linear.out_features),)))
    if faults:
        raise ModelError(faults[0]) if len(faults) == 1 else InputErrors(faults)
    return selected


def _known_roles(model: nn.Module) -> Iterator[tuple[str, RoleOutputs]]:
    for path, module in model.named_modules():
        if isinstance(module, Sparsifiable):
            for inner, roles in module.sparse_roles().items():
                yield f"{path}.{inner}" if path else inner, roles


def _linear_names(model: nn.Module) -> Iterator[str]:
    return (path for path, module in model.named_modules() if type(module) is nn.Linear)


def _matches(path: str, pattern: str) -> bool:
    parts, wanted = path.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _dense_reason(model: nn.Module, modules: Mapping[str, nn.Module], path: str) -> str | None:
    """Why a module that a pattern matches must stay dense; None if it need not, or is no weight."""
    module = modules[path]
    last = list(model.named_children())[-1][0] if any(model.children()) else ""
    subject, way_out = f"`{path}` of `sparsity.modules`", "leave it out of the pattern"
    if isinstance(module, nn.Embedding):
        return f"{subject} is an embedding, which stays dense; {way_out}"
    if not isinstance(module, nn.Linear):
        return None
    if f"{path}.".startswith(f"{last}."):
        return f"{subject} is in the last layer, whose logits stay dense; {way_out}"
    if type(module).forward is not nn.Linear.forward or _is_tied(model, module.weight):
        kind = type(module).__name__
        return f"{subject} is a `{kind}` of its own kind or has a tied weight; {way_out}"
    return None


def _is_tied(model: nn.Module, weight: Tensor) -> bool:
    named = model.named_parameters(remove_duplicate=False)
    return sum(parameter is weight for _, parameter in named) > 1
