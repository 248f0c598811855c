"""Time of ATen operations, eager or compiled, split into cost terms.

A matrix product takes `FLOP / rate(FLOP)`, attention `FLOP / rate(sequence, head width)`, every
other operation `bytes / rate(bytes)`, at the rate measured under its own name if the machine states
one. Launch time comes on top. On a CPU the two add up, because one thread does both; on an
accelerator the host launches ahead, and the larger of launch and work counts.

The operations of any number of passes are priced together, for any number of micro-batch sizes.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from math import log
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from windlass.cost.arrays import Floats, Ints
from windlass.schema import (
    PRECISION_BYTES,
    AttentionRate,
    Curve,
    Device,
    LayerCost,
    LayerKind,
    Op,
    Point,
    Polynomial,
    Precision,
)

CostTerm = Literal["matmul", "attention", "traffic", "launch", "update", "norm", "load"]
"""Name of something that takes time in a step."""

TERMS: tuple[CostTerm, ...] = (
    "matmul", "attention", "traffic", "launch", "update", "norm", "load",
)  # fmt: skip

_WORK: dict[str, CostTerm] = {
    "matmul": "matmul", "attention": "attention", "memory": "traffic", "collective": "traffic",
}  # fmt: skip
"""The term of each operation kind. A tensor-parallel exchange copies on the device itself; its time
on the links is in `CommunicationCosts`."""


class TermSeconds(NamedTuple):
    """Seconds of a piece of work, by cost term."""

    matmul: float = 0.0
    attention: float = 0.0
    traffic: float = 0.0
    launch: float = 0.0
    update: float = 0.0
    norm: float = 0.0
    load: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return sum(self)

    def plus(self, other: "TermSeconds") -> "TermSeconds":
        """Both pieces of work, one after the other."""
        return TermSeconds(*(mine + its for mine, its in zip(self, other, strict=True)))

    def times(self, share: float) -> "TermSeconds":
        """The given multiple of this piece of work."""
        return TermSeconds(*(share * each for each in self))


class OpContext(NamedTuple):
    """How operations run, apart from the micro-batch size."""

    sequence: int
    precision: Precision
    compiled: bool


class LayerPass(NamedTuple):
    """The operations of one forward or backward pass of a layer."""

    ops: tuple[Op, ...]
    """Operations in execution order."""
    cost: LayerCost
    """Cost of the layer that the pass belongs to."""
    backward: bool
    """Whether this is the backward pass."""


class DeviceRates:
    """A device's rates, looked up by operation name once per prediction.

    Args:
        device: the device.
        mode: how all operations run.
    """

    def __init__(self, device: Device, mode: OpContext) -> None:
        self.device = device
        self.mode = mode
        self._products = device.rate(mode.precision)
        plain = device.fused_traffic if mode.compiled else None
        self.traffic = plain or device.traffic
        self._named: dict[str, Curve] = {}
        # A compiled op that was not measured compiled is as fast as the eager one.
        for compiled in (False, True) if mode.compiled else (False,):
            for op in device.op_rates:
                if op.precision == mode.precision and op.compiled == compiled:
                    self._named[op.name] = op.curve

    def curves(self, op: Op, *, backward: bool, head_width: float) -> tuple[Curve, ...]:
        """Rates of an operation over its FLOP, or over its bytes without FLOP; the slowest counts.

        Args:
            op: the operation.
            backward: whether it belongs to a backward pass.
            head_width: width of the layer's attention heads.
        """
        if op.kind == "matmul":
            biased = self._products.biased if op.name == "addmm" else None
            return (biased or self._products.curve,)
        if op.kind == "attention":
            return (self._attention(head_width, backward=backward),)
        named = tuple(self._named[part] for part in op.name.split("+") if part in self._named)
        return named or (self.traffic,)

    def _attention(self, head_width: float, *, backward: bool) -> Curve:
        """FLOP/s of fused attention: the rate measured at this sequence length if there is one."""
        measured = self._products.attention_rates
        if not measured:
            return self._products.attention
        nearest = min(measured, key=lambda rate: _log_distance(rate, head_width))
        return self._attention_curves[nearest.head_width][backward]

    @cached_property
    def _attention_curves(self) -> dict[int, tuple[Curve, Curve]]:
        """By width of heads, forward and backward."""

        def flat(curve: Curve) -> Curve:
            return Curve(points=(Point(1.0, curve.at(self.mode.sequence)),))

        return {
            rate.head_width: (flat(rate.forward), flat(rate.backward))
            for rate in self._products.attention_rates
        }


class OpSeconds(NamedTuple):
    """Seconds of operations, arrays `[op, micro-batch size]`."""

    work: Floats
    launch: Floats
    """Launch time that the work does not hide."""


def ops_seconds(passes: Iterable[LayerPass], rates: DeviceRates, micros: Ints) -> OpSeconds:
    """Seconds of all operations of some passes, pass by pass in execution order.

    Args:
        passes: the passes that run them.
        rates: rates of the device.
        micros: micro-batch sizes in sequences, one for each column of the result.
    """
    device, mode = rates.device, rates.mode
    ops: list[Op] = []
    by_curves: dict[tuple[int, ...], tuple[tuple[Curve, ...], list[int]]] = {}
    for layer_pass in passes:
        width = _head_width(layer_pass.cost, mode)
        for op in layer_pass.ops:
            curves = rates.curves(op, backward=layer_pass.backward, head_width=width)
            by_curves.setdefault(tuple(map(id, curves)), (curves, []))[1].append(len(ops))
            ops.append(op)
    amounts = _amounts(ops, micros, mode.sequence)
    work = np.empty_like(amounts)
    for curves, rows in by_curves.values():
        amount = amounts[rows]
        work[rows] = amount / np.minimum.reduce([rates_at(curve, amount) for curve in curves])
    launch = device.launch_seconds * np.array([op.calls for op in ops], dtype=np.float64)[:, None]
    hidden = 0.0 if device.kind == "cpu" else work
    return OpSeconds(work, np.maximum(0.0, launch - hidden))


def pass_seconds(run: LayerPass, rates: DeviceRates, micro: int) -> TermSeconds:
    """Seconds of one pass of a layer: its operations in turn, and the host's overhead.

    Args:
        run: the pass.
        rates: rates of the device.
        micro: sequences of the micro-batch.
    """
    times = ops_seconds((run,), rates, np.array([micro]))
    terms: dict[CostTerm, float] = dict.fromkeys(TERMS, 0.0)
    for op, seconds in zip(run.ops, times.work[:, 0].tolist(), strict=True):
        terms[_WORK[op.kind]] += seconds
    terms["launch"] = host_seconds(rates) + float(times.launch.sum())
    return TermSeconds(**terms)


def host_seconds(rates: DeviceRates) -> float:
    """Host overhead of each pass of a layer."""
    device = rates.device
    return device.compiled_pass_seconds if rates.mode.compiled else device.pass_seconds


def rates_at(curve: Curve, sizes: Floats) -> Floats:
    """`Curve.at` for many sizes; a size of zero has the rate of the smallest point."""
    points = np.log(np.array(curve.points))
    sizes = np.log(np.maximum(sizes, curve.points[0].size))
    return np.asarray(np.exp(np.interp(sizes, points[:, 0], points[:, 1])))


def quantity_values(quantities: Sequence[Polynomial], micros: Ints, sequence: int) -> Floats:
    """`Quantity.at` of many quantities, `[quantity, micro-batch size]`."""
    powers = float(sequence) ** np.arange(3)
    basis = np.concatenate([np.tile(powers[:, None], len(micros)), powers[:, None] * micros])
    return np.asarray(np.array(quantities, dtype=np.float64).reshape(-1, len(basis)) @ basis)


def _amounts(ops: Sequence[Op], micros: Ints, sequence: int) -> Floats:
    """FLOP of products and attention, bytes of other operations, `[op, micro-batch size]`."""
    none = Polynomial()
    counted = [op.kind in ("matmul", "attention") for op in ops]
    quantities = [
        (op.flop, none) if flop else (op.read_bytes, op.written_bytes)
        for op, flop in zip(ops, counted, strict=True)
    ]
    first, second = zip(*quantities, strict=True) if quantities else ((), ())
    return quantity_values(first, micros, sequence) + quantity_values(second, micros, sequence)


def _head_width(cost: LayerCost, mode: OpContext) -> float:
    """Width of a layer's attention heads; 64 if the layer has no attention to tell it from.

    Fused attention with h heads of width k has `4 b h s^2 k` FLOP and writes `b h s` results of
    width k and as many float32 log-sum-exps. Source: Dao 2023, arXiv:2307.08691, algorithm 1.
    """
    for op in cost.forward:
        if op.kind == "attention":
            results = op.flop.at(1, mode.sequence) / (4 * mode.sequence)
            written = op.written_bytes.at(1, mode.sequence)
            sums = (written - results * PRECISION_BYTES[mode.precision]) / 4
            if sums >= 1 and results / sums >= 1:
                return results / sums
    return 64.0


def _log_distance(rate: AttentionRate, head_width: float) -> float:
    return abs(log(rate.head_width / head_width))


_ByteCount = TypeVar("_ByteCount", float, npt.NDArray[np.float64])

_TOKEN_BYTES = 8
_SUM_BYTES = 4
"""Gradients are summed in float32."""


def batch_load_bytes(tokens: _ByteCount) -> _ByteCount:
    """Bytes copied to load the inputs and targets of a micro-batch with this many tokens."""
    return 2 * 2 * tokens * _TOKEN_BYTES


def tied_grad_add_bytes(elements: _ByteCount, gradient_bytes: int) -> _ByteCount:
    """Bytes moved to add a tied weight's gradient from another stage: two reads and a write."""
    return 3 * elements * gradient_bytes


