"""A folder of PEFT, whose adapters become those of our linear layers.

Source: peft 0.18, `LoraConfig` and `get_peft_model_state_dict`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import sqrt
from pathlib import Path
from re import (
    compile as compile_pattern,
    error as PatternError,  # noqa: N812  it is a class
    fullmatch,
)
from typing import Any

import torch
from torch import Tensor

from windlass.errors import InputErrors, ModelError, shorten
from windlass.models.huggingface.model_folder import ADAPTER_CONFIG, is_peft_folder, read_json
from windlass.models.huggingface.tensor_layouts import TensorNames
from windlass.models.huggingface.weight_files import (
    FLOAT_TYPES,
    StoredTensor,
    list_file,
    read_tensor,
)
from windlass.models.layer_stack import WeightSource
from windlass.schema import LoraRequest

ADAPTER_WEIGHTS = "adapter_model.safetensors"
PEFT_PREFIX = "base_model.model."
_FACTORS = (".lora_A.weight", ".lora_B.weight")
_UNKNOWN = (
    "use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication",
    "target_parameters", "alora_invocation_tokens", "use_qalora",
)  # fmt: skip
"""Keys of a configuration with which an adapter is more than two factors beside a product."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to draw an adapter that leave the weights of the base as they are."""
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
class PeftFolder:
    """The adapters of a folder, whose tensors are read when they are asked for."""

    path: Path
    config: Mapping[str, Any]
    """Content of `adapter_config.json`; `Any` because it is not validated."""
    stored: Mapping[str, StoredTensor]
    """Every tensor by its name."""

    @property
    def base(self) -> str | None:
        """The base that the adapters were trained beside, as the folder names it."""
        base = self.config.get("base_model_name_or_path")
        return base if isinstance(base, str) and base else None

    def factor(self, module: str, which: int) -> StoredTensor | None:
        """Where A (0) or B (1) of a module stands; None if it has no adapter."""
        return self.stored.get(f"{PEFT_PREFIX}{module}{_FACTORS[which]}")

    def rank(self, module: str) -> int:
        """The rank of a module's adapter; 0 if it has none."""
        a = self.factor(module, 0)
        return a.shape[0] if a is not None and len(a.shape) == 2 else 0

    def scale(self, module: str) -> float:
        """What the output of a module's adapter is multiplied with."""
        alpha, rank = self.config["lora_alpha"], self.rank(module)
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if fullmatch(rf"(.*\.)?({pattern})", module):
                alpha = value
                break
        return float(alpha / (sqrt(rank) if self.config.get("use_rslora") else rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftWeights:
    """The values of adapters of ours, made of those of a folder.

    Several modules of theirs that are one layer of ours make an A of all their ranks, and a B that
    is block-diagonal.
    """

    folder: PeftFolder
    names: TensorNames
    parts: Mapping[str, tuple[PeftPart, ...]]
    """By full name of our linear layers with an adapter."""
    others: frozenset[str]
    """Full names of our other linear layers."""
    scale: float
    """What the output of each adapter is multiplied with."""

    @property
    def parameters(self) -> frozenset[str]:
        """Full names of the adapters' weights."""
        return frozenset(f"{linear}.lora_{each}" for linear in self.parts for each in "ab")

    def read(self, parameter: str) -> Tensor:
        """The values of one factor, `[rank in]` or `[out rank]`, in the type they are stored in.

        Raises:
            ModelError: a file cannot be read any more.
        """
        linear, _, factor = parameter.rpartition(".lora_")
        parts = self.parts[linear]
        if factor == "a":
            return torch.cat([self._factor(part, 0) for part in parts if part.rank])
        columns = sum(part.rank for part in parts)
        b = torch.zeros(sum(part.rows for part in parts), columns, dtype=self.dtype(parameter))
        row = column = 0
        for part in parts:
            if part.rank:
                block = self._factor(part, 1) * part.growth
                b[row : row + part.rows, column : column + part.rank] = block
            row, column = row + part.rows, column + part.rank
        return self.names.order_rows(f"{linear}.weight", b)

    def dtype(self, parameter: str) -> torch.dtype:
        """The type that `read` gives."""
        linear, _, factor = parameter.rpartition(".lora_")
        stored = [self.folder.factor(part.module, factor == "b") for part in self.parts[linear]]
        types = [FLOAT_TYPES[each.dtype] for each in stored if each is not None]
        return reduce(torch.promote_types, types)

    def request(self, dropout: float | None = None) -> LoraRequest:
        """The request of these adapters: their ranks, scale and layers.

        Args:
            dropout: rate of their inputs in training; None means the folder's.
        """
        if dropout is None:
            dropout = self.folder.config.get("lora_dropout") or 0.0
        ranks = {name: sum(part.rank for part in parts) for name, parts in self.parts.items()}
        rank = Counter(ranks.values()).most_common(1)[0][0]
        by_end = {_end(name): ranks[name] for name in ranks}
        ends = {_end(name) for name in self.others}
        ends |= {_end(name) for name, other in ranks.items() if by_end[_end(name)] != other}
        short = {name if _end(name) in ends else _end(name): r for name, r in ranks.items()}
        return LoraRequest(
            rank=rank, alpha=self.scale * rank, targets=tuple(short), dropout=dropout,
            ranks={name: other for name, other in short.items() if other != rank} or None,
            adapter=str(self.folder.path),
        )  # fmt: skip

    def _factor(self, part: PeftPart, which: int) -> Tensor:
        stored = self.folder.factor(part.module, which)
        if stored is None:
            raise ModelError(f"`{self.folder.path}` has no adapter of `{part.module}` any more")
        return read_tensor(f"{PEFT_PREFIX}{part.module}{_FACTORS[which]}", stored)


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

    def _source(self, parameter: str) -> WeightSource:
        own = self.base is None or parameter in self.adapters.parameters
        return self.adapters if own or self.base is None else self.base


def open_peft_folder(path: Path) -> PeftFolder:
    """The adapters of a folder of PEFT.

    Raises:
        ModelError: it is none, or its file cannot be read.
        InputErrors: everything that makes an adapter more than two factors beside a product.
    """
    if not is_peft_folder(path):
        raise ModelError(
            f"`{shorten(str(path))}` has no `{ADAPTER_CONFIG}`, which every adapter of PEFT has"
        )
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise ModelError(
            f"`{path}` has no `{ADAPTER_WEIGHTS}`; adapters are read from safetensors alone, so "
            "save them again by `model.save_pretrained(NEW)`"
        )
    config = read_json(path / ADAPTER_CONFIG)
    if errors := [*_misfits(path, config)]:
        raise InputErrors(errors)
    return PeftFolder(path=path, config=config, stored=list_file(path / ADAPTER_WEIGHTS))


def fit_adapters(
    folder: PeftFolder, names: TensorNames, linears: Mapping[str, tuple[int, int]], model: str
) -> PeftWeights:
    """The adapters of a folder beside the linear layers of a model.

    Args:
        folder: the folder.
        names: the model's tensors in Hugging Face.
        linears: outputs and inputs of each of its linear layers, by full name.
        model: its name in messages.

    Raises:
        ModelError: they are adapters of another base.
    """
    modules = {
        linear: _modules(names, linear, outputs)
        for linear, (outputs, _) in linears.items()
        if names.half(f"{linear}.weight") is None
    }
    wrong = [
        text
        for linear, parts in modules.items()
        for module, rows in parts
        for text in _wrong_shapes(folder, module, (rows, linears[linear][1]))
    ]
    known = {
        f"{PEFT_PREFIX}{module}{end}"
        for parts in modules.values()
        for module, _ in parts
        for end in _FACTORS
    }
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
    return PeftWeights(folder=folder, names=names, parts=parts, others=others, scale=scale)


def _modules(names: TensorNames, linear: str, outputs: int) -> tuple[tuple[str, int], ...]:
    """The modules of Hugging Face that a linear layer is made of, each with its outputs."""
    rows = torch.empty(outputs, 1, device="meta")
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


def _part(folder: PeftFolder, module: str, rows: int, scale: float) -> PeftPart:
    rank = folder.rank(module)
    growth = folder.scale(module) / scale if rank else 1.0
    return PeftPart(module=module, rows=rows, rank=rank, growth=growth)


def _end(name: str) -> str:
    """A layer's name within its block."""
    return name.partition(".")[2] or name


def _misfits(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """What a configuration asks for that our adapters do not compute."""
    file = path / ADAPTER_CONFIG
    kind = str(config.get("peft_type", "LORA")).upper()
    if kind != "LORA":
        yield f"`{file}` has `peft_type` = {shorten(kind)}; only LORA is read"
        return
    for key in _UNKNOWN:
        if config.get(key):
            yield f"`{file}` has `{key}`, with which an adapter is no pair of factors alone"
    if (bias := config.get("bias", "none")) != "none":
        yield f"`{file}` has `bias` = {shorten(str(bias))}; biases are not trained beside adapters"
    start = config.get("init_lora_weights", True)
    if start not in _PLAIN_STARTS:
        yield (
            f"`{file}` has `init_lora_weights` = {shorten(str(start))}, which changes the weights "
            "of the base; convert it to a plain adapter with PEFT"
        )
    alpha, dropout = config.get("lora_alpha"), config.get("lora_dropout", 0.0)
    if not isinstance(alpha, int | float) or not alpha > 0:
        yield f"`{file}` has `lora_alpha` = {alpha!r}, which is no number above 0"
    if not _are_scales(config.get("alpha_pattern") or {}):
        yield f"`{file}` has an `alpha_pattern` that is no table of patterns and numbers above 0"
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        yield f"`{file}` has `lora_dropout` = {dropout!r}, which is no number from 0 to 1"


def _are_scales(table: object) -> bool:
    """Whether this is a table of patterns of names and numbers above 0."""
    if not isinstance(table, dict):
        return False
    try:
        for pattern in table:
            compile_pattern(pattern)
    except PatternError:
        return False
    return all(isinstance(value, int | float) and value > 0 for value in table.values())
