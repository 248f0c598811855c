"""Adapters of a PEFT folder as those of our linear layers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from windlass.errors import ModelError, shorten
from windlass.models.adapter_files.module_names import ModuleNames
from windlass.models.adapter_files.peft_folder import PeftFolder
from windlass.models.adapter_files.stacked_experts import FACTORS, PEFT_PREFIX
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_files import FLOAT_TYPES
from windlass.models.huggingface.weight_places import WeightPlace
from windlass.models.layer_stack import WeightSource
from windlass.schema import LoraRequest

_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftPart:
    """The adapter of one module of Hugging Face, as a part of the adapter of a layer of ours."""

    module: str
    rows: int
    """Outputs of the module."""
    rank: int
    """0 if the module has no adapter."""
    growth: float = 1.0
    """Its own scale over that of all adapters, by which its B grows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftWeights:
    """The values of adapters of ours, made of those of a folder.

    Several modules of theirs that are one layer of ours make an A of all their ranks, and a B that
    is block-diagonal.
    """

    folder: PeftFolder
    names: TensorNames | ModuleNames
    parts: Mapping[str, tuple[PeftPart, ...]]
    """By full name of our linear layers with an adapter."""
    others: frozenset[str]
    """Full names of our other linear layers."""
    experts: frozenset[str]
    """Full names of those that are of experts, each of which is a part."""
    scale: float
    """What the output of each adapter is multiplied with."""
    whole: frozenset[str]
    """Full names of the weights that were trained whole beside the adapters."""

    @property
    def parameters(self) -> frozenset[str]:
        """Full names of the adapters' weights, and of those that were trained whole."""
        factors = frozenset(f"{linear}.lora_{each}" for linear in self.parts for each in "ab")
        return factors | self.whole

    def read(self, parameter: str) -> Tensor:
        """The values of one factor, or of one whole weight, in the type they are stored in.

        They are `[rank in]` or `[out rank]`; of experts `[E rank in]` or `[E out rank]`, with zeros
        where one has a lower rank than others.

        Raises:
            ModelError: a file cannot be read any more.
        """
        if parameter in self.whole:
            tensors = [self.folder.read_whole(name) for name in self.names.sources(parameter)]
            return self.names.join(parameter, tensors)
        linear, _, factor = parameter.rpartition(".lora_")
        parts = self.parts[linear]
        if linear in self.experts:
            return self._of_experts(parts, self.rank(linear), factor)
        if factor == "a":
            return torch.cat([self.folder.read(part.module, 0) for part in parts if part.rank])
        columns = sum(part.rank for part in parts)
        b = torch.zeros(sum(part.rows for part in parts), columns, dtype=self.dtype(parameter))
        row = column = 0
        for part in parts:
            if part.rank:
                block = self.folder.read(part.module, 1) * part.growth
                b[row : row + part.rows, column : column + part.rank] = block
            row, column = row + part.rows, column + part.rank
        return self.names.order_rows(f"{linear}.weight", b)

    def rank(self, linear: str) -> int:
        """The rank of the adapter of a layer of ours: the sum over its parts, or the largest."""
        ranks = [part.rank for part in self.parts[linear]]
        return max(ranks) if linear in self.experts else sum(ranks)

    def _of_experts(self, parts: Sequence[PeftPart], rank: int, factor: str) -> Tensor:
        """A factor of all experts, `[E rank in]` or `[E out rank]`."""
        values = [
            self.folder.read(part.module, 0)
            if factor == "a"
            else self.folder.read(part.module, 1) * part.growth
            for part in parts
            if part.rank
        ]
        shape = (rank, values[0].shape[1]) if factor == "a" else (values[0].shape[0], rank)
        stacked, given = values[0].new_zeros((len(parts), *shape)), iter(values)
        for whole, part in zip(stacked, parts, strict=True):
            if part.rank:
                value = next(given)
                whole[: value.shape[0], : value.shape[1]] = value
        return stacked

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives."""
        linear, _, factor = parameter.rpartition(".lora_")
        stored = (
            [self.folder.whole(name) for name in self.names.sources(parameter)]
            if (parameter in self.whole)
            else [self.folder.factor(part.module, factor == "b") for part in self.parts[linear]]
        )
        types = [FLOAT_TYPES[each.dtype] for each in stored if each is not None]
        return reduce(torch.promote_types, types)

    def place(self, parameter: str) -> None:
        """None: adapters are made of several tensors, and are trained."""

    def request(self, dropout: float | None = None) -> LoraRequest:
        """The request of these adapters: their ranks, scale and layers, and what else is trained.

        Args:
            dropout: rate of their inputs in training; None means the folder's.
        """
        if dropout is None:
            dropout = self.folder.config.get("lora_dropout") or 0.0
        ranks = {name: self.rank(name) for name in self.parts}
        rank = Counter(ranks.values()).most_common(1)[0][0]
        end, whole_name = self.names.name_in_layer, self.names.name_in_request
        by_end = {end(name): ranks[name] for name in ranks}
        ends = {end(name) for name in self.others}
        ends |= {end(name) for name, other in ranks.items() if by_end[end(name)] != other}
        short = {
            whole_name(name) if end(name) in ends else end(name): r for name, r in ranks.items()
        }
        return LoraRequest(
            rank=rank, alpha=self.scale * rank, targets=tuple(short), dropout=dropout,
            ranks={name: other for name, other in short.items() if other != rank} or None,
            adapter=str(self.folder.path),
            trained=tuple(sorted(map(whole_name, self.whole))) or None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedWeights:
    """The weights of a base, where it has any, and of adapters beside them."""

    base: WeightSource | None
    adapters: PeftWeights

    @property
    def parameters(self) -> frozenset[str]:
        """Full names of the parameters of both."""
        base = frozenset[str]() if self.base is None else self.base.parameters
        return base | self.adapters.parameters

    def read(self, parameter: str) -> Tensor:
        """The values of a parameter, in the type that they are stored in."""
        return self._source(parameter).read(parameter)

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives."""
        return self._source(parameter).dtype(parameter)

    def place(self, parameter: str) -> WeightPlace | None:
        """The bytes of files that are the values of a parameter, if its source knows any."""
        return self._source(parameter).place(parameter)

    def _source(self, parameter: str) -> WeightSource:
        own = self.base is None or parameter in self.adapters.parameters
        return self.adapters if own or self.base is None else self.base


