"""The weights of a folder by the names of a model of transformers, as transformers joins them.

Which stored tensors make a weight, under which name, is asked of the library's own conversions;
they run on tensors of one weight at a time.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from windlass.errors import InputErrors, ModelError
from windlass.models.fine_tuning.adapter_names import is_adapter
from windlass.models.huggingface.weight_files import (
    TYPES,
    StoredTensor,
    list_tensors,
    read_tensor,
)
from windlass.models.huggingface.weight_places import ByteRange, WeightPlace
from windlass.models.layer_stack import LayerStack

_MOST_NAMED = 10
"""Tensors named in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersWeights:
    """Weights in files, each of which is read when it is asked for."""

    model: Any
    """The model, whose conversions ask for it; on the meta device."""
    stored: Mapping[str, StoredTensor]
    """Every tensor of the folder, by its name there."""
    groups: Mapping[str, "StoredGroup"]
    """By the name of each tensor in the model, what it is made of."""
    names: Mapping[str, str]
    """Names in the model by those in the stack."""
    parameters: frozenset[str]
    """Full names in the stack of what the folder has."""

    def read(self, parameter: str) -> Tensor:
        """The values of one parameter or buffer, in the type that they are stored in.

        Raises:
            ModelError: a file cannot be read any more.
        """
        name = self.names[parameter]
        group = self.groups[name]
        tensors = {source: read_tensor(source, self.stored[source]) for source in group.sources}
        return group.convert(self.model, tensors)[name]

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives."""
        sources = self.groups[self.names[parameter]].sources
        return reduce(torch.promote_types, (TYPES[self.stored[each].dtype] for each in sources))

    def place(self, parameter: str) -> WeightPlace | None:
        """The bytes of a file that are what `read` gives; None if they are made of several."""
        group = self.groups[self.names[parameter]]
        if not group.is_renamed:
            return None
        stored = self.stored[next(iter(group.sources))]
        part = ByteRange(file=stored.file.absolute(), offset=stored.offset, nbytes=stored.nbytes)
        return WeightPlace(dtype=stored.dtype, shape=stored.shape, ranges=(part,))


class StoredGroup:
    """Stored tensors that one conversion of transformers makes weights of.

    Args:
        first: name in the model by which the conversion knows the group.
        transform: what makes weights of them; it is copied for each use.
    """

    def __init__(self, first: str, transform: Any) -> None:  # noqa: ANN401  one of transformers
        self.first, self.transform = first, transform
        self.sources: dict[str, str] = {}
        """Pattern that each stored tensor matched, by its name, in the order of their numbers."""

    @property
    def is_renamed(self) -> bool:
        """Whether one stored tensor is the weight as it is."""
        from transformers.core_model_loading import WeightRenaming

        return isinstance(self.transform, WeightRenaming)

    def convert(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ANN401
        """Weights by their names in the model."""
        transform = copy.deepcopy(self.transform)
        for source, pattern in self.sources.items():
            transform.add_tensor(self.first, source, pattern, tensors[source])
        made = transform.convert(self.first, model=model, config=model.config)
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def open_stored(
    model: Any,  # noqa: ANN401
    folder: Path,
    names: Mapping[str, str],
    tied: Mapping[str, str],
) -> TransformersWeights:
    """The weights of a folder for a model of transformers.

    Args:
        names: names in the model of all parameters and buffers of the stack, by theirs.
        tied: full names in the stack of tied parameters, with those of their owners.

    Raises:
        ModelError: the folder has no weights that can be read.
        InputErrors: every tensor that is missing, unknown or of another shape.
    """
    stored = list_tensors(folder)
    groups, unknown = _grouped(model, stored)
    made: dict[str, Tensor] = {}
    by_name: dict[str, StoredGroup] = {}
    for group in groups:
        metas = {
            source: torch.empty(
                stored[source].shape, dtype=TYPES.get(stored[source].dtype), device="meta"
            )
            for source in group.sources
        }
        try:
            values = group.convert(model, metas)
        except Exception as error:
            raise ModelError(
                f"`{folder}`: transformers cannot join {_listed(group.sources)}: "
                f"{' '.join(str(error).split())[:200]}"
            ) from error
        made |= values
        by_name |= dict.fromkeys(values, group)
    # A tied weight may be stored under any one of its names.
    twins = {names[one]: names[other] for one, other in tied.items()}
    for one, other in [*twins.items(), *((b, a) for a, b in twins.items())]:
        if one not in by_name and other in by_name:
            by_name[one], made[one] = _Renamed(one, other, by_name[other]), made[other]
    errors = [*_disagreements(model, folder, names, made, unknown)]
    if errors:
        raise InputErrors(errors)
    present = frozenset(full for full, name in names.items() if name in by_name)
    return TransformersWeights(
        model=model, stored=stored, groups=by_name, names=names, parameters=present
    )


def names_in_model(stack: LayerStack) -> dict[str, str]:
    """The names in the model of all parameters and buffers of a stack but adapters, by theirs."""
    return {
        f"{layer_name}.{path}": stack.name_in_module(f"{layer_name}.{path}")
        for layer_name, layer in zip(stack.names, stack.layers, strict=True)
        for named in (layer.named_parameters, layer.named_buffers)
        for path, _ in named(remove_duplicate=False)
        if not is_adapter(path)
    }


class _Renamed(StoredGroup):
    """A weight that is stored under the name of one that it is tied to."""

    def __init__(self, name: str, twin: str, group: StoredGroup) -> None:
        super().__init__(twin, group.transform)
        self._name, self._twin, self.sources = name, twin, group.sources

    def convert(self, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:  # noqa: ANN401
        """Weights by their names in the model."""
        return {self._name: super().convert(model, tensors)[self._twin]}


def _grouped(
    model: Any,  # noqa: ANN401
    stored: Mapping[str, StoredTensor],
) -> tuple[list[StoredGroup], list[str]]:
    """Stored tensors by the conversion that takes them, and those that the model does not know."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        dot_natural_key,
        rename_source_key,
    )

    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    expected, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, StoredGroup] = {}
    unknown: list[str] = []
    for source in sorted(stored, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, prefix, expected)
        if name not in expected and source in expected:
            name, pattern = rename_source_key(source, [], [], prefix, expected)
        if name not in expected:
            unknown.append(source)
            continue
        transform = WeightRenaming(source, name) if pattern is None else by_pattern[pattern]
        group = groups.setdefault(name, StoredGroup(name, transform))
        group.sources[source] = source if pattern is None else pattern
    return list(groups.values()), unknown


