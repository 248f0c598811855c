"""How a model that runs by the code of transformers is written as a folder that it loads."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from windlass.errors import ModelError
from windlass.models.huggingface.export_layout import CARRIED_FILES, in_type, new_files
from windlass.models.huggingface.model_folder import find_model_folder
from windlass.models.huggingface.weight_files import TYPES, StoredTensor, read_tensor
from windlass.models.layer_stack import LayerStack
from windlass.models.transformers_models.build_model import build_pretrained
from windlass.models.transformers_models.stored_weights import (
    StoredGroup,
    names_in_model,
    open_stored,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersLayout:
    """How a model is written: as its own folder has it, or as transformers would save it."""

    model: Any
    """The model on the meta device."""
    names: Mapping[str, str]
    """Names in the model by those in the stack."""
    files: Mapping[str, bytes]
    """Content of the small files."""
    users: Mapping[str, tuple[str, ...]]
    """Names in the model of the parameters that are tied to one, by its name there."""
    base: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Tensors of the folder that the model came from."""
    groups: Mapping[str, StoredGroup] = field(default_factory=dict)
    """What each parameter is made of there, by its name in the model."""

    def tensors(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that parameters are written as, in the types of the model's own folder.

        Parameters that are stored as one tensor wait for each other.

        Args:
            parameters: full name in the stack and value of each that is tied to no other one.

        Raises:
            ModelError: a value is too large for its type, or a parameter has no place.
        """
        waiting: dict[str, dict[str, Tensor]] = {}
        for full_name, value in parameters:
            name = self.names[full_name]
            for each in (name, *self.users.get(name, ())):
                group = self.groups.get(each)
                if group is None:
                    if each == name:
                        yield from self._reverted({name: value}, None)
                    continue
                if group.is_renamed:
                    if group.first == each or each == name:
                        yield from self._typed(next(iter(group.sources)), value)
                    continue
                parts = waiting.setdefault(group.first, {})
                parts[each] = value
                if parts.keys() == {n for n, g in self.groups.items() if g is group}:
                    yield from self._reverted(waiting.pop(group.first), group)
        if waiting:
            raise ModelError(f"`{next(iter(waiting))}` has only some of the parts it is stored as")

    def other_tensors(self, written: Mapping[str, object]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model's own folder that it does not train, as they are there.

        Args:
            written: those that are written already, by name.
        """
        for name, stored in self.base.items():
            if name not in written:
                yield name, read_tensor(name, stored)

    def _reverted(
        self, parts: Mapping[str, Tensor], group: StoredGroup | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The stored tensors of parameters, as transformers takes them apart."""
        from transformers.core_model_loading import revert_weight_conversion

        stored: dict[str, Tensor] = revert_weight_conversion(self.model, dict(parts))
        if group is not None and stored.keys() != group.sources.keys():
            raise ModelError(
                f"`{next(iter(parts))}` is stored as `{next(iter(group.sources))}`, and "
                f"transformers would write `{next(iter(stored))}`; export it as one file "
                "(`--to FILE.safetensors`)"
            )
        for name, value in stored.items():
            yield from self._typed(name, value)

    def _typed(self, name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        stored = self.base.get(name)
        value = value.contiguous()
        yield name, value if stored is None else in_type(name, value, TYPES[stored.dtype])


def transformers_layout(
    name: str,
    stack: LayerStack,
    *,
    tokenizer: Path | None,
    special_tokens: Mapping[str, tuple[int, str]] | None,
) -> TransformersLayout:
    """How the stack of a model is written.

    Args:
        tokenizer: the `tokenizer.json` of a model that has no folder of its own; None writes none.
        special_tokens: ids and texts of such a model's tokens, by their roles.

    Raises:
        ModelError: the model cannot be built any more.
        InputErrors: every tensor of its folder that does not fit.
    """
    model, folder, names = build_pretrained(name), find_model_folder(name), names_in_model(stack)
    tied = stack.tied_weights
    users: dict[str, tuple[str, ...]] = {}
    for user, owner in tied.items():
        users[names[owner]] = (*users.get(names[owner], ()), names[user])
    if folder.weights is None:
        content = {**folder.read_config(), "architectures": [type(model).__name__]}
        files = new_files(content, tokenizer, special_tokens or {})
        return TransformersLayout(model=model, names=names, files=files, users=users)
    weights = open_stored(model, folder.weights, names, tied)
    contents = ((file, folder.read_small_file(file)) for file in CARRIED_FILES)
    return TransformersLayout(
        model=model,
        names=names,
        files={file: content for file, content in contents if content is not None},
        users=users,
        base=weights.stored,
        groups=weights.groups,
    )
