"""Rates of a device under one stack: of products, attention and memory traffic, by operation."""

from functools import cached_property
from math import log
from typing import Literal, NamedTuple

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.attention_rates import AttentionRates
from windlass.schema import (
    OWN_STACK,
    AttentionKernel,
    Curve,
    Device,
    Graph,
    MatmulRate,
    MatmulShape,
    Op,
    Point,
    Polynomial,
    Precision,
    ProductRate,
    ProductRole,
    SparseProductRate,
    Stack,
)

_KERNELS: tuple[AttentionKernel, ...] = ("unfused", "flash1", "flash2", "flash3")
"""Attention kernels, newest last. A device may lack a stack's kernel, as a V100 lacks all."""


_DETERMINISTIC_ATTENTION = 0.621
"""Rate of the deterministic backward pass of fused attention, whose sums wait for each other, over
that of the fastest one. Source: FlashAttention-3 on H800, up to 37.9 % less (DASH,
arXiv:2601.21824), 361 of 575 TFLOP/s at 8,192 tokens on H100 (Dao-AILab/flash-attention#1893)."""


class OpContext(NamedTuple):
    """How operations run, apart from the micro-batch size."""

    sequence: int
    precision: Precision
    compiled: bool
    context: int = 1
    """Context-parallel degree."""
    deterministic: bool = False
    """Whether only deterministic kernels run."""
    recorded: bool = False
    """Whether a step is replayed as a whole, so that the host launches no kernel of its own."""
    vocabulary: int = 0
    """Entries of the last projection, which our own runtime pads on accelerators to a multiple of
    `VOCABULARY_MULTIPLE`; 0 where it does not."""
    document: float | None = None
    """Mean length of the document of a token in rows that documents share; None where a row is
    one sequence."""


