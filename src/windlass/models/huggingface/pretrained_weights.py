"""The weights of a Hugging Face folder as parameters of a layer stack, read one at a time."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from windlass.errors import InputErrors
from windlass.models.huggingface.families import find_family
from windlass.models.huggingface.image_processor import ModelConfig
from windlass.models.huggingface.model_folder import find_model_folder
from windlass.models.huggingface.new_head import HEAD, replaced_classes
from windlass.models.huggingface.read_config import huggingface_config
from windlass.models.huggingface.tensor_layouts import TensorNames, names_in_folder
from windlass.models.huggingface.weight_files import (
    FLOAT_TYPES,
    TYPES,
    StoredTensor,
    list_tensors,
    read_tensor,
)
from windlass.models.huggingface.weight_places import ByteRange, WeightPlace
from windlass.models.images.image_config import ResNetConfig

_TEXT_HEAD = "head.texts."
"""Begins the names of the parameters of a head that says the class of a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainedWeights:
    """Weights in files, each of which is read when it is asked for."""

    folder: Path
    stored: Mapping[str, StoredTensor]
    """Every tensor of the folder, by its name there."""
    names: TensorNames
    parameters: frozenset[str]
    """Full names of our parameters and buffers that the folder has; others, as those of adapters
    and of a head for other classes, are drawn."""

    def read(self, parameter: str) -> Tensor:
        """The values of one parameter of ours, in the type that they are stored in.

        Raises:
            ModelError: a file cannot be read any more.
        """
        tensors = [read_tensor(name, self.stored[name]) for name in self.names.sources(parameter)]
        return self.names.join(parameter, tensors)

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives; of several tensors in several types, the widest."""
        types = [TYPES[self.stored[name].dtype] for name in self.names.sources(parameter)]
        return reduce(torch.promote_types, types)

    def place(self, parameter: str) -> WeightPlace | None:
        """The bytes of the files that are the values of a parameter, in the order of `read`.

        Returns:
            None if its rows stand in another order, or its sources have several types.
        """
        sources = self.names.sources(parameter)
        stored = [self.stored[name] for name in sources if name in self.stored]
        if len(stored) < len(sources):  # a tied weight, which stands under its owner's name
            return None
        if not self.names.keeps_order(parameter) or len({each.dtype for each in stored}) > 1:
            return None
        half, shape = self.names.half(parameter), stored[0].shape
        if self.names.stacks(parameter):
            shape = (len(stored), *shape)
        else:
            rows = sum(each.shape[0] for each in stored) // (1 if half is None else 2)
            shape = (rows, *shape[1:])
        ranges = [
            ByteRange(file=each.file.absolute(), offset=each.offset, nbytes=each.nbytes)
            for each in stored
        ]
        if half is not None:
            nbytes = ranges[0].nbytes // 2
            first = ranges[0].offset + (nbytes if half == "second" else 0)
            ranges = [ByteRange(file=ranges[0].file, offset=first, nbytes=nbytes)]
        return WeightPlace(dtype=stored[0].dtype, shape=shape, ranges=tuple(ranges))


def open_pretrained(
    config: ModelConfig, parameters: Mapping[str, Tensor], tied: Mapping[str, str]
) -> PretrainedWeights:
    """The weights of the folder that a configuration was read from.

    Args:
        config: its name is `hf:DIR`.
        parameters: every parameter of the base model by full name, on any device, and every buffer
            that its folder has.
        tied: full name of each tied parameter, and that of its owner.

    Raises:
        ModelError: the folder has no weights that can be read.
        InputErrors: every tensor that is missing, unknown, doubled or of another shape.
    """
    folder = find_model_folder(config.name)
    family = find_family(folder.read_config().get("model_type"))
    path = folder.config.parent
    stored = {
        name: tensor
        for name, tensor in list_tensors(path).items()
        if not family.leaves_out(name, config)
    }
    names = names_in_folder(family, config, stored)
    drawn = frozenset(HEAD if replaced_classes(config) is not None else ())
    drawn |= frozenset(_of_new_text_head(config, names, parameters, stored))
    weights = PretrainedWeights(
        folder=path, stored=stored, names=names, parameters=frozenset(parameters) - drawn
    )
    errors = [*_disagreements(weights, parameters, tied)]
    if errors:
        raise InputErrors(errors)
    return weights


def _of_new_text_head(
    config: ModelConfig,
    names: TensorNames,
    parameters: Iterable[str],
    stored: Collection[str],
) -> Iterator[str]:
    """The parameters of a head for classes of texts that a folder does not know.

    They are those of the classes, and the pooler where the folder has none.
    """
    if isinstance(config, ResNetConfig) or config.text_classes is None:
        return
    if huggingface_config(config.name).text_classes == config.text_classes:
        return
    for name in parameters:
        is_missing = any(source not in stored for source in names.sources(name))
        if name.startswith(_TEXT_HEAD) and (name.startswith(f"{_TEXT_HEAD}classes.") or is_missing):
            yield name


def _disagreements(
    weights: PretrainedWeights, parameters: Mapping[str, Tensor], tied: Mapping[str, str]
) -> Iterator[str]:
    """Every tensor that does not fit the stack."""
    known: set[str] = set()
    for name, parameter in parameters.items():
        sources, copies = weights.names.sources(name), weights.names.copies(name)
        known.update(sources, copies)
        if name not in weights.parameters:
            continue
        if name in tied:
            yield from _unequal_copies(weights, sources, weights.names.sources(tied[name]))
            continue
        yield from _unequal_copies(weights, copies, sources)
        halves = 1 if weights.names.half(name) is None else 2
        for source, part in weights.names.split(name, parameter.to("meta")):
            rows, others = part.shape[:1], part.shape[1:]
            shape = (*(halves * row for row in rows), *others)
            yield from _misfit(weights, source, shape, is_float=part.is_floating_point())
    family = weights.names.family
    for name in weights.stored:
        if name not in known and not name.endswith(family.unread_tensors):
            yield (
                f"`{name}` of `{weights.folder}` is no tensor that a `{family.model_type}` "
                "of its `config.json` has"
            )


def _misfit(
    weights: PretrainedWeights, name: str, shape: tuple[int, ...], *, is_float: bool
) -> Iterator[str]:
    known = FLOAT_TYPES if is_float else {"I64": torch.int64}
    stored = weights.stored.get(name)
    if stored is None:
        yield f"`{weights.folder}` has no `{name}`, which its `config.json` asks for"
    elif stored.shape != shape:
        yield f"`{name}` is {list(stored.shape)}, and by its `config.json` {list(shape)}"
    elif stored.dtype not in known:
        what = "weights are" if is_float else "counters are"
        yield f"`{name}` is {stored.dtype}; {what} read as {', '.join(known)}"


def _unequal_copies(
    weights: PretrainedWeights, copies: tuple[str, ...], sources: tuple[str, ...]
) -> Iterator[str]:
    """Second names of one tensor under which other values stand."""
    for copy, source in zip(copies, sources, strict=False):
        stored = weights.stored
        if copy in stored and source in stored and not _same(weights, copy, source):
            yield (
                f"`{copy}` and `{source}` of `{weights.folder}` are tied by its `config.json`, and "
                "differ; set `tie_word_embeddings` to false in a copy if they should"
            )


def _same(weights: PretrainedWeights, one: str, other: str) -> bool:
    tensors = [read_tensor(name, weights.stored[name]) for name in (one, other)]
    return tensors[0].shape == tensors[1].shape and torch.equal(*tensors)
