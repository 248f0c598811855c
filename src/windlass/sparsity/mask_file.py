"""Files of masks: which blocks or weights of each linear layer are kept, as safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from windlass.atomic_files import atomic_write
from windlass.errors import ModelError

_METADATA = "windlass.masks"
"""Key of the metadata with outputs, inputs and block of each layer, as JSON."""


class LayerMask(NamedTuple):
    """What one linear layer keeps."""

    outputs: int
    inputs: int
    block: int | None
    """Rows and columns of a block; None for a mask of single weights."""
    kept: Tensor
    """Block row and block column of each kept block, `Int32[n 2]`; or `Bool[outputs inputs]`."""


def save_masks(path: Path, masks: Mapping[str, LayerMask]) -> None:
    """Writes masks to a file, atomically."""
    sizes = {name: mask[:3] for name, mask in masks.items()}
    tensors = {name: mask.kept.contiguous() for name, mask in masks.items()}
    atomic_write(path, save(tensors, metadata={_METADATA: json.dumps(sizes)}))


def load_masks(path: Path, *, layer: str = "") -> dict[str, LayerMask]:
    """The masks of a file by full name, of all layers or of those inside one.

    Args:
        layer: name of a layer of the stack; empty for all.

    Raises:
        ModelError: the file cannot be read, or holds no masks.
    """
    prefix = f"{layer}." if layer else ""
    try:
        with safe_open(path, framework="pt") as file:
            sizes = json.loads((file.metadata() or {}).get(_METADATA, "null"))
            if not isinstance(sizes, dict):
                raise ModelError(
                    f"`sparsity.mask` = `{path}` holds no masks; write such a file by `windlass "
                    "export RUN --masks FILE`"
                )
            names = [name for name in sizes if f"{name}.".startswith(prefix)]
            masks = {}
            for name in names:
                outputs, inputs, block = sizes[name]
                masks[name] = LayerMask(outputs, inputs, block, file.get_tensor(name))
            return masks
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ModelError(
            f"`sparsity.mask` = `{path}` cannot be read: {error}; name a file that `windlass "
            "export RUN --masks FILE` wrote"
        ) from None


def kept_rows(mask: LayerMask, first: int, stop: int) -> Tensor:
    """Kept blocks of each block row from `first` on, before `stop`; of single weights of each row.

    Args:
        first: first block row, or output.
        stop: one past the last.
    """
    if mask.block is None:
        return mask.kept[first:stop].sum(1)
    counts = torch.bincount(mask.kept[:, 0].long(), minlength=mask.outputs // mask.block)
    return counts[first:stop]