def fit_adapters(
    folder: PeftFolder,
    names: TensorNames | ModuleNames,
    linears: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, tuple[int, ...]],
    model: str,
) -> PeftWeights:
    """The adapters of a folder beside the linear layers of a model.

    Args:
        folder: the folder.
        names: the model's tensors in Hugging Face.
        linears: shape of the weight of each of its linear layers, `[out in]` or `[E out in]` of
            experts, by full name.
        weights: shape of each of its weights, adapters left out, by full name.
        model: its name in messages.

    Raises:
        ModelError: they are adapters of another base.
    """
    modules = {
        linear: module_parts(names, linear, shape)
        for linear, shape in linears.items()
        if names.half(f"{linear}.weight") is None
    }
    experts = {linear: modules[linear] for linear, shape in linears.items() if len(shape) > 2}
    routers = [parts[0][0] for linear, parts in modules.items() if linear.endswith(".router")]
    folder = folder.with_factors_of_experts(experts, routers)
    wrong = [
        text
        for linear, parts in modules.items()
        for module, rows in parts
        for text in _wrong_shapes(folder, module, (rows, linears[linear][-1]))
    ]
    known = {
        f"{PEFT_PREFIX}{module}{end}"
        for parts in modules.values()
        for module, _ in parts
        for end in FACTORS
    }
    parts_of_whole = {
        weight: names.split(weight, torch.empty(shape, device="meta"))
        for weight, shape in weights.items()
        if names.half(weight) is None
    }
    whole = {
        weight: parts
        for weight, parts in parts_of_whole.items()
        if any(folder.whole(name) for name, _ in parts)
    }
    wrong += [text for parts in whole.values() for text in _wrong_wholes(folder, parts)]
    known |= {f"{PEFT_PREFIX}{name}" for parts in whole.values() for name, _ in parts}
    wrong += [f"`{name}`, no such layer" for name in folder.stored if name not in known]
    adapted = {
        linear: parts
        for linear, parts in modules.items()
        if any(folder.rank(module) for module, _ in parts)
    }
    if wrong or not adapted:
        base = f" trained beside `{shorten(folder.base)}`" if folder.base else ""
        what = "; ".join(wrong[:_SHOWN]) or "no adapter"
        raise ModelError(
            f"the adapters of `{folder.path}`{base} do not fit `{model}`: {len(wrong)} of its "
            f"{len(folder.stored)} tensors have no place there ({what}); name the model that they "
            "were trained beside"
        )
    ranked = [m for parts in adapted.values() for m, _ in parts if folder.rank(m)]
    scale = Counter(map(folder.scale, ranked)).most_common(1)[0][0]
    parts = {
        linear: tuple(_part(folder, module, rows, scale) for module, rows in parts)
        for linear, parts in adapted.items()
    }
    others = frozenset(linears.keys() - adapted.keys())
    return PeftWeights(
        folder=folder, names=names, parts=parts, others=others,
        experts=frozenset(experts) & adapted.keys(), scale=scale, whole=frozenset(whole),
    )  # fmt: skip


