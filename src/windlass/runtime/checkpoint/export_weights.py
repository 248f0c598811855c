"""Weights of a checkpoint in full, as one file or in a dense model, and its masks as a file."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from windlass.errors import CheckpointError
from windlass.models import Adapted, LayerStack, is_adapter, meta_copy
from windlass.runtime.checkpoint.checkpoint import Checkpoint, layer_file
from windlass.runtime.checkpoint.layer_tensors import read_tensor
from windlass.runtime.checkpoint.safetensors_io import stream_tensors
from windlass.sparsity import BlockSparseLinear, LayerMask, MaskedLinear, save_masks


def export_weights(checkpoint: Checkpoint, stack: LayerStack, to: Path) -> None:
    """Writes a safetensors file with all weights in full, zero where they are absent.

    Weights have the names and shapes of the dense model. A tied weight stands under the name of
    its owner alone. One layer at a time is in memory.

    Args:
        to: the file, which is replaced.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model.
    """
    with torch.device("meta"):
        shapes = {
            stack.name_in_module(name): tensor
            for index in range(len(stack.layers))
            for name, tensor in dense_tensors(stack, index, None)
        }
    source = (
        tensor
        for index in range(len(stack.layers))
        for _, tensor in dense_tensors(stack, index, checkpoint)
    )
    stream_tensors(to, shapes, source)


def load_dense_weights(checkpoint: Checkpoint, stack: LayerStack, into: LayerStack) -> None:
    """Loads the weights of a checkpoint into the layers of the dense model, in place.

    Raises:
        CheckpointError: the checkpoint belongs to another model.
    """
    for index, layer in enumerate(into.layers):
        targets = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        for name, value in dense_tensors(stack, index, checkpoint):
            target = targets.get(name.removeprefix(f"{stack.names[index]}."))
            if target is None or target.shape != value.shape:
                raise CheckpointError(
                    f"the checkpoint has `{name}`, and the model has none of its size"
                )
            target.detach().copy_(value)


def export_masks(checkpoint: Checkpoint, stack: LayerStack, to: Path) -> int:
    """Writes the masks of a checkpoint's sparse layers to a file; returns how many there are.

    Args:
        to: the file, which is replaced.

    Raises:
        CheckpointError: the checkpoint is damaged or belongs to another model, or no layer is
            sparse.
    """
    masks: dict[str, LayerMask] = {}
    for index, (layer_name, layer) in enumerate(zip(stack.names, stack.layers, strict=True)):
        for path, module in layer.named_modules():
            name = f"{layer_name}.{path}" if path else layer_name
            file = checkpoint.path / layer_file(index)
            size = (getattr(module, "out_features", 0), getattr(module, "in_features", 0))
            if isinstance(module, BlockSparseLinear):
                masks[name] = LayerMask(
                    *size, module.block, read_tensor(file, f"buffer/{name}.blocks")
                )
            elif isinstance(module, MaskedLinear):
                masks[name] = LayerMask(*size, None, read_tensor(file, f"buffer/{name}.mask"))
    if not masks:
        raise CheckpointError(
            f"`{stack.name}` of `{checkpoint.path}` has no sparse layer; leave `--masks` out"
        )
    save_masks(to, masks)
    return len(masks)


def dense_tensors(
    stack: LayerStack, index: int, checkpoint: Checkpoint | None
) -> Iterator[tuple[str, Tensor]]:
    """Name and dense value of each tensor of a layer; on the meta device without a checkpoint.

    Adapters are merged into the weights beside which they stand.
    """
    name = stack.names[index]
    layer = meta_copy(stack.layers[index])
    file = None if checkpoint is None else checkpoint.path / layer_file(index)
    sparse = {path: module for path, module in layer.named_modules() if isinstance(module, _SPARSE)}
    for path, tensor in (*layer.named_parameters(), *_persistent_buffers(layer)):
        full_name = f"{name}.{path}"
        owner, _, leaf = path.rpartition(".")
        module = sparse.get(owner)
        is_part = is_adapter(path) or (module is not None and leaf in _MASKS)
        if full_name in stack.tied_weights or is_part:
            continue
        kind = "weight" if isinstance(tensor, nn.Parameter) else "buffer"
        value = tensor if file is None else read_tensor(file, f"{kind}/{full_name}")
        if file is not None and leaf == "weight":
            value = _merged(value, layer.get_submodule(owner), file, f"{name}.{owner}")
        if isinstance(module, BlockSparseLinear) and leaf == "values":
            module.values = nn.Parameter(value, requires_grad=False)
            if file is not None:
                module.blocks = read_tensor(file, f"buffer/{name}.{owner}.blocks")
            full_name, value = f"{full_name.removesuffix('values')}weight", module.dense_weight()
        yield full_name, value


def _merged(weight: Tensor, module: nn.Module, file: Path, name: str) -> Tensor:
    """A weight with the adapter beside it, if there is one, in the adapter's type."""
    if not isinstance(module, Adapted):
        return weight
    a, b = (read_tensor(file, f"weight/{name}.lora_{each}") for each in "ab")
    if a.ndim > 2:  # those of experts
        return torch.baddbmm(weight.to(a.dtype), b, a, alpha=module.scale)
    return torch.addmm(weight.to(a.dtype), b, a, alpha=module.scale)


_SPARSE = (BlockSparseLinear, MaskedLinear)
_MASKS = ("blocks", "mask")


def _persistent_buffers(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent = layer.state_dict(keep_vars=True)
    return ((name, buffer) for name, buffer in layer.named_buffers() if name in persistent)