class DeviceRates:
    """A device's rates, looked up by operation name once per prediction.

    Args:
        mode: how all operations run.
        stack: software that runs them; None means Windlass's own runtime.
        in_turn: whether the device computes, exchanges and synchronizes in turn (bulk-synchronous).
    """

    def __init__(
        self,
        device: Device,
        mode: OpContext,
        stack: Stack | None = None,
        *,
        in_turn: bool = False,
    ) -> None:
        self.device = device
        self.in_turn = in_turn or device.kind == "cpu"
        self.mode = mode
        self.stack = stack or OWN_STACK
        self._products = device.rate(mode.precision)
        plain = device.fused_traffic if mode.compiled else None
        self.traffic = plain or device.traffic
        self._named: dict[str, Curve] = {}
        # A compiled op that was not measured compiled is as fast as the eager one.
        for compiled in (False, True) if mode.compiled else (False,):
            for op in device.op_rates:
                if op.precision == self._products.precision and op.compiled == compiled:
                    self._named[op.name] = op.curve

    @property
    def pads_vocabulary(self) -> bool:
        """Whether products with the vocabulary as a side run with a padded one."""
        own = self.stack is OWN_STACK and self.device.kind != "cpu"
        return own and self.mode.vocabulary > 0

    @property
    def attended(self) -> float:
        """Tokens of the sequences that attention is computed for.

        Eager code on a CPU computes each document by itself; compiled code, whose shapes are fixed,
        and other devices, which would wait for the lengths, compute the whole row.
        """
        divides = self.device.kind == "cpu" and not self.mode.compiled
        return self.mode.document if divides and self.mode.document else self.mode.sequence

    def products(self, op: Op) -> MatmulRate:
        """Rates of a matrix product, in the precision of its factors."""
        precision = op.precision or self._products.precision
        same = precision == self._products.precision
        return self._products if same else self.device.rate(precision)

    def product(self, op: Op, *, backward: bool) -> ProductRate | None:
        """Measured time of a matrix product by its sides; None if the machine states none."""
        if op.shape is None:
            return None
        role = _role(op.shape, backward=backward)
        role = "biased" if op.name == "addmm" and not backward else role
        return next((each for each in self.products(op).products if each.role == role), None)

    def sparse_product(self, op: Op, *, backward: bool) -> SparseProductRate | None:
        """Measured time of a product with kept blocks of the nearest size; None if not measured."""
        if op.shape is None or op.kept is None:
            return None
        role, block = _role(op.shape, backward=backward), op.kept.block
        rates = [each for each in self.products(op).sparse_products if each.role == role]
        return min(rates, key=lambda each: abs(log(each.block / block)), default=None)

    def sparse_efficiency(self, op: Op) -> float:
        """Rate of a product over that of the dense product; 1 for a dense one."""
        curve = self.products(op).sparse_efficiency
        return 1.0 if op.kept is None or curve is None else curve.at(op.kept.block)

    def curves(self, op: Op, *, backward: bool, head_width: float) -> tuple[Curve, ...]:
        """Rates of an operation over its FLOP, or over its bytes without FLOP; the slowest counts.

        Args:
            op: the operation.
            backward: whether it belongs to a backward pass.
            head_width: width of the layer's attention heads.
        """
        if op.kind == "matmul":
            rate = self.products(op)
            return ((rate.biased if op.name == "addmm" else None) or rate.curve,)
        if op.kind == "attention":
            curve = self._attention(op, head_width, backward=backward)
            slowed = backward and self.mode.deterministic and self.device.kind != "cpu"
            return (_slowed(curve) if slowed else curve,)
        named = tuple(self._named[part] for part in op.name.split("+") if part in self._named)
        return named or (self.traffic,)

    def share(self, op: Op) -> float:
        """Rate of an operation on this stack over the machine's rate."""
        stack = self.stack
        parted = 1.0 + stack.context_attention * (1.0 - 1.0 / self.mode.context)
        shares = {"matmul": stack.products, "attention": stack.attention_rate / parted}
        return shares.get(op.kind, stack.traffic)

    @property
    def launch_seconds(self) -> float:
        """Host time to launch one operation."""
        own = self.stack.launch_seconds
        return self.device.launch_seconds if own is None else own

    def _attention(self, op: Op, head_width: float, *, backward: bool) -> Curve:
        """FLOP/s of attention: the rate measured at this sequence length if there is one."""
        # A row under a mask skips none of its tiles.
        is_masked = self.mode.document is not None and self.attended == self.mode.sequence
        curve = self._attention_rates.curve(
            op.attention, head_width, backward=backward,
            is_causal=op.is_causal is not False and not is_masked,
        )  # fmt: skip
        return curve or self._products.attention

    @cached_property
    def _attention_rates(self) -> AttentionRates:
        """Rates of the newest kernel that the device and the stack have, else the measured ones.

        Attention stays in bfloat16 where products take 8-bit or 4-bit factors.
        """
        is_narrow = self.mode.precision in ("float8", "float4")
        products = self.device.rate("bfloat16") if is_narrow else self._products
        rates = products.attention_rates
        stated = {rate.kernel for rate in rates}
        known = _KERNELS[: _KERNELS.index(self.stack.attention) + 1]
        newest = next((kernel for kernel in reversed(known) if kernel in stated), None)
        return AttentionRates(
            [rate for rate in rates if rate.kernel == newest],
            self.attended,
            compiled=self.mode.compiled,
            interpolates=self.device.kind == "cpu",
        )


def _slowed(curve: Curve) -> Curve:
    """The rates of attention where its backward pass is deterministic."""
    rates = (Point(p.size, _DETERMINISTIC_ATTENTION * p.rate) for p in curve.points)
    return Curve(points=tuple(rates))


def _role(shape: MatmulShape, *, backward: bool) -> ProductRole:
    """What a product computes; a gradient of weights has sides that depend on no token."""
    if not backward:
        return "forward"
    fixed = all(side == Polynomial(side.constant) for side in (shape.m, shape.n))
    return "weight_gradient" if fixed else "input_gradient"


def rates_at(curve: Curve, sizes: Floats) -> Floats:
    """`Curve.at` for many sizes; a size of zero has the rate of the smallest point."""
    points = np.log(np.array(curve.points))
    sizes = np.log(np.maximum(sizes, curve.points[0].size))
    return np.asarray(np.exp(np.interp(sizes, points[:, 0], points[:, 1])))


def padded_vocabulary(graph: Graph, tensor: int, loss: Literal["fused"] | None) -> int:
    """Entries that `OpContext.vocabulary` states for layers of a plan.

    Args:
        graph: graph of the model.
        tensor: tensor-parallel degree: shards of a vocabulary are multiplied as they are.
        loss: how the plan computes the loss: one fused with the projection pads nothing.
    """
    return graph.vocabulary if tensor == 1 and loss is None else 0
