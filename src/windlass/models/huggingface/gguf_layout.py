"""How a model of ours is written as a GGUF file: its keys, and names and types of its tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace

import torch
from torch import Tensor

from windlass.errors import InputErrors, ModelError
from windlass.models.config import TransformerConfig
from windlass.models.huggingface.export_layout import ExportLayout, in_type
from windlass.models.huggingface.families import GgufTable
from windlass.models.huggingface.model_folder import find_model_folder, is_huggingface
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_files import FLOAT_TYPES
from windlass.models.huggingface.write_config import NOT_SHAPE
from windlass.models.positions.rope_scaling import RopeScaling

_ADDED = ("position_embd.weight",)
"""Matrices whose rows are added, not multiplied, which are written in float32 as vectors are."""
_FLOATS = frozenset(field.name for field in fields(TransformerConfig) if field.type is float)
"""Fields of which readers take no whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLayout:
    """How a model is written as a GGUF file."""

    name: str
    """What the file calls the model."""
    architecture: str
    keys: Mapping[str, int | float | str]
    """Sizes and constants, by full key; readers take no whole number for one that is not."""
    names: TensorNames
    export: ExportLayout
    """How it is written as a folder, whose number formats the file keeps."""

    def tensors(self, parameter: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a parameter is written as: vectors in float32, as readers ask for.

        Args:
            parameter: its full name; it is tied to no other one.
            value: on the meta device only shapes and types are right.

        Raises:
            ModelError: a value is too large for its type.
        """
        for name, part in self.names.split(parameter, value):
            is_added = part.dim() == 1 or name in _ADDED
            yield name, in_type(name, part, torch.float32 if is_added else self._dtype(parameter))

    def constants(self) -> Iterator[tuple[str, Tensor]]:
        """How many times slower each of Llama 3.1's angles is than without scaling, `[k'/2]`."""
        config = self.names.transformer
        scaling = config.rope_scaling
        if scaling is not None and scaling.type == "llama3":
            width, base = config.rotated_width, config.rotary_base
            slope, offset = scaling.kept_share(width, base)
            plain = base ** -(torch.arange(0, width, 2, dtype=torch.float32) / width)
            kept = (plain * slope + offset).clamp(0, 1)
            yield "rope_freqs.weight", 1 / (kept * (1 - 1 / scaling.factor) + 1 / scaling.factor)

    def _dtype(self, parameter: str) -> torch.dtype:
        stored = self.export.base.get(self.export.names.sources(parameter)[0])
        return torch.float32 if stored is None else FLOAT_TYPES[stored.dtype]


def gguf_layout(layout: ExportLayout) -> GgufLayout:
    """How a model that can be written as a folder is written as a GGUF file.

    Raises:
        ModelError: no GGUF file of its type can be written.
        InputErrors: every setting of the model that such a file cannot say.
    """
    family, table = layout.names.family, layout.names.family.gguf
    if table is None:
        raise ModelError(
            f"`{layout.names.config.name}` is a `{family.model_type}`, of which no GGUF file is "
            "written; export it as a folder (`--to hf:DIR`)"
        )
    config = layout.names.transformer
    errors = [*_not_expressed(table, config)]
    if errors:
        raise InputErrors(errors)
    names = TensorNames(family=replace(family, tensors=table.tensors), config=config)
    keys = {f"{table.architecture}.{key}": _value(config, name) for key, name in table.keys.items()}
    scaling = config.rope_scaling
    if scaling is not None and scaling.type == "linear":
        keys[f"{table.architecture}.rope.scaling.type"] = "linear"
        keys[f"{table.architecture}.rope.scaling.factor"] = float(scaling.factor)
    return GgufLayout(
        name=_shown_name(config.name), architecture=table.architecture, keys=keys, names=names,
        export=layout,
    )  # fmt: skip


def _value(config: TransformerConfig, name: str) -> int | float | str:
    """A property of a model in its own type: a `config.json` may have a whole number for it."""
    value: int | float | str = getattr(config, name)
    return float(value) if name in _FLOATS else value


def _shown_name(name: str) -> str:
    """The name of a model without the folder of somebody's machine in which it lies."""
    if not is_huggingface(name):
        return name
    folder = find_model_folder(name).config.parent
    return folder.resolve().name


def _not_expressed(table: GgufTable, config: TransformerConfig) -> Iterator[str]:
    """Settings that are not the usual ones, and that no key says."""
    said = {*table.keys.values(), *table.expressed, *NOT_SHAPE, "rotary_width"}
    if config.kv_heads == config.heads:
        said.add("kv_heads")
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, RopeScaling) and value.type in ("linear", "llama3"):
            continue
        usual = table.only.get(field.name, () if field.default is MISSING else (field.default,))
        if field.name not in said and value not in usual:
            yield (
                f"`{field.name}` = {value} of `{config.name}` is nothing that a GGUF file of type "
                f"`{table.architecture}` says; export it as a folder (`--to hf:DIR`)"
            )