def grad_accumulation_bytes(
    kind: LayerKind, weight_bytes: int, gradient_bytes: int, *, shared: int, rows: int, first: bool
) -> tuple[int, ...]:
    """Bytes moved by each operation that accumulates a layer's new gradients.

    The first micro-batch's gradients become the accumulated ones without a copy, except for weights
    that already have some; in bfloat16 with accumulation they are converted to float32. An
    embedding's rows are added to its gradient, which is created as zeros by the first micro-batch.

    Args:
        kind: the layer kind.
        weight_bytes: bytes of an element of a new gradient.
        gradient_bytes: bytes of an element of an accumulated gradient.
        shared: elements whose gradient another layer of the stage has already created.
        rows: gradient elements that one pass of an embedding gives.
        first: whether these are the first micro-batch's gradients.
    """
    element_bytes = weight_bytes + 2 * gradient_bytes
    counts = [parameter.count for parameter in kind.parameters]
    if kind.is_embedding:
        created = (kind.parameter_count - shared) * gradient_bytes if first else 0
        return rows * element_bytes, created
    if not first:
        return (sum(counts) * element_bytes,)
    converted = counts if gradient_bytes != weight_bytes else []
    return shared * element_bytes, *(count * (weight_bytes + _SUM_BYTES) for count in converted)
