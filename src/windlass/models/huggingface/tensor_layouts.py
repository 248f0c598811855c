"""The tensors of a Hugging Face model that make each parameter of ours, joined and split again."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from windlass.models.config import TransformerConfig
from windlass.models.huggingface.families import Family, Layout
from windlass.models.huggingface.image_processor import ModelConfig

_UNORDERED = (None, "transposed", "experts")
"""Layouts whose rows are in our order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Names and layouts of one model's tensors in Hugging Face, by parameter of ours."""

    family: Family
    config: ModelConfig
    has_prefix: bool = True
    """Whether names begin with the family's prefix."""
    has_older_names: bool = False
    """Whether names end as those of earlier versions do."""

    def module_name(self, tensor: str) -> str:
        """What a tensor of a folder, or its module, is called among the modules."""
        return self.family.module_name(tensor)

    def tensor_name(self, module: str) -> str:
        """The inverse of `module_name`."""
        return self.family.tensor_name(module)

    def name_in_request(self, parameter: str) -> str:
        """The name by which a request means a parameter."""
        return parameter

    def name_in_layer(self, linear: str) -> str:
        """A linear layer's name within its block."""
        return linear.partition(".")[2] or linear

    def is_transposed(self, parameter: str) -> bool:
        """Whether a weight stands there with its inputs as rows."""
        return self.family.rule(parameter)[0].layout == "transposed"

    def sources(self, parameter: str) -> tuple[str, ...]:
        """The tensors that a parameter is made of.

        Raises:
            ModelError: models of this type have no such parameter.
        """
        rule, numbers = self.family.rule(parameter)
        names = tuple(self._name(source, numbers) for source in rule.sources)
        if rule.layout != "experts" or self.transformer.experts is None:
            return names
        experts = range(self.transformer.experts.count)
        return tuple(name.replace("{e}", str(e)) for name in names for e in experts)

    def copies(self, parameter: str) -> tuple[str, ...]:
        """Further names under which a parameter may stand."""
        rule, numbers = self.family.rule(parameter)
        return tuple(self._name(copy, numbers) for copy in rule.copies)

    def join(self, parameter: str, tensors: Sequence[Tensor]) -> Tensor:
        """Our parameter, from its sources in their order, `[rows columns]` or `[rows]` each."""
        rule, _ = self.family.rule(parameter)
        layout = rule.layout
        if layout == "experts":
            return torch.stack(tuple(tensors))
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))
        if rule.half is not None:
            return tensor.chunk(2)[rule.half == "second"]
        if layout == "transposed":
            return tensor.t().contiguous()
        return self.order_rows(parameter, tensor)

    def order_rows(self, parameter: str, value: Tensor) -> Tensor:
        """A tensor with a row for each of a parameter's, from the order of the joined sources."""
        layout = self.family.rule(parameter)[0].layout
        return value if layout in _UNORDERED else value[_row_order(layout, self.transformer)]

    def keeps_order(self, parameter: str) -> bool:
        """Whether the values of a parameter follow each other as those of its sources do."""
        return self.family.rule(parameter)[0].layout in (None, "experts")

    def stacks(self, parameter: str) -> bool:
        """Whether a parameter has its sources along a dimension of their own."""
        return self.family.rule(parameter)[0].layout == "experts"

    def half(self, parameter: str) -> Literal["first", "second"] | None:
        """Which half of its source a parameter is; None if it is all of it."""
        return self.family.rule(parameter)[0].half

    def split(self, parameter: str, value: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """The sources of a parameter with their values; the inverse of `join`.

        A source that two parameters share is given as the half of this parameter.

        Args:
            value: `[rows columns]` or `[rows]`; on the meta device only shapes are right.
        """
        return self.split_rows(parameter, value.t() if self.is_transposed(parameter) else value)

    def split_rows(self, parameter: str, value: Tensor) -> tuple[tuple[str, Tensor], ...]:
        """The sources of a parameter with their parts of a tensor that has a row for each of its.

        Args:
            value: `[rows ...]`; on the meta device only shapes are right.
        """
        layout = self.family.rule(parameter)[0].layout
        if layout == "experts":
            return tuple(zip(self.sources(parameter), value.contiguous().unbind(), strict=True))
        if layout not in _UNORDERED and not value.is_meta:
            value = value[_row_order(layout, self.transformer).argsort()]
        names = self.sources(parameter)
        if len(names) == 1:
            return ((names[0], value.contiguous()),)
        config = self.transformer
        query, kv = config.heads * config.head_width, config.kv_heads * config.head_width
        parts = (part.contiguous() for part in value.split((query, kv, kv)))
        return tuple(zip(names, parts, strict=True))

    @property
    def transformer(self) -> TransformerConfig:
        """The sizes of a transformer, which alone has heads and experts.

        Raises:
            TypeError: it is another network.
        """
        if not isinstance(self.config, TransformerConfig):
            raise TypeError(f"`{self.config.name}` is no transformer")
        return self.config

    def _name(self, pattern: str, numbers: Mapping[str, str]) -> str:
        name = pattern
        for key, number in numbers.items():
            name = name.replace(f"{{{key}}}", number)
        if self.has_older_names:
            for end, older in self.family.older_names.items():
                if name.endswith(end):
                    name = name.removesuffix(end) + older
        return name if self.has_prefix else name.removeprefix(self.family.prefix)


def names_in_folder(family: Family, config: ModelConfig, stored: Collection[str]) -> TensorNames:
    """The names that a folder has for a model's tensors.

    Args:
        stored: all names in the folder.
    """
    older = tuple(family.older_names.values())
    return TensorNames(
        family=family,
        config=config,
        has_prefix=any(name.startswith(family.prefix) for name in stored),
        has_older_names=any(name.endswith(older) for name in stored),
    )


def _row_order(layout: Layout, config: TransformerConfig) -> Tensor:
    """For each row of queries, keys and values of ours, the row in which theirs has it."""
    heads, kv_heads, width = config.heads, config.kv_heads, config.head_width
    rows = torch.arange((heads + 2 * kv_heads) * width)
    if layout == "qkv_of_each_head":
        return rows.view(heads, 3, width).transpose(0, 1).flatten()
    rotated = config.rotated_width
    feature = torch.arange(width)
    feature[:rotated] = feature[:rotated].view(-1, 2).t().flatten()
    by_head = rows.view(-1, width).clone()
    by_head[: heads + kv_heads] = by_head[: heads + kv_heads, feature]
    return by_head.flatten()
