"""How a model of ours is written as a folder that `transformers` reads."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.errors import ModelError
from windlass.models.huggingface.families import Family, find_family
from windlass.models.huggingface.image_processor import PROCESSOR_FILE, ModelConfig
from windlass.models.huggingface.model_folder import (
    CONFIG_FILE,
    TOKENIZER_FILE,
    find_model_folder,
    is_huggingface,
)
from windlass.models.huggingface.new_head import replaced_classes, with_classes
from windlass.models.huggingface.tensor_layouts import TensorNames, names_in_folder
from windlass.models.huggingface.weight_files import (
    TYPES,
    StoredTensor,
    list_tensors,
    read_tensor,
)
from windlass.models.huggingface.write_config import config_content, is_read_as

_TEMPLATE_FILE = "chat_template.jinja"
CARRIED_FILES = (
    CONFIG_FILE, TOKENIZER_FILE, "generation_config.json", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json", "vocab.txt",
    "merges.txt", _TEMPLATE_FILE, "chat_template.json", PROCESSOR_FILE,
)  # fmt: skip
"""Small files of a folder that belong to its model whatever its weights are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """How a model is written as a folder of Hugging Face."""

    names: TensorNames
    files: Mapping[str, bytes]
    """Content of the small files: `config.json`, tokenizer and others."""
    users: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the parameters that are tied to a parameter, by its name."""
    base: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Tensors of the folder that the model came from."""

    def tensors(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that parameters are written as, in the types of the model's own folder.

        A tensor of which two parameters are a half each is written when both have come.

        Args:
            parameters: full name and value of each, none of which is tied to another one; on the
                meta device only shapes and types are right.

        Raises:
            ModelError: a value is too large for its type.
        """
        waiting: dict[str, Tensor] = {}
        for parameter, value in parameters:
            half = self.names.half(parameter)
            if half is None:
                yield from self._tensors_of(parameter, value)
                continue
            ((name, part),) = self.names.split(parameter, value)
            if name not in waiting:
                waiting[name] = part
                continue
            other = waiting.pop(name)
            whole = torch.cat((part, other) if half == "first" else (other, part))
            yield name, self._typed(name, whole)

    def _tensors_of(self, parameter: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors that one parameter makes alone."""
        parts = self.names.split(parameter, value)
        for name, part in parts:
            yield name, self._typed(name, part)
        second = [self.names.copies(parameter)]
        second += [self.names.sources(user) for user in self.users.get(parameter, ())]
        for names in second:
            for name, (_, part) in zip(names, parts, strict=False):
                if name in self.base:
                    yield name, self._typed(name, part)

    def other_tensors(self, written: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model's own folder that are no parameter of ours, as they are there.

        Args:
            written: those that are written already, by name.
        """
        for name, stored in self.base.items():
            if name not in written:
                yield name, read_tensor(name, stored)

    def _typed(self, name: str, value: Tensor) -> Tensor:
        stored = self.base.get(name)
        return value if stored is None else in_type(name, value, TYPES[stored.dtype])


def in_type(name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in the type that it is written in.

    Raises:
        ModelError: a value is too large for the type.
    """
    typed = value.to(dtype)
    if typed is not value and not value.is_meta and typed.isinf().any() and not value.isinf().any():
        raise ModelError(
            f"`{name}` has values that its own type, {str(dtype).removeprefix('torch.')}, cannot "
            "hold; export it as one safetensors file (`--to FILE.safetensors`), which is float32"
        )
    return typed


def export_layout(
    config: ModelConfig,
    tied: Mapping[str, str],
    *,
    tokenizer: Path | None,
    special_tokens: Mapping[str, tuple[int, str]] | None = None,
    chat_template: bytes | None = None,
    classes: tuple[str, ...] | None = None,
) -> ExportLayout:
    """How a model is written: as its own folder has it, or as the type that has its shape.

    Args:
        tied: full name of each tied parameter, and that of its owner.
        tokenizer: the `tokenizer.json` of a model that has no folder of its own; None writes none.
        special_tokens: id and text of the special tokens of such a model, by names such as
            `eos_token`.
        chat_template: the template of the conversations that it learned; None keeps that which it
            had.
        classes: names of the classes that it learned; None keeps those that it had.

    Raises:
        ModelError: no type of Hugging Face has this shape, or the model's own folder is gone.
    """
    users = {owner: tuple(u for u, o in tied.items() if o == owner) for owner in tied.values()}
    folder = find_model_folder(config.name) if is_huggingface(config.name) else None
    template = {} if chat_template is None else {_TEMPLATE_FILE: chat_template}
    if folder is None or folder.weights is None:
        family, content = config_content(config)
        if folder is not None:
            content = _with_own_keys(folder.read_config(), family, content, config)
        names = TensorNames(family=family, config=config)
        content = _with_classes(content, classes)
        files = new_files(content, tokenizer, special_tokens or {})
        return ExportLayout(names=names, files=files | template, users=users)
    family = find_family(folder.read_config().get("model_type"))
    base = {
        name: tensor
        for name, tensor in list_tensors(folder.weights).items()
        if not family.leaves_out(name, config)
    }
    contents = ((name, folder.read_small_file(name)) for name in CARRIED_FILES)
    files = {name: content for name, content in contents if content is not None}
    if replaced_classes(config) is not None:
        files[CONFIG_FILE] = with_classes(files[CONFIG_FILE], config, family)
    if classes is not None:
        own = {"architectures": [family.architecture_of(config)]}
        content = _with_classes(folder.read_config() | own, classes)
        files[CONFIG_FILE] = _config_file(content)
    return ExportLayout(
        names=names_in_folder(family, config, base),
        files=files | template,
        users=users,
        base=base,
    )


def _with_own_keys(
    own: Mapping[str, Any], family: Family, content: Mapping[str, Any], config: ModelConfig
) -> dict[str, Any]:
    """The content of a `config.json` with all that the file said which the model came from.

    Args:
        family: the type that the model is written as.
        config: its configuration, which may be of another shape than the file's.
    """
    whole = {**content, **own, "dtype": content["dtype"]}
    whole.pop("torch_dtype", None)
    same = own.get("model_type") == family.model_type
    return whole if same and is_read_as(family, whole, config) else {**own, **content}


def _with_classes(
    content: dict[str, Any], classes: tuple[str, ...] | None
) -> dict[str, Any]:  # fmt: skip
    """The content of a `config.json` with names of classes, if there are some."""
    if classes is None:
        return content
    return {
        **content,
        "id2label": {str(number): name for number, name in enumerate(classes)},
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def _config_file(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"


def new_files(
    content: Mapping[str, Any],
    tokenizer: Path | None,
    special_tokens: Mapping[str, tuple[int, str]],
) -> dict[str, bytes]:
    """The small files of a model that came from no folder."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {name: text for name, (_, text) in special_tokens.items()}
    ids = {f"{name}_id": number for name, (number, _) in special_tokens.items()}
    if "eos_token_id" in ids:  # what such a model begins with where there is no prompt
        ids.setdefault("bos_token_id", ids["eos_token_id"])
    files = {CONFIG_FILE: _config_file({**content, **ids})}
    if tokenizer is not None:
        files[TOKENIZER_FILE] = tokenizer.read_bytes()
        files["tokenizer_config.json"] = json.dumps(settings, indent=2).encode() + b"\n"
    return files
