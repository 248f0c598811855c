"""Operations of which other software stacks' passes are made: kernels, and linear layers.

This module does not import torch.
"""

from dataclasses import dataclass
from itertools import chain

from windlass.schema import (
    Collective,
    MatmulShape,
    Op,
    OpKind,
    ParameterInfo,
    Polynomial,
    Precision,
)

ACTIVATION_BYTES = 2
"""Bytes of an activation: bfloat16 or float16."""
_GROUPED = "grouped_linear"
"""Products with the weights of experts, one for each: the name by which expert parallelism knows
them."""
_EXPERT_CALLS = 10
"""Launches of the host for each expert of a grouped product: its rows are narrowed in both layouts
and multiplied by themselves. Fitted to 18 rows of Megatron-Bridge (25.09 to 26.04) with one
sequence in a micro-batch, whose steps the host bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A linear layer of one rank, or those of E experts that share its rows evenly."""

    name: str
    wide: float
    """Columns of its result."""
    deep: float
    """Columns of its input."""
    experts: int | None = None
    rows: float = 1.0
    """Rows for each token."""
    narrows: bool = True
    """Whether its products take the factors of a narrow precision, which a router's do not."""
    adapter: int | None = None
    """Rank of the adapter that is trained in place of its weight (LoRA, arXiv:2106.09685)."""

    def parameters(self) -> tuple[ParameterInfo, ...]:
        """Its weight, `[wide, deep]` or `[experts, wide, deep]`, and those of its adapter."""
        sizes = (round(self.wide), round(self.deep))
        weight = ParameterInfo(
            name=f"{self.name}.weight",
            shape=sizes if self.experts is None else (self.experts, *sizes),
            expert=True if self.experts else None,
            frozen=True if self.adapter else None,
        )
        return (weight, *chain.from_iterable(each.parameters() for each in self._adapter()))

    def forward(self, precision: Precision | None) -> tuple[Op, ...]:
        """Its product, and those of its adapter with the sum of both."""
        name = _GROUPED if self.experts else self.name
        product = self._product(name, self.wide, self.deep, precision)
        down_up = (each.forward(None) for each in self._adapter())
        return (product, *chain.from_iterable(down_up), *self._sums(self.wide))

    def backward(self, precision: Precision | None) -> tuple[Op, ...]:
        """The gradient of its input, then that of its weight, or those of its adapter."""
        name = f"{_GROUPED}_input_grad" if self.experts else self.name
        by_input = self._product(name, self.deep, self.wide, precision)
        if self.adapter is not None:
            up_down = (each.backward(None) for each in reversed(self._adapter()))
            return (by_input, *chain.from_iterable(up_down), *self._sums(self.deep))
        by_weight = f"{_GROUPED}_weight_grad" if self.experts else f"{self.name}_weight"
        sides = Polynomial(constant=self.deep), Polynomial(constant=self.wide), self._each
        return (by_input, self._op(by_weight, MatmulShape(self._batch, *sides), precision))

    def _adapter(self) -> "tuple[Linear, ...]":
        """The two linear layers of its adapter, in the order of a forward pass."""
        if self.adapter is None:
            return ()
        rank = float(self.adapter)
        return (
            Linear(name=f"{self.name}.down", wide=rank, deep=self.deep, rows=self.rows),
            Linear(name=f"{self.name}.up", wide=self.wide, deep=rank, rows=self.rows),
        )

    def _sums(self, width: float) -> tuple[Op, ...]:
        """The sum of what weight and adapter give: two are read, and one is written."""
        if self.adapter is None:
            return ()
        return (kernel("add", "memory", read=3 * ACTIVATION_BYTES * self.rows * width),)

    @property
    def _batch(self) -> Polynomial:
        return Polynomial(constant=self.experts or 1)

    @property
    def _each(self) -> Polynomial:
        """Rows of each of its products."""
        return Polynomial(bs=self.rows / (self.experts or 1))

    def _product(self, name: str, wide: float, deep: float, precision: Precision | None) -> Op:
        sides = Polynomial(constant=wide), Polynomial(constant=deep)
        return self._op(name, MatmulShape(self._batch, self._each, *sides), precision)

    def _op(self, name: str, shape: MatmulShape, precision: Precision | None) -> Op:
        moved: Polynomial | float = 0.0
        if self.experts:  # what tokens are sent to their experts, and the weights
            weights = self.experts * self.wide * self.deep
            moved = Polynomial(constant=weights, bs=self.rows * self.deep)
            moved = Polynomial(*(ACTIVATION_BYTES * each for each in moved))
        return kernel(
            name, "matmul", Polynomial(bs=2 * self.rows * self.wide * self.deep), read=moved,
            shape=shape, precision=precision if self.narrows else None,
            calls=_EXPERT_CALLS * (self.experts or 0) or 1,
        )  # fmt: skip


def kernel(
    name: str, kind: OpKind, flop: Polynomial | None = None, *, read: Polynomial | float = 0.0,
    written: float = 0.0, shape: MatmulShape | None = None, collective: Collective | None = None,
    precision: Precision | None = None, calls: int = 1, is_causal: bool | None = None,
) -> Op:  # fmt: skip
    """An operation; a number of bytes is for each token."""
    return Op(
        name=name,
        kind=kind,
        flop=flop or Polynomial(),
        read_bytes=read if isinstance(read, Polynomial) else Polynomial(bs=read),
        written_bytes=Polynomial(bs=written),
        live_bytes=Polynomial(),
        shape=shape,
        collective=collective,
        calls=calls,
        precision=precision,
        is_causal=is_causal,
    )
