"""Weights that Windlass wrote, as the base of adapters: a checkpoint's, or those of one file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from windlass.errors import InputErrors, ModelError, shorten
from windlass.models.adapter_files.peft_weights import AdaptedWeights, PeftWeights
from windlass.models.fine_tuning.adapter_names import is_adapter
from windlass.models.huggingface.weight_files import list_file
from windlass.models.huggingface.weight_places import (
    PLACES_SUFFIX,
    WeightPlace,
    WeightPlaces,
    place_of,
)
from windlass.models.layer_stack import LayerStack, WeightSource

_WEIGHT = "weight/"
"""Beginning of a weight's name in a checkpoint, which has moments too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseWeights:
    """Weights in files, each of which is read when it is asked for."""

    stored: Mapping[str, WeightPlace]
    """Where each parameter stands, by its full name."""
    stay: bool
    """Whether the files stay where they are; a run's checkpoints may be removed."""

    @property
    def parameters(self) -> frozenset[str]:
        """Full names of the parameters in the files."""
        return frozenset(self.stored)

    def read(self, parameter: str) -> Tensor:
        """The values of one parameter.

        Raises:
            ModelError: a file cannot be read any more.
        """
        return self.stored[parameter].read()

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives."""
        return self.stored[parameter].torch_dtype

    def place(self, parameter: str) -> WeightPlace | None:
        """The bytes of the files that are the values of a parameter; None if they may go away."""
        return self.stored[parameter] if self.stay else None


def with_files(stack: LayerStack, base: Path | None, adapters: PeftWeights | None) -> LayerStack:
    """The stack with weights from files, apart from those that it has no file for.

    Args:
        stack: a model with adapters, on the meta device or with weights of its own.
        base: a checkpoint or a safetensors file with the weights of its base; None keeps its own.
        adapters: values of its adapters; None draws them.

    Raises:
        ModelError: a file cannot be read, or has not all weights of the base.
    """
    source = stack.weights if base is None else open_base_weights(base, stack)
    if adapters is not None:
        _require_copies(source, adapters)
        source = AdaptedWeights(base=source, adapters=adapters)
    if source is None:
        return stack
    for name, parameter in _parameters(stack).items():
        if not parameter.is_meta and name in source.parameters:
            parameter.data.copy_(source.read(name))
    return replace(stack, weights=source)


def _require_copies(source: WeightSource | None, adapters: PeftWeights) -> None:
    """Refuses adapters whose folder has other frozen weights than the base.

    Raises:
        ModelError: it has.
    """
    for name, copy in adapters.copies.items():
        if source is None or name not in source.parameters:
            continue
        weight = source.read(name)
        if weight.shape == copy.shape and (
            torch.equal(weight.to(copy.dtype), copy) or torch.equal(copy.to(weight.dtype), weight)
        ):
            continue
        raise ModelError(
            f"the folder of adapters `{adapters.folder}` has a `{name}` of its own that is none of "
            "its `modules_to_save`; save the base with it, and name that as the model"
        )


def open_base_weights(path: Path, stack: LayerStack) -> BaseWeights:
    """The weights of a checkpoint, or of one file, for the base of a model with adapters.

    Raises:
        ModelError: a file cannot be read, or has not all weights of the base.
        InputErrors: weights that a checkpoint only refers to were changed, or what it says of them
            is damaged.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    stored = {
        key.removeprefix(_WEIGHT): place_of(tensor)
        for file in files
        for key, tensor in list_file(file).items()
        if key.startswith(_WEIGHT) or not path.is_dir()
    }
    for file in path.glob(f"*{PLACES_SUFFIX}"):
        places = WeightPlaces.load(file)
        if changed := [*places.changes()]:
            raise InputErrors(changed)
        stored |= places.weights
    expected = {
        name: tuple(parameter.shape)
        for name, parameter in _parameters(stack).items()
        if not is_adapter(name) and name not in stack.tied_weights
    }
    wrong = [
        name
        for name, shape in expected.items()
        if name not in stored or stored[name].shape != shape
    ]
    if wrong:
        raise ModelError(
            f"`{shorten(str(path))}` lacks {len(wrong)} of the {len(expected)} weights of "
            f"`{stack.name}` (such as `{wrong[0]}`), or has them in other shapes: it is another "
            "model, or its ranks divide it; write it as one file by "
            "`windlass export RUN --to base.safetensors`, and name that as `lora.base`"
        )
    return BaseWeights(stored={name: stored[name] for name in expected}, stay=not path.is_dir())


def _parameters(stack: LayerStack) -> dict[str, torch.nn.Parameter]:
    """Every parameter by its full name."""
    return {
        f"{name}.{path}": parameter
        for name, layer in zip(stack.names, stack.layers, strict=True)
        for path, parameter in layer.named_parameters(remove_duplicate=False)
    }
