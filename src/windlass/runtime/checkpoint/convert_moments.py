"""Loads the moments of a checkpoint, converting them if a run stores them in another format."""

from collections.abc import Sequence
from itertools import count, takewhile
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.errors import CheckpointError
from windlass.runtime.checkpoint.layer_tensors import read_tensors
from windlass.runtime.optimizer_state.factored_moment import FactoredMoment
from windlass.runtime.parameters import MasterParameter
from windlass.schema import MomentFormat
from windlass.torch_ext import MomentCodec, StoredMoment

_FORMATS: dict[str, MomentFormat] = {
    "F64": "float32", "F32": "float32", "BF16": "bfloat16", "I8": "int8",
}  # fmt: skip
"""Format of the moments by their safetensors dtype; a float64 run stores them in float64."""
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
) -> tuple[StoredMoment, ...]:
    """All moments of a parameter in a wanted format, whichever format the file has.

    They are bit-identical if the formats agree. Otherwise they are decoded, and encoded as the last
    update before saving would have.

    Raises:
        CheckpointError: the file is unreadable, lacks the moments, or has them in another shape or
            dtype.
    """
    dtypes = _moment_dtypes(path, name)
    file_format = moments_format(path, name)
    stored = _zeros(file_format, shape, len(dtypes))
    if dtypes[0] == "F64":
        stored = tuple(StoredMoment(moment.values.double()) for moment in stored)
    tensors: dict[str, Tensor] = {}
    for which, moment in enumerate(stored, start=1):
        tensors[f"moment{which}/{name}"] = moment.values
        if moment.scales is not None:
            tensors[f"scale{which}/{name}"] = moment.scales
    read_tensors(path, tensors)
    if file_format == moments:
        return stored
    values = codec.decode_all(stored)
    if moments == "float32":
        return StoredMoment(values[0]), StoredMoment(values[1])
    converted = _zeros(moments, shape, len(stored))
    codec.encode_all(values, converted, seed=seed, step=step, weight=name)
    return converted


def moments_format(path: Path, name: str) -> MomentFormat:
    """The format in which a file stores a parameter's moments.

    Raises:
        CheckpointError: the file is unreadable, lacks the moments, or has an unknown dtype.
    """
    dtype = _moment_dtypes(path, name)[0]
    if dtype not in _FORMATS:
        readable = ", ".join(_FORMATS)
        raise CheckpointError(
            f"`{path}` has `moment1/{name}` as {dtype}; this version reads {readable}"
        )
    return _FORMATS[dtype]


def _moment_dtypes(path: Path, name: str) -> list[str]:
    """The safetensors dtype of each of a parameter's moments."""
    try:
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            named = takewhile(keys.__contains__, (f"moment{n}/{name}" for n in count(1)))
            dtypes = [str(file.get_slice(key).get_dtype()) for key in named]
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}") from None
    if not dtypes:
        raise CheckpointError(f"`{path}` has no `moment1/{name}`: it is of another model")
    return dtypes


def read_average(path: Path, name: str) -> Tensor | None:
    """The average of a parameter; None if the file has none."""
    key = f"average/{name}"
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key) if key in file.keys() else None  # noqa: SIM118


def load_moments(path: Path, weights: Sequence[MasterParameter], *, seed: int, step: int) -> None:
    """Loads the moments of a layer's parameters in place, whichever format the file has.

    Raises:
        CheckpointError: see `read_moments`.
    """
    codec = MomentCodec(_CPU)
    for weight in weights:
        if weight.factors is not None:
            load_factors(path, weight.name, weight.factors)
            continue
        shape, wanted = tuple(weight.master.shape), _format_of(weight)
        loaded = read_moments(path, weight.name, shape, wanted, codec, seed=seed, step=step)
        require_moments(path, weight, len(loaded))
        for moment, source in zip(weight.moments, loaded, strict=True):
            moment.values.copy_(source.values)
            if moment.scales is not None and source.scales is not None:
                moment.scales.copy_(source.scales)


def load_factors(path: Path, name: str, factors: FactoredMoment) -> None:
    """Loads the second moment of a whole parameter by rows and columns, in place.

    Raises:
        CheckpointError: the file is unreadable, or another optimizer wrote it.
    """
    read_tensors(path, {f"{kind}/{name}": tensor for kind, tensor in factors.named})


def load_average(weight: MasterParameter, average: Tensor | None) -> None:
    """Gives a parameter, whose master is loaded, its average; without one it begins anew."""
    if weight.average is not None:
        weight.average.copy_(weight.master.detach() if average is None else average)


def require_moments(path: Path, weight: MasterParameter, present: int) -> None:
    """Checks that a file has as many moments of a parameter as the run's optimizer keeps.

    Raises:
        CheckpointError: it has fewer or more, so another optimizer wrote them.
    """
    if present != len(weight.moments):
        raise CheckpointError(
            f"`{path}` has {present} moments of `{weight.name}` where the optimizer keeps "
            f"{len(weight.moments)}; resume with the `train.optimizer` that wrote it"
        )


def _zeros(moments: MomentFormat, shape: tuple[int, ...], number: int) -> tuple[StoredMoment, ...]:
    return tuple(StoredMoment.zeros(moments, which, shape, _CPU) for which in range(number))


def _format_of(weight: MasterParameter) -> MomentFormat:
    first = weight.moments[0]
    if first.scales is not None:
        return "int8"
    return "bfloat16" if first.values.dtype == torch.bfloat16 else "float32"
