"""Checkpoints on disk: a folder of safetensors files and a manifest that proves them whole.

    step-00000100/
        manifest.json                 step, position in the data, labels, size and hash of each file
        layer-0000.safetensors        weight/..., moment1/..., moment2/..., steps/... of one layer
        ...

A folder gets its name only when everything in it is on the disk; what begins with a dot is a
temporary that any later start may remove.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

import torch
from pydantic import ValidationError
from torch import Tensor

from windlass.atomic_files import hash_file, atomic_write
from windlass.document import Document
from windlass.errors import CheckpointError
from windlass.models.tensor_parallel.shard_params import ParamShard
from windlass.runtime.checkpoint.convert_moments import load_moments, read_moments
from windlass.runtime.checkpoint.safetensors_io import FileChecksum, read_tensors
from windlass.runtime.parameters import LayerParameters, ResidentLayer, MasterParameter
from windlass.torch_ext.quantized_moments import MomentCodec

MANIFEST_FILE = "manifest.json"

_PART = r"([0-9]+)(?:x([0-9]+))?\.[0-9]+\.safetensors"
"""How the name of a part of a layer ends: its slice and its shard."""


class Manifest(Document):
    """What a checkpoint holds, and the proof that it is whole."""

    version: Literal[1] = 1
    step: int
    """Updates that the weights have had."""
    samples: int
    """Samples of the training order that were taken; the next step takes the ones that follow."""
    seed: int
    plan: str
    """The plan's label."""
    graph: str
    """The graph's label."""
    files: dict[str, FileChecksum]
    checksum: str = ""
    """SHA-256 of this manifest with an empty `check`."""

    def with_checksum(self) -> Self:
        """The same with its `check`."""
        return self.model_copy(update={"check": self._digest()})

    @property
    def is_intact(self) -> bool:
        """Whether nothing changed since it was sealed."""
        return self.checksum == self._digest()

    def _digest(self) -> str:
        bare = self.model_dump(mode="json", exclude={"check"})
        return hashlib.sha256(json.dumps(bare, sort_keys=True).encode()).hexdigest()


class RankFiles(Document):
    """What one device of several has written of a checkpoint."""

    files: dict[str, FileChecksum]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint, and what had to be passed over to find it."""

    path: Path
    manifest: Manifest
    damaged: tuple[str, ...] = ()
    """One sentence for each newer checkpoint that is not whole, newest first."""


def checkpoint_name(step: int) -> str:
    """The name of the checkpoint after `step` updates."""
    return f"step-{step:08d}"


def layer_file(index: int, *, shard: tuple[str, int] | None = None) -> str:
    """The name of one layer's file, or of one device's share of it, by its slice and shard.

    A slice is named by its index, or by its row and column in a grid.
    """
    place = "" if shard is None else f".{shard[0]}.{shard[1]}"
    return f"layer-{index:04d}{place}.safetensors"


class LayerShardFile(NamedTuple):
    """One device's share of a layer."""

    file: str
    row: int
    column: int


def shard_files(manifest: Manifest, index: int) -> tuple[LayerShardFile, ...]:
    """The files in which a layer lies in parts; none if it lies whole in one."""
    pattern = re.compile(rf"layer-{index:04d}\.{_PART}")
    found = ((name, pattern.fullmatch(name)) for name in manifest.files)
    return tuple(LayerShardFile(name, int(match[1]), int(match[2] or 0)) for name, match in found if match)


def is_sharded(manifest: Manifest) -> bool:
    """Whether any layer lies in parts."""
    return any(re.fullmatch(rf"layer-[0-9]+\.{_PART}", name) for name in manifest.files)


def write_rank_files(folder: Path, device: int, files: dict[str, FileChecksum]) -> None:
    """Tells the device that ends a checkpoint what another one has written of it."""
    atomic_write(rank_files_path(folder, device), RankFiles(files=files).to_json())


def take_rank_files(folder: Path, device: int) -> dict[str, FileChecksum]:
    """What a device has told of its files; forgotten then."""
    path = rank_files_path(folder, device)
    told = RankFiles.model_validate_json(path.read_bytes())
    path.unlink()
    return told.files


def rank_files_path(folder: Path, device: int) -> Path:
    """Where a device tells what it has written."""
    return folder / f"proofs-{device}.json"


def checkpoint_folders(folder: Path) -> tuple[Path, ...]:
    """All checkpoints in a folder, oldest first; none if there is no such folder."""
    return tuple(sorted(folder.glob("step-*"))) if folder.is_dir() else ()