def without_tied_copies(
    folder: PeftFolder, names: TensorNames | ModuleNames, tied: Mapping[str, str]
) -> PeftFolder:
    """The folder without weights that it keeps for modules that are tied to another one.

    Args:
        folder: the folder.
        names: the model's tensors in Hugging Face.
        tied: full name of each tied weight of the model, and that of its owner.

    Raises:
        ModelError: PEFT would untie them: it keeps one of them whole, or both with other values.
    """
    copies: set[str] = set()
    kept = folder.config.get("modules_to_save") or ()
    for user, owner in tied.items():
        for copy, source in zip(names.sources(user), names.sources(owner), strict=True):
            stored = [folder.whole(name) for name in (copy, source)]
            module = source.rpartition(".")[0]
            alone = not any(module == name or module.endswith(f".{name}") for name in kept)
            # A weight that was resized or saved in its place stays tied, as PEFT loads it there.
            if stored == [None, None] or (stored[0] is None and alone):
                continue
            if None in stored or not torch.equal(
                folder.read_whole(copy), folder.read_whole(source)
            ):
                raise ModelError(
                    f"the adapters of `{folder.path}` train `{module}` apart from "
                    f"`{copy.rpartition('.')[0]}`, and the model ties them; train them together in "
                    "PEFT (`ensure_weight_tying=True`), or untie the base "
                    "(`tie_word_embeddings` = false, with a tensor of each)"
                )
            copies.add(f"{PEFT_PREFIX}{copy}")
    stored_alone = {name: each for name, each in folder.stored.items() if name not in copies}
    return replace(folder, stored=stored_alone)


def module_parts(
    names: TensorNames | ModuleNames, linear: str, shape: tuple[int, ...]
) -> tuple[tuple[str, int], ...]:
    """The modules of Hugging Face that a linear layer is made of, each with its outputs."""
    rows = torch.empty(*shape[:-1], 1, device="meta")
    sources = names.split_rows(f"{linear}.weight", rows)
    return tuple((source.removesuffix(".weight"), len(part)) for source, part in sources)


def _wrong_shapes(folder: PeftFolder, module: str, sizes: tuple[int, int]) -> Iterator[str]:
    """Factors of a module that are of another shape than `[rank in]` and `[out rank]`."""
    a, b = (folder.factor(module, which) for which in (0, 1))
    rank, (outputs, inputs) = folder.rank(module), sizes
    for name, factor, shape in (("A", a, (rank, inputs)), ("B", b, (outputs, rank))):
        if factor is None:
            if rank:
                yield f"`{module}` has no lora_{name}"
        elif factor.shape != shape or factor.dtype not in FLOAT_TYPES:
            yield (
                f"`{module}.lora_{name}` {factor.dtype} {list(factor.shape)} where {list(shape)} "
                "fits"
            )


def _wrong_wholes(folder: PeftFolder, parts: Sequence[tuple[str, Tensor]]) -> Iterator[str]:
    """Tensors of a weight that was trained whole which are missing, or of another shape."""
    for name, part in parts:
        stored = folder.whole(name)
        if stored is None:
            yield f"no `{name}`, though others of its layer are trained whole"
        elif stored.shape != tuple(part.shape) or stored.dtype not in FLOAT_TYPES:
            yield f"`{name}` {stored.dtype} {list(stored.shape)} where {list(part.shape)} fits"


def _part(folder: PeftFolder, module: str, rows: int, scale: float) -> PeftPart:
    rank = folder.rank(module)
    growth = folder.scale(module) / scale if rank else 1.0
    return PeftPart(module=module, rows=rows, rank=rank, growth=growth)
