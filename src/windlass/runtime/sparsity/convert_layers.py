"""Converts a checkpoint between two legs of a run, in which layers keep other shares of weights.

A weight that becomes dense is zero where it was absent; one that becomes sparser keeps its largest
blocks, equally many in each row and column group. Moments go with their weights, and the number of
updates stays. The result depends on the checkpoint alone.
"""

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from windlass.atomic_files import atomic_write, storage_errors
from windlass.errors import CheckpointError
from windlass.models import LayerStack
from windlass.runtime.block_scores import block_norms
from windlass.runtime.checkpoint.checkpoint import MANIFEST_FILE, Checkpoint, layer_file
from windlass.runtime.checkpoint.convert_moments import read_moments
from windlass.runtime.checkpoint.layer_tensors import PADDING
from windlass.runtime.checkpoint.safetensors_io import write_tensors
from windlass.sparsity import BlockSparseLinear, MaskedLinear, column_groups, largest_blocks
from windlass.torch_ext import MomentCodec


def convert_checkpoint(
    checkpoint: Checkpoint, old: LayerStack, new: LayerStack, into: Path, *, graph: str
) -> Checkpoint:
    """The checkpoint of one leg as a checkpoint that the next one starts from.

    Args:
        old: the model whose layers it holds; its weights are not touched.
        into: folder of the result, on the same disk; replaced if it exists.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    shutil.rmtree(into, ignore_errors=True)
    with storage_errors(into):
        into.mkdir()
        for index, name in enumerate(old.names):
            source = checkpoint.path / layer_file(index)
            if source.exists():
                layer = _LayerConversion(checkpoint, source, name)
                tensors = layer.convert(old.layers[index], new.layers[index])
                write_tensors(into / layer_file(index), tensors.items())
        changes = {"files": {}, "graph": graph}
        manifest = checkpoint.manifest.model_copy(update=changes).with_checksum()
        atomic_write(into / MANIFEST_FILE, manifest.to_json())
    return Checkpoint(path=into, manifest=manifest, damaged=checkpoint.damaged)


class _LayerConversion:
    """The tensors of one layer's file, of which those of sparse weights are converted."""

    def __init__(self, checkpoint: Checkpoint, source: Path, name: str) -> None:
        self._manifest, self._source, self._name = checkpoint.manifest, source, name
        self._codec = MomentCodec(torch.device("cpu"))
        try:
            with safe_open(source, framework="pt") as file:
                names = [key for key in file.keys() if not key.startswith(PADDING)]  # noqa: SIM118
                self._tensors: dict[str, Tensor] = {key: file.get_tensor(key) for key in names}
        except SafetensorError as error:
            raise CheckpointError(f"`{source}` cannot be read: {error}") from None

    def convert(self, old: nn.Module, new: nn.Module) -> Mapping[str, Tensor]:
        """All tensors of the layer as `new` has them."""
        after = dict(new.named_modules())
        for path, before in old.named_modules():
            kinds = (BlockSparseLinear, MaskedLinear)
            if isinstance(before, kinds) or isinstance(after[path], kinds):
                self._convert_weight(f"{self._name}.{path}", before, after[path])
        return self._tensors

    def _convert_weight(self, name: str, old: nn.Module, new: nn.Module) -> None:
        grids = dict(self._take_grids(name, old, _block(old, new)))
        steps = self._tensors.pop(f"steps/{_weight_name(name, old)}")
        full_name = _weight_name(name, new)
        self._tensors[f"steps/{full_name}"] = steps
        if not isinstance(new, BlockSparseLinear):
            for kind, (grid, _) in grids.items():
                self._tensors[f"{kind}/{full_name}"] = grid.transpose(1, 2).flatten(2).flatten(0, 1)
            return
        blocks = _largest_of_parts(new, *grids["weight"])
        row, column = blocks.long().unbind(1)
        for kind, (grid, _) in grids.items():
            self._tensors[f"{kind}/{full_name}"] = grid[row, column]
        self._tensors[f"buffer/{name}.blocks"] = blocks

    def _take_grids(
        self, name: str, module: nn.Module, block: int
    ) -> Iterator[tuple[str, tuple[Tensor, Tensor | None]]]:
        """Weight, moments and average as `[rows columns B B]`, each with the blocks that were kept.

        The blocks are None if all were. The tensors are removed.
        """
        full_name = _weight_name(name, module)
        weight = self._tensors.pop(f"weight/{full_name}")
        moments = read_moments(
            self._source, full_name, tuple(weight.shape), "float32", self._codec,
            seed=self._manifest.seed, step=self._manifest.step,
        )  # fmt: skip
        for which in range(1, len(moments) + 1):
            self._tensors.pop(f"moment{which}/{full_name}")
            self._tensors.pop(f"scale{which}/{full_name}", None)
        blocks = self._tensors.pop(f"buffer/{name}.blocks", None)
        self._tensors.pop(f"buffer/{name}.mask", None)
        values = {"weight": weight}
        values |= {f"moment{n}": moment.values for n, moment in enumerate(moments, start=1)}
        if (average := self._tensors.pop(f"average/{full_name}", None)) is not None:
            values["average"] = average
        for kind, tensor in values.items():
            if blocks is None or not isinstance(module, BlockSparseLinear):
                grid = tensor.unflatten(1, (-1, block)).unflatten(0, (-1, block)).transpose(1, 2)
            else:
                rows, columns = module.out_features // block, module.in_features // block
                grid = tensor.new_zeros(rows, columns, block, block)
                grid[blocks[:, 0].long(), blocks[:, 1].long()] = tensor
            yield kind, (grid, blocks)


def _weight_name(name: str, module: nn.Module) -> str:
    """Full name of the weight of a linear module."""
    return f"{name}.values" if isinstance(module, BlockSparseLinear) else f"{name}.weight"


def _block(old: nn.Module, new: nn.Module) -> int:
    """Size of the blocks of one of two modules; 1 if neither has blocks."""
    return next((m.block for m in (old, new) if isinstance(m, BlockSparseLinear)), 1)


def _largest_of_parts(module: BlockSparseLinear, grid: Tensor, kept: Tensor | None) -> Tensor:
    """`Int32[n 2]`: the largest blocks of `grid[rows columns B B]`, as many as the module has.

    Blocks that were absent come last, and are zero.
    """
    rows, columns = grid.shape[:2]
    norms = block_norms(grid.reshape(rows * columns, module.block, module.block))
    if kept is not None:
        absent = torch.ones(rows, columns, dtype=torch.bool)
        absent[kept[:, 0].long(), kept[:, 1].long()] = False
        norms = norms.masked_fill(absent.flatten(), -1.0)
    chosen, first = [], 0
    for part in module.parts:
        of_part = norms.view(rows, columns)[first : first + part.rows]
        groups = column_groups(columns, part.kept)
        blocks = largest_blocks(of_part, part.kept, groups)
        chosen.append(blocks + torch.tensor([first, 0], dtype=torch.int32))
        first += part.rows
    return torch.cat(chosen)
