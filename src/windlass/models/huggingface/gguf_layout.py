"""How a model of ours is written as a GGUF file: its keys, and names and types of its tensors."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace

import torch
from torch import Tensor

from windlass.errors import InputErrors, ModelError
from windlass.models.config import TransformerConfig
from windlass.models.huggingface.export_layout import ExportLayout
from windlass.models.huggingface.families import GgufTable
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_files import FLOAT_TYPES
from windlass.models.huggingface.write_config import NOT_SHAPE


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufLayout:
    """How a model is written as a GGUF file."""

    architecture: str
    keys: Mapping[str, int | float]
    """Sizes and constants, by full key."""
    names: TensorNames
    export: ExportLayout
    """How it is written as a folder, whose number formats the file keeps."""

    def tensors(self, parameter: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a parameter is written as: vectors in float32, as readers ask for.

        Args:
            parameter: its full name; it is tied to no other one.
            value: on the meta device only shapes and types are right.
        """
        for name, part in self.names.split(parameter, value):
            yield name, part.to(self._dtype(parameter) if part.dim() > 1 else torch.float32)

    def _dtype(self, parameter: str) -> torch.dtype:
        stored = self.export.base.get(self.export.names.sources(parameter)[0])
        return torch.float32 if stored is None else FLOAT_TYPES[stored.dtype]


def gguf_layout(layout: ExportLayout) -> GgufLayout:
    """How a model that can be written as a folder is written as a GGUF file.

    Raises:
        ModelError: no GGUF file of its type can be written.
        InputErrors: every setting of the model that such a file cannot say.
    """
    family, config = layout.names.family, layout.names.config
    table = family.gguf
    if table is None:
        raise ModelError(
            f"`{config.name}` is a `{family.model_type}`, of which no GGUF file is written; export "
            "it as a folder (`--to hf:DIR`)"
        )
    errors = [*_not_expressed(table, config)]
    if errors:
        raise InputErrors(errors)
    names = TensorNames(family=replace(family, tensors=table.tensors), config=config)
    keys = {
        f"{table.architecture}.{key}": getattr(config, name) for key, name in table.keys.items()
    }
    return GgufLayout(architecture=table.architecture, keys=keys, names=names, export=layout)


def _not_expressed(table: GgufTable, config: TransformerConfig) -> Iterator[str]:
    """Settings that are not the usual ones, and that no key says."""
    said = {*table.keys.values(), *table.expressed, *NOT_SHAPE, "rotary_width"}
    if config.kv_heads == config.heads:
        said.add("kv_heads")
    for field in fields(config):
        value = getattr(config, field.name)
        usual = table.only.get(field.name, () if field.default is MISSING else (field.default,))
        if field.name not in said and value not in usual:
            yield (
                f"`{field.name}` = {value} of `{config.name}` is nothing that a GGUF file of type "
                f"`{table.architecture}` says; export it as a folder (`--to hf:DIR`)"
            )
