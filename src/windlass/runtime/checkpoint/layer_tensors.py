"""Reads the tensors of a layer of a checkpoint, wherever its frozen weights stand.

layer-0003.safetensors          what is trained, with its state; frozen weights too, where the
                                run keeps all weights in device memory
layer-0003.frozen.safetensors   or else they have a file of their own, the same in every
                                checkpoint
layer-0003.places.json          or they are left in the files of the base, which it names
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from windlass.errors import CheckpointError, ModelError
from windlass.models import PLACES_SUFFIX, WeightPlaces

PADDING = "zeros/"
"""Beginning of the names of zeros between the tensors of a file, which nobody reads."""
_SUFFIX = ".safetensors"
_WEIGHT = "weight/"


class BaseChangedError(CheckpointError):
    """Files that a checkpoint refers to have changed; unlike damage, no older one is better."""


class LayerTensors:
    """The tensors of one layer, by key, each read when it is asked for.

    Args:
        places: frozen weights that stand elsewhere; None if there are none.
    """

    def __init__(self, path: Path, files: Sequence[safe_open], places: WeightPlaces | None) -> None:
        self._path = path
        self._files: dict[str, safe_open] = {
            key: file
            for file in files
            for key in file.keys()  # noqa: SIM118  no mapping
            if not key.startswith(PADDING)
        }
        weights = {} if places is None else places.weights
        self._places = {f"{_WEIGHT}{name}": place for name, place in weights.items()}
        self.keys: tuple[str, ...] = (*self._files, *self._places)
        """All keys; those of frozen weights come last."""

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor.

        Raises:
            CheckpointError: there is none of this key.
        """
        if key in self._places:
            return self._places[key].shape
        return tuple(self._file(key).get_slice(key).get_shape())

    def read(self, key: str) -> Tensor:
        """A tensor, in the type that its file has.

        Raises:
            CheckpointError: there is none of this key, or it cannot be read.
        """
        if key not in self._places:
            tensor: Tensor = self._file(key).get_tensor(key)
            return tensor
        try:
            return self._places[key].read()
        except ModelError as error:
            raise CheckpointError(str(error)) from None

    def _file(self, key: str) -> safe_open:
        if key not in self._files:
            raise CheckpointError(f"`{self._path}` has no `{key}`: it is of another model")
        return self._files[key]


@contextlib.contextmanager
def open_layer(path: Path) -> Iterator[LayerTensors]:
    """The tensors of the layer whose file this is.

    Raises:
        CheckpointError: a file cannot be read, or the base that it refers to has changed.
    """
    try:
        with contextlib.ExitStack() as stack:
            own = [file for file in (path, frozen_file(path)) if file == path or file.exists()]
            files = [stack.enter_context(safe_open(file, framework="pt")) for file in own]
            yield LayerTensors(path, files, read_places(places_file(path)))
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"`{path}` cannot be read: {error}") from None


def read_tensors(path: Path, into: Mapping[str, Tensor]) -> None:
    """Reads tensors of a layer into existing memory.

    Args:
        into: tensors to fill, by key; the layer may have more.

    Raises:
        CheckpointError: a file is unreadable, or the layer lacks a tensor or has it in another
            shape.
    """
    with open_layer(path) as layer:
        for key, tensor in into.items():
            shape = layer.shape(key)
            if shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"`{path}` has `{key}` as {shape}, and the model has it as "
                    f"{tuple(tensor.shape)}: it is of another model"
                )
            tensor.detach().copy_(layer.read(key))


def read_tensor(path: Path, key: str) -> Tensor:
    """One tensor of a layer, in the type that its file has.

    Raises:
        CheckpointError: a file cannot be read, or the layer has no such tensor.
    """
    with open_layer(path) as layer:
        return layer.read(key)


def frozen_file(path: Path) -> Path:
    """The file with the frozen weights of a layer, or of a shard of it, beside its own file."""
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}.frozen{_SUFFIX}")


def places_file(path: Path) -> Path:
    """The file that says where frozen weights of a layer stand, beside its own file."""
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}{PLACES_SUFFIX}")


def read_places(path: Path) -> WeightPlaces | None:
    """Where frozen weights of a layer stand, in files that are unchanged; None without the file.

    Raises:
        CheckpointError: the file is damaged.
        BaseChangedError: a file that it refers to was changed, or is gone.
    """
    if not path.exists():
        return None
    try:
        places = WeightPlaces.model_validate_json(path.read_bytes())
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise CheckpointError(f"`{path}` is damaged: {message}") from None
    if changes := [*places.changes()]:
        raise BaseChangedError(f"`{path.parent}` refers to weights elsewhere: {'; '.join(changes)}")
    return places