def latest_checkpoint(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole; None if the folder holds none at all.

    Raises:
        CheckpointError: there are some, and every one is damaged.
    """
    damaged: list[str] = []
    for path in reversed(checkpoint_folders(folder)):
        try:
            manifest = verify_checkpoint(path)
        except CheckpointError as error:
            damaged.append(str(error))
        else:
            return Checkpoint(path=path, manifest=manifest, damaged=tuple(damaged))
    if damaged:
        raise CheckpointError("; ".join((*damaged, "no earlier checkpoint is left")))
    return None


def open_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint that another process has proved whole.

    Raises:
        CheckpointError: it has no manifest.
    """
    return Checkpoint(path=path, manifest=_manifest(path / MANIFEST_FILE))


def verify_checkpoint(path: Path) -> Manifest:
    """The manifest of a checkpoint whose every byte is as it was written.

    Raises:
        CheckpointError: a file is missing, cut short or changed; the message names it.
    """
    manifest = _manifest(path / MANIFEST_FILE)
    for name, proof in manifest.files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"`{file}` is missing from its checkpoint")
        if file.stat().st_size != proof.bytes:
            raise CheckpointError(
                f"`{file}` has {file.stat().st_size} bytes where {proof.bytes} were written"
            )
        if hash_file(file) != proof.sha256:
            raise CheckpointError(f"`{file}` has changed since it was written: its hash differs")
    return manifest


def load_checkpoint(checkpoint: Checkpoint, layers: Sequence[ResidentLayer], *, moments: bool = True) -> None:
    """Puts a checkpoint's tensors in place.

    Args:
        checkpoint: a whole one.
        layers: of the same model, in whichever precision and with moments in whichever format.
        moments: also what only the optimizer needs.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    for index, layer in enumerate(layers):
        file, manifest = checkpoint.path / layer_file(index), checkpoint.manifest
        wanted = dict(layer.checkpoint_tensors(moments=False))
        if moments:
            wanted |= {f"steps/{weight.name}": weight.steps for weight in layer.owned}
        if wanted:
            read_tensors(file, wanted)
        if moments and layer.owned:
            load_moments(file, layer.owned, seed=manifest.seed, step=manifest.step)
        for weight in layer.owned:
            weight.refresh_working_copy()


def load_layer_shard(
    checkpoint: Checkpoint,
    index: int,
    weights: Sequence[MasterParameter],
    layer: LayerParameters,
    pieces: Mapping[str, ParamShard],
) -> None:
    """Puts one device's share of a layer in place.

    Args:
        checkpoint: a whole one, whose layers are each in one file.
        index: of the layer.
        weights: that the device updates: whole ones, slices, or shards of either.
        layer: that they are of.
        cuts: which part of each weight the device's slice is, by its full name.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    file, manifest = checkpoint.path / layer_file(index), checkpoint.manifest
    buffers = {f"buffer/{name}": buffer for name, buffer in layer.persistent_buffers.items()}
    if buffers:
        read_tensors(file, buffers)
    codec = MomentCodec(torch.device("cpu"))
    for weight in weights:
        read_tensors(file, {f"steps/{weight.name}": weight.steps})
        piece = pieces[weight.name]
        if tuple(weight.shape) == piece.full_shape:
            load_moments(file, [weight], seed=manifest.seed, step=manifest.step)
            read_tensors(file, {f"weight/{weight.name}": weight.master})
        else:
            _load_share(file, manifest, weight, piece, codec)
        weight.refresh_working_copy()


def _load_share(file: Path, manifest: Manifest, weight: MasterParameter, piece: ParamShard, codec: MomentCodec) -> None:
    """Puts a slice, or a shard of one, in place; moments in fewer bits are rounded anew."""

    def share(whole: Tensor) -> Tensor:
        flat = piece.extract(whole).reshape(-1)
        return flat[weight.offset : weight.offset + weight.master.numel()].view(weight.shape)

    whole = torch.empty(piece.full_shape, dtype=weight.master.dtype)
    read_tensors(file, {f"weight/{weight.name}": whole})
    weight.master.detach().copy_(share(whole))
    seed, step = manifest.seed, manifest.step
    one, two = read_moments(file, weight.name, piece.full_shape, "float32", codec, seed=seed, step=step)
    if weight.moment1.dtype == torch.float32:
        weight.moment1.copy_(share(one.values))
        weight.moment2.copy_(share(two.values))
    else:
        codec.encode_all(
            (share(one.values), share(two.values)), weight.moments,
            seed=seed, step=step, weight=weight.name, first=weight.offset,
        )  # fmt: skip


def remove_temporaries(folder: Path) -> None:
    """Removes what a killed process left behind."""
    if folder.is_dir():
        for path in folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)


def _manifest(path: Path) -> Manifest:
    if not path.is_file():
        raise CheckpointError(f"`{path}` is missing from its checkpoint")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        fault = error.errors()[0]["msg"]
        raise CheckpointError(f"`{path}` is not a manifest as it was written: {fault}") from None
    if not manifest.is_intact:
        raise CheckpointError(f"`{path}` has changed since it was written: its check differs")
    return manifest
