"""Replaces linear layers of a model by sparse ones, by their roles or by patterns of names."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.errors import InputErrors, ModelError
from windlass.models.init_weights import keyed_generator
from windlass.models.sparsity.imported_masks import (
    RoleOutputs,
    SparseLinear,
    layers_of_masks,
    put_masks,
)
from windlass.schema import SparsityRequest
from windlass.sparsity import (
    BlockPart,
    BlockSparseLinear,
    MaskedLinear,
    MaskedPart,
    WeightPart,
    kept_counts,
    sparsity_of_leg,
)


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
        request: which layers, and what is absent in them; those of a dense leg stay as they are.

    Raises:
        ModelError: what cannot be, with a way out.
    """
    for path, sparse in _sparse_layers(model, name, request).items():
        linear = _linear(model.get_submodule(path))
        sparse.to(linear.weight.dtype)
        if not linear.weight.is_meta:
            sparse.to_empty(device=linear.weight.device)
            with keyed_generator(seed, path):
                sparse.reset_parameters()
            if request.mask is not None:
                put_masks(sparse, path, Path(request.mask), seed=seed)
            sparse.take_dense_weight(linear.weight)
            if linear.bias is not None and sparse.bias is not None:
                sparse.bias.data.copy_(linear.bias)
        owner, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(owner), leaf, sparse.train(linear.training))


def _sparse_layers(
    model: nn.Module, name: str, request: SparsityRequest
) -> dict[str, SparseLinear]:
    """The sparse layers of a model on the meta device, by full name."""
    if request.mask is not None:
        if sparsity_of_leg(request) is None:
            return {}
        named = model.named_modules()
        linears = {path: module for path, module in named if isinstance(module, nn.Linear)}
        return layers_of_masks(linears, dict(_known_roles(model)), request)
    roles = _selected_roles(model, name, request)
    linears = {path: _linear(model.get_submodule(path)) for path in roles}
    parts = Counter(
        WeightPart(role, outputs, linears[path].in_features)
        for path, parts_of_linear in roles.items()
        for role, outputs in parts_of_linear
    )
    counts = kept_counts(request, parts)  # also in a dense leg, which leads to this level
    of_leg = sparsity_of_leg(request)
    if of_leg is None:
        return {}
    if of_leg != request:
        counts = kept_counts(of_leg, parts)
    layers = (
        (path, _sparse_layer(linear, request, roles[path], counts))
        for path, linear in linears.items()
    )
    return {path: layer for path, layer in layers if layer is not None}


def _linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"a `{type(module).__name__}` is no linear layer")
    return module


def _sparse_layer(
    linear: nn.Linear,
    request: SparsityRequest,
    roles: RoleOutputs,
    counts: Mapping[WeightPart, int],
) -> SparseLinear | None:
    """The sparse layer in place of a linear one; None if all of it is kept."""
    inputs, outputs, block = linear.in_features, linear.out_features, request.block
    kept = [counts[WeightPart(*role, inputs)] for role in roles]
    std: float | None = getattr(linear, "std", None)
    bias = linear.bias is not None
    with torch.device("meta"):
        if request.is_blocked:
            blocks = [BlockPart(n // block, k) for (_, n), k in zip(roles, kept, strict=True)]
            if all(part.kept * block == inputs for part in blocks):
                return None
            diagonal = request.pattern == "block-diagonal"
            return BlockSparseLinear(
                inputs, outputs, bias=bias, block=block, parts=blocks, std=std, diagonal=diagonal
            )
        parts = [MaskedPart(n, k) for (_, n), k in zip(roles, kept, strict=True)]
        if all(part.kept == part.outputs * inputs for part in parts):
            return None
        return MaskedLinear(inputs, outputs, bias=bias, parts=parts, n_of_m=request.n_of_m, std=std)


def _selected_roles(
    model: nn.Module, name: str, request: SparsityRequest
) -> dict[str, RoleOutputs]:
    """The roles of each linear layer that becomes sparse, by its full name."""
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
            such = "".join(f", such as `{path}`" for path in islice(_linear_names(model), 1))
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


def joined_matrices(layers: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[int, ...]]:
    """Rows of each matrix in a weight that is several, such as queries, keys and values.

    Returns:
        Rows by the full name of the weight; weights that are one matrix are left out.
    """
    roles = ((name, _known_roles(layer)) for name, layer in layers)
    return {
        f"{name}.{path}.weight": tuple(rows for _, rows in parts)
        for name, own in roles
        for path, parts in own
        if len(parts) > 1
    }


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
