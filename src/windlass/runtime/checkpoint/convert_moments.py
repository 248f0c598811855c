"""Moments of a checkpoint, in whichever format it has them and a run keeps them."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.runtime.checkpoint.safetensors_io import read_tensors
from windlass.runtime.parameters import MasterParameter
from windlass.schema.plan import MomentFormat
from windlass.torch_ext.quantized_moments import MomentCodec, StoredMoment

_FORMATS: dict[str, MomentFormat] = {"F32": "float32", "BF16": "bfloat16", "I8": "int8"}
_CPU = torch.device("cpu")


def read_moments(
    path: Path,
    name: str,
    shape: tuple[int, ...],
    moments: MomentFormat,
    codec: MomentCodec,
    *,
    seed: int,
    step: int,
) -> tuple[StoredMoment, StoredMoment]:
    """Both moments of a weight as they are to be kept, in whichever format a file has them.

    The same bits where it is the same format; else decoded, and encoded as the file's last update
    would have.

    Args:
        path: of a layer's file.
        name: of the weight.
        shape: of the weight.
        moments: how they are to be kept.
        codec: used where the formats differ.
        seed: of the run that wrote the file.
        step: that it was written after.

    Raises:
        CheckpointError: the file is unreadable, lacks them, or has them in another shape or type.
    """
    written = moments_format(path, name)
    kept = _zeros(written, shape)
    into: dict[str, Tensor] = {}
    for which, each in enumerate(kept, start=1):
        into[f"moment{which}/{name}"] = each.values
        if each.scales is not None:
            into[f"scale{which}/{name}"] = each.scales
    read_tensors(path, into)
    if written == moments:
        return kept
    values = codec.decode_all(kept)
    if moments == "float32":
        return StoredMoment(values[0]), StoredMoment(values[1])
    made = _zeros(moments, shape)
    codec.encode_all(values, made, seed=seed, step=step, weight=name)
    return made


def moments_format(path: Path, name: str) -> MomentFormat:
    """The format that a file has a weight's moments in.

    Raises:
        CheckpointError: the file is unreadable, lacks them, or has them in no format of ours.
    """
    key = f"moment1/{name}"
    try:
        with safe_open(path, framework="pt") as file:
            if key not in file.keys():  # noqa: SIM118  it is no mapping
                raise CheckpointError(f"`{path}` has no `{key}`: it is of another model")
            dtype = str(file.get_slice(key).get_dtype())
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}") from None
    if dtype not in _FORMATS:
        known = ", ".join(_FORMATS)
        raise CheckpointError(f"`{path}` has `{key}` as {dtype}; this version reads {known}")
    return _FORMATS[dtype]


def load_moments(path: Path, weights: Sequence[MasterParameter], *, seed: int, step: int) -> None:
    """Puts the moments of a layer's weights in place, whatever format a file has them in.

    Args:
        path: of the layer's file.
        weights: that the layer owns.
        seed: of the run that wrote it.
        step: that it was written after.

    Raises:
        CheckpointError: as `read_moments`.
    """
    codec = MomentCodec(_CPU)
    for weight in weights:
        shape = tuple(weight.master.shape)
        read = read_moments(path, weight.name, shape, _own(weight), codec, seed=seed, step=step)
        for kept, found in zip(weight.moments, read, strict=True):
            kept.values.copy_(found.values)
            if kept.scales is not None and found.scales is not None:
                kept.scales.copy_(found.scales)


def _zeros(moments: MomentFormat, shape: tuple[int, ...]) -> tuple[StoredMoment, StoredMoment]:
    return StoredMoment.zeros(moments, 0, shape, _CPU), StoredMoment.zeros(moments, 1, shape, _CPU)


def _own(weight: MasterParameter) -> MomentFormat:
    if weight.scale1 is not None:
        return "int8"
    return "float32" if weight.moment1.dtype == torch.float32 else "bfloat16"