def _disagreements(
    model: Any,  # noqa: ANN401
    folder: Path,
    names: Mapping[str, str],
    made: Mapping[str, Tensor],
    unknown: list[str],
) -> Iterator[str]:
    """Every tensor that does not fit the model."""
    from transformers.modeling_utils import LoadStateDictInfo

    expected = model.state_dict()
    wanted = {name for name in names.values() if name in expected}
    info = LoadStateDictInfo(
        missing_keys=wanted - made.keys(),
        unexpected_keys={*unknown, *(made.keys() - expected.keys())},
        mismatched_keys=set(),
        conversion_errors={},
        error_msgs=[],
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(info)  # noqa: SLF001  the library's own rule
    kind = type(model).__name__
    if info.missing_keys:
        yield f"`{folder}` has no {_listed(info.missing_keys)}, which a `{kind}` needs"
    if info.unexpected_keys:
        yield f"{_listed(info.unexpected_keys)} of `{folder}` is no tensor that a `{kind}` has"
    for name in sorted(wanted & made.keys()):
        if made[name].shape != expected[name].shape:
            yield (
                f"`{name}` of `{folder}` is {list(made[name].shape)}, and by its `config.json` "
                f"{list(expected[name].shape)}"
            )


def _listed(names: Any) -> str:  # noqa: ANN401  any collection of names
    ordered = sorted(names)
    more = f" and {len(ordered) - _MOST_NAMED} more" if len(ordered) > _MOST_NAMED else ""
    return ", ".join(f"`{name}`" for name in ordered[:_MOST_NAMED]) + more
