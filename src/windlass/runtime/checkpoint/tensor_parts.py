"""Tensors of a checkpoint that ranks have rectangles of, read by `torch.distributed.checkpoint`.

The files are its safetensors form, one rectangle of a tensor in each, so that other programs read
them too. Its own form has a pickled index, which nobody should read from a file of somebody else.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from windlass.errors import CheckpointError
from windlass.runtime.checkpoint.safetensors_io import TensorPart


class PartFiles:
    """Files that have rectangles of tensors.

    Args:
        files: all of a layer, or of several; they are in one folder.

    Raises:
        CheckpointError: a file cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._folder = files[0].parent
        self._reader = HuggingFaceStorageReader(str(self._folder))
        self._reader.fs = _Listed(files)
        try:
            metadata = self._reader.read_metadata()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"`{self._folder}` cannot be read: {error}") from None
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._stored = {
            key: each
            for key, each in metadata.state_dict_metadata.items()
            if isinstance(each, TensorStorageMetadata)
        }

    def fill(self, into: Mapping[str, Sequence[TensorPart]]) -> None:
        """Reads rectangles of tensors, of which the files may have others.

        Raises:
            CheckpointError: the files lack a tensor, or a part of it.
        """
        items: list[ReadItem] = []
        for key, parts in into.items():
            if key not in self._stored:
                raise CheckpointError(f"`{self._folder}` has no `{key}`: it is of another model")
            chunks = [ChunkStorageMetadata(torch.Size(o), each.shape) for o, each in parts]
            found = create_read_items_for_chunk_list(key, self._stored[key], chunks)
            have = sum(each.lengths.numel() for each in found)
            if have != sum(each.values.numel() for each in parts):
                raise CheckpointError(f"`{self._folder}` lacks a part of `{key}`")
            items += found
        self._reader.read_data(LoadPlan(items), _Planner(into)).wait()

    def full_tensors(self) -> dict[str, Tensor]:
        """All tensors in full, by key.

        Raises:
            CheckpointError: the files lack a part of one.
        """
        full = {
            key: torch.empty(each.size, dtype=each.properties.dtype)
            for key, each in self._stored.items()
        }
        self.fill({key: (TensorPart((0,) * each.dim(), each),) for key, each in full.items()})
        return full


class _Listed(FileSystem):
    """Some files of a folder."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files

    def ls(self, path: object) -> list[str]:  # noqa: ARG002  torch's name
        return [str(each) for each in self._files]


class _Planner(DefaultLoadPlanner):
    """Finds the memory for what is read among parts."""

    def __init__(self, into: Mapping[str, Sequence[TensorPart]]) -> None:
        super().__init__()
        self._into = into

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._into[index.fqn][index.index or 0].values
