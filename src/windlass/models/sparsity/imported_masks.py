"""Takes masks from a file in place of random ones: which layers they make sparse, and how."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from windlass.errors import ModelError
from windlass.models.init_weights import keyed_generator
from windlass.schema import SparsityRequest
from windlass.sparsity import (
    BlockPart,
    BlockSparseLinear,
    LayerMask,
    MaskedLinear,
    MaskedPart,
    kept_rows,
    load_masks,
)

SparseLinear = BlockSparseLinear | MaskedLinear
RoleOutputs = tuple[tuple[str, int], ...]
"""The roles that are fused in the outputs of a linear layer, each with its number of outputs."""


def layers_of_masks(
    linears: Mapping[str, nn.Linear], roles: Mapping[str, RoleOutputs], request: SparsityRequest
) -> dict[str, SparseLinear]:
    """The sparse layers that the masks of a file make, by full name, without the masks themselves.

    Args:
        linears: linear layers of the model that can be sparse, by full name.
        request: names the file, and the pattern and the size of blocks that it must have.

    Raises:
        ModelError: the file is of another model or another pattern.
    """
    path = Path(request.mask or "")
    masks = load_masks(path)
    faults = list(_faults(masks, linears, request))
    if faults:
        others = f" ({len(faults)} of {len(masks)} masks do not fit)" if len(faults) > 1 else ""
        raise ModelError(f"`sparsity.mask` = `{path}` {faults[0]}{others}")
    return {
        name: _layer(linears[name], mask, roles.get(name, ((name, mask.outputs),)), request, name)
        for name, mask in masks.items()
    }


def put_masks(layer: nn.Module, name: str, path: Path, *, seed: int) -> None:
    """Gives the sparse layers inside a layer the masks of a file, in place.

    Raises:
        ModelError: the file cannot be read.
    """
    masks = load_masks(path, layer=name)
    for inner, module in layer.named_modules():
        full_name = f"{name}.{inner}" if inner else name
        if isinstance(module, (BlockSparseLinear, MaskedLinear)) and full_name in masks:
            with keyed_generator(seed, full_name):
                module.take_mask(masks[full_name].kept)


def _faults(
    masks: Mapping[str, LayerMask], linears: Mapping[str, nn.Linear], request: SparsityRequest
) -> Iterator[str]:
    """Why masks do not fit the model or the request, in the order of the file."""
    for name, mask in masks.items():
        linear = linears.get(name)
        if linear is None:
            yield f"has a mask of `{name}`, which this model has not; it is of another model"
            continue
        shape = (linear.out_features, linear.in_features)
        if (mask.outputs, mask.inputs) != shape:
            yield (
                f"has a mask of {mask.outputs} x {mask.inputs} for `{name}`, which is {shape[0]} x "
                f"{shape[1]}; it is of another model"
            )
        elif mask.block is None and request.is_blocked:
            yield f"has masks of single weights; set `sparsity.pattern` = unstructured for `{name}`"
        elif mask.block is not None and not request.is_blocked:
            yield f"has masks of blocks; set `sparsity.pattern` = block for `{name}`"
        elif mask.block not in (None, request.block):
            yield f"has blocks of {mask.block} for `{name}`; set `sparsity.block` = {mask.block}"


def _layer(
    linear: nn.Linear, mask: LayerMask, roles: RoleOutputs, request: SparsityRequest, name: str
) -> SparseLinear:
    """The sparse layer with as many kept blocks or weights as a mask."""
    inputs, outputs, bias = linear.in_features, linear.out_features, linear.bias is not None
    std: float | None = getattr(linear, "std", None)
    with torch.device("meta"):
        if mask.block is None:
            parts = [MaskedPart(size, int(rows.sum())) for size, rows in _parts(mask, roles, 1)]
            return MaskedLinear(
                inputs, outputs, bias=bias, parts=parts, n_of_m=request.n_of_m, std=std
            )
        blocks: list[BlockPart] = []
        for size, rows in _parts(mask, roles, mask.block):
            least, most = int(rows.min()), int(rows.max())
            if least != most or not least:
                raise ModelError(
                    f"`sparsity.mask` = `{request.mask}` keeps from {least} to {most} blocks a row "
                    f"of `{name}`; rows of one role must keep equally many, at least one"
                )
            blocks.append(BlockPart(size // mask.block, most))
        return BlockSparseLinear(
            inputs,
            outputs,
            bias=bias,
            block=mask.block,
            parts=blocks,
            std=std,
            given_groups=_equal_groups(mask),
        )


def _parts(mask: LayerMask, roles: RoleOutputs, block: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Outputs of each role, and what each of its rows keeps."""
    first = 0
    for _, outputs in roles:
        yield outputs, kept_rows(mask, first // block, (first + outputs) // block)
        first += outputs


def _equal_groups(mask: LayerMask) -> int:
    """The most column groups of which each row keeps equally many blocks: 8, 4, 2 or 1."""
    block = mask.block or 1
    rows, columns = mask.outputs // block, mask.inputs // block
    grid = torch.zeros(rows, columns, dtype=torch.int32, device="cpu")
    grid[mask.kept[:, 0].long(), mask.kept[:, 1].long()] = 1
    for groups in (8, 4, 2):
        if grid.shape[1] % groups == 0:
            counts = grid.unflatten(1, (groups, -1)).sum(-1)
            if bool((counts == counts[:, :1]).all()):
                return groups
    return 1
