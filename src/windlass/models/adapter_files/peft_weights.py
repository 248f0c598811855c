"""Adapters of a PEFT folder as those of our linear layers."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from windlass.errors import ModelError
from windlass.models.adapter_files.module_names import ModuleNames
from windlass.models.adapter_files.peft_model import PeftContent, PeftFactors
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_places import WeightPlace
from windlass.models.layer_stack import WeightSource
from windlass.schema import LoraRequest

_HALVES = {"gate": 0, "up": 1}
"""Which half of the rows of a common factor B is whose, of experts whose gate and up share one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftWeights:
    """The values of adapters of ours, made of those of a folder."""

    folder: Path
    names: TensorNames | ModuleNames
    values: Mapping[str, Tensor]
    """By full name: the factors, and the weights that were trained whole beside them."""
    copies: Mapping[str, Tensor]
    """Frozen weights that the folder has too, by full name."""
    others: frozenset[str]
    """Full names of our linear layers without an adapter."""
    scale: float
    """What the output of each adapter is multiplied with."""
    dropout: float
    """Rate of the adapters' inputs in training."""

    @property
    def parameters(self) -> frozenset[str]:
        """Full names of the adapters' weights, and of those that were trained whole."""
        return frozenset(self.values)

    def request(self, dropout: float | None = None) -> LoraRequest:
        """The request of these adapters: their ranks, scale and layers, and what else is trained.

        Args:
            dropout: rate of their inputs in training; None means the folder's.
        """
        end, whole_name = self.names.name_in_layer, self.names.name_in_request
        ranks = {
            name.removesuffix(".lora_b"): value.shape[-1]
            for name, value in self.values.items()
            if name.endswith(".lora_b")
        }
        whole = [name for name in self.values if not name.endswith((".lora_a", ".lora_b"))]
        rank = Counter(ranks.values()).most_common(1)[0][0]
        by_end = {end(name): ranks[name] for name in ranks}
        ends = {end(name) for name in self.others}
        ends |= {end(name) for name, other in ranks.items() if by_end[end(name)] != other}
        short = {
            whole_name(name) if end(name) in ends else end(name): r for name, r in ranks.items()
        }
        return LoraRequest(
            rank=rank, alpha=self.scale * rank, targets=tuple(short),
            dropout=self.dropout if dropout is None else dropout,
            ranks={name: other for name, other in short.items() if other != rank} or None,
            adapter=str(self.folder), trained=tuple(sorted(map(whole_name, whole))) or None,
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
        value = self.adapters.values.get(parameter)
        return self._base.read(parameter) if value is None else value

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives."""
        value = self.adapters.values.get(parameter)
        return self._base.dtype(parameter) if value is None else value.dtype

    def place(self, parameter: str) -> WeightPlace | None:
        """The bytes of files that are the values of a parameter, if its source knows any."""
        return None if parameter in self.adapters.values else self._base.place(parameter)

    @property
    def _base(self) -> WeightSource:
        if self.base is None:
            raise ModelError(f"`{self.adapters.folder}` has not all of the adapters' weights")
        return self.base


def fit_adapters(
    content: PeftContent,
    names: TensorNames | ModuleNames,
    linears: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    model: str,
) -> PeftWeights:
    """The adapters of a folder beside the linear layers of a model.

    Args:
        content: what the folder holds for the model.
        names: the model's tensors in Hugging Face.
        linears: shape of the weight of each of its linear layers, `[out in]` or `[E out in]` of
            experts, by full name.
        weights: shape of each of its weights, adapters left out, by full name.
        tied: full name of each tied weight of the model, and that of its owner.
        model: its name in messages.

    Raises:
        ModelError: an adapter stands beside no linear layer of ours, or PEFT would untie weights.
    """
    scale = Counter(each.scale for each in content.adapters.values()).most_common(1)[0][0]
    values: dict[str, Tensor] = {}
    read: set[str] = set()
    for linear, shape in linears.items():
        if names.half(f"{linear}.weight") is not None:
            continue
        modules = module_parts(names, linear, shape)
        places = [place_of(linear, modules)] if len(shape) > 2 else [name for name, _ in modules]
        parts = [content.adapters.get(place) for place in places]
        read.update(places)
        if not any(parts):
            continue
        if len(shape) > 2:
            a, b = _of_experts(linear, parts[0], scale)
        else:
            a, b = _joined(parts, [rows for _, rows in modules], scale)
            b = names.order_rows(f"{linear}.weight", b)
        values |= {f"{linear}.lora_a": a, f"{linear}.lora_b": b}
    tied_copies = _tied_copies(content, names, tied)
    whole = dict(_weights(content, names, weights, content.whole))
    copies = dict(_weights(content, names, (*weights, *tied), content.copies))
    stored = {name for weight in whole for name in map(names.module_name, names.sources(weight))}
    lost = {*content.adapters} - read | {*content.whole} - stored - tied_copies
    if lost:
        raise ModelError(
            f"the adapters of `{content.path}` train `{min(lost)}`, and `{model}` has no linear "
            "layer and no whole weight there that is trained so; train the adapter in PEFT, and "
            "import the merged model"
        )
    others = frozenset(name for name in linears if f"{name}.lora_a" not in values)
    own_copies = {tied.get(name, name): value for name, value in copies.items()}
    return PeftWeights(
        folder=content.path, names=names, values=values | whole, copies=own_copies, others=others,
        scale=scale, dropout=content.config.lora_dropout,
    )  # fmt: skip


def module_parts(
    names: TensorNames | ModuleNames, linear: str, shape: tuple[int, ...]
) -> tuple[tuple[str, int], ...]:
    """The modules of Hugging Face that a linear layer is made of, each with its outputs."""
    rows = torch.empty(*shape[:-1], 1, device="meta")
    sources = names.split_rows(f"{linear}.weight", rows)
    # Transformers 5 has one name for the branch of experts of every type.
    return tuple(
        (
            names.module_name(source)
            .removesuffix(".weight")
            .replace(".block_sparse_moe.", ".mlp."),
            len(part),
        )
        for source, part in sources
    )


def place_of(linear: str, experts: Sequence[tuple[str, int]]) -> str:
    """The parameter of transformers 5 that the weights of all experts are a part of."""
    role = linear.rpartition(".")[2]
    return f"{experts[0][0].rsplit('.', 2)[0]}.{'gate_up_proj' if role in _HALVES else 'down_proj'}"


def _of_experts(linear: str, part: PeftFactors | None, scale: float) -> tuple[Tensor, Tensor]:
    """A layer's factors, of which gate and up have A in common."""
    if part is None:
        raise ModelError(f"`{linear}` has no adapter")
    b = part.b * (part.scale / scale)
    half = _HALVES.get(linear.rpartition(".")[2])
    if half is None:
        return part.a, b.contiguous()
    b = b.chunk(2, dim=1)[half]
    # PEFT joins two adapters as blocks, of which each half has its own.
    used = b.any(dim=1).any(dim=0)
    used |= not used.any()
    return part.a[:, used], b[..., used].contiguous()


def _joined(
    parts: Sequence[PeftFactors | None], rows: Sequence[int], scale: float
) -> tuple[Tensor, Tensor]:
    """An A of all ranks, and a block-diagonal B, of several modules that are one layer of ours."""
    present = [part for part in parts if part is not None]
    b = present[0].b.new_zeros(sum(rows), sum(part.rank for part in present))
    row = column = 0
    for part, count in zip(parts, rows, strict=True):
        if part is not None:
            block = part.b * (part.scale / scale)
            b[row : row + count, column : column + part.rank] = block
            column += part.rank
        row += count
    return torch.cat([part.a for part in present]), b


def _weights(
    content: PeftContent,
    names: TensorNames | ModuleNames,
    weights: Iterable[str],
    stored: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """The weights of ours whose tensors the folder has."""
    for weight in weights:
        if names.half(weight) is not None:
            continue
        sources = [stored.get(names.module_name(name)) for name in names.sources(weight)]
        present = [value for value in sources if value is not None]
        if not present:
            continue
        if len(present) < len(sources):
            raise ModelError(
                f"the adapters of `{content.path}` train a part of `{weight}` whole, which is "
                f"{len(sources)} tensors of theirs; train all of them"
            )
        yield weight, names.join(weight, present)


def _tied_copies(
    content: PeftContent, names: TensorNames | ModuleNames, tied: Mapping[str, str]
) -> set[str]:
    """Weights that the folder keeps for modules that are tied to another one.

    Raises:
        ModelError: PEFT would untie them: it keeps one of them whole, or both with other values.
    """
    copies: set[str] = set()
    for user, owner in tied.items():
        for pair in zip(names.sources(user), names.sources(owner), strict=True):
            copy, source = map(names.module_name, pair)
            one, other = content.whole.get(copy), content.whole.get(source)
            if one is None and other is None:
                continue
            if one is None or other is None or not torch.equal(one, other):
                owned, user_module = (name.rpartition(".")[0] for name in (source, copy))
                raise ModelError(
                    f"the adapters of `{content.path}` train `{owned}` apart from "
                    f"`{user_module}`, and the model ties them; train them together in "
                    "PEFT (`ensure_weight_tying=True`), or untie the base "
                    "(`tie_word_embeddings` = false, with a tensor of each)"
                )
            copies.add(copy)
    return copies
