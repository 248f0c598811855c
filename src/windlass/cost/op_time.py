"""Time of ATen operations, eager or compiled, split into cost terms.

A matrix product takes `FLOP / rate(FLOP)`, or the time of its tiles in waves over the device's
processors; with a sparse weight the share of this time that is kept, over the efficiency of such
products, or what was measured of them. Attention takes `FLOP / rate(sequence, head width)`, every
other operation `bytes / rate(bytes)`, at the rate measured under its own name if the machine states
one.

On a CPU launches and communication add to the work, because the same threads do all of it, and on a
bulk-synchronous device because it does one after the other. On other accelerators the host launches
ahead and collectives are kernels too, so a pass takes the longer of its kernels and its launches
(`exposed_seconds`).

The operations of any number of passes are priced together, for any number of micro-batch sizes.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np

from windlass.cost.arrays import FloatOrFloats, Floats, Ints
from windlass.cost.device_rates import DeviceRates, rates_at
from windlass.cost.product_time import product_seconds, sparse_product_seconds, tile_seconds
from windlass.schema import (
    PRECISION_BYTES,
    TYPICAL_HEAD_WIDTH,
    VOCABULARY_MULTIPLE,
    Curve,
    LayerCost,
    MatmulRate,
    Op,
    Polynomial,
    Precision,
    ProductRate,
    SparseProductRate,
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


_PAIRS_OF_8 = 8 * 7


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


class LayerPass(NamedTuple):
    """The operations of one forward or backward pass of a layer."""

    ops: tuple[Op, ...]
    """Operations in execution order."""
    cost: LayerCost
    """Cost of the layer that the pass belongs to."""
    backward: bool
    """Whether this is the backward pass."""


class PassSeconds(NamedTuple):
    """Seconds of passes, arrays `[pass, micro-batch size]`."""

    work: Floats
    """Kernels, or the device's own work on a CPU."""
    host: Floats
    """Launches, and the host's overhead of a pass."""


class PassPrices:
    """The operations of some passes, looked up once for any number of micro-batch sizes.

    Args:
        tensor: tensor-parallel degree of the layers.
    """

    def __init__(self, passes: Sequence[LayerPass], rates: DeviceRates, *, tensor: int = 1) -> None:
        self._passes, self._rates, self._tensor = passes, rates, tensor
        self._ops: list[Op] = []
        self._shares: list[float] = []
        self._by_curves: dict[tuple[int, ...], tuple[tuple[Curve, ...], list[int]]] = {}
        self._by_tiles: dict[int, tuple[MatmulRate, list[int]]] = {}
        self._by_role: dict[int, tuple[ProductRate, list[int]]] = {}
        self._by_block: dict[int, tuple[SparseProductRate, list[int]]] = {}
        for layer_pass in passes:
            width = head_width(layer_pass.cost, rates.mode.sequence, rates.mode.precision)
            for op in layer_pass.ops:
                self._add(op, backward=layer_pass.backward, head_width=width)

    def _add(self, op: Op, *, backward: bool, head_width: float) -> None:
        """Adds an operation to those of its rate."""
        rates, row = self._rates, len(self._ops)
        sparse = rates.sparse_product(op, backward=backward)
        op, speed = (op, 1.0) if sparse is not None else _dense(op, rates)
        if sparse is not None:
            self._by_block.setdefault(id(sparse), (sparse, []))[1].append(row)
        elif op.shape is not None and (rate := rates.products(op)).tiles is not None:
            self._by_tiles.setdefault(id(rate), (rate, []))[1].append(row)
        elif (product := rates.product(op, backward=backward)) is not None:
            self._by_role.setdefault(id(product), (product, []))[1].append(row)
        else:
            curves = rates.curves(op, backward=backward, head_width=head_width)
            self._by_curves.setdefault(tuple(map(id, curves)), (curves, []))[1].append(row)
        self._ops.append(op)
        self._shares.append(speed * rates.share(op))

    def ops_seconds(self, micros: Floats | Ints) -> Floats:
        """Seconds of work of all operations, `[op, micro-batch size]`, pass by pass.

        Args:
            micros: micro-batch sizes in sequences, one for each column of the result.
        """
        mode = self._rates.mode
        basis = _basis(micros, mode.sequence)
        amounts = self._amounts @ basis
        work = np.empty_like(amounts)
        for curves, rows in self._by_curves.values():
            amount = amounts[rows]
            work[rows] = amount / np.minimum.reduce([rates_at(curve, amount) for curve in curves])
        for rate, rows in self._by_tiles.values():
            sides = self._sides[:, rows] @ basis
            work[rows] = tile_seconds(rate, *(_padded(side, self._rates) for side in sides))
        for product, rows in self._by_role.values():
            sides = self._sides[:, rows] @ basis
            work[rows] = product_seconds(product, PRECISION_BYTES[mode.precision], *sides)
        for sparse, rows in self._by_block.values():
            sides = self._sides[1:, rows] @ basis
            kept = (self._ops[row].kept for row in rows)
            density = np.array([[each.density] for each in kept if each])
            work[rows] = sparse_product_seconds(
                sparse, PRECISION_BYTES[mode.precision], density, *sides
            )
        return np.asarray(work / np.array(self._shares).reshape(-1, 1))

    def seconds(self, micros: Floats | Ints) -> PassSeconds:
        """Seconds of work and of the host, of each pass.

        Args:
            micros: micro-batch sizes in sequences, one for each column of the result.
        """
        work = self._member @ self.ops_seconds(micros)
        return PassSeconds(work, np.broadcast_to(self._launches[:, None], work.shape))

    @cached_property
    def _member(self) -> Floats:
        """Whether an operation belongs to a pass, `[pass, op]`."""
        owner = np.repeat(np.arange(len(self._passes)), [len(each.ops) for each in self._passes])
        return np.asarray(owner == np.arange(len(self._passes))[:, None], dtype=np.float64)

    @cached_property
    def _launches(self) -> Floats:
        each = (_launches_seconds(run, self._rates, self._tensor) for run in self._passes)
        return np.array(list(each))

    @cached_property
    def _amounts(self) -> Floats:
        """FLOP of products and attention, bytes of other operations, `[op, coefficient]`.

        Each token of a document of L tokens attends to L in place of the s of its row, so that rows
        take `sum(L^2) = b s E[L]` of `b s^2`, with the mean E over tokens.
        """
        attended = self._rates.attended / self._rates.mode.sequence
        amounts = np.array(
            [op.flop if op.kind in ("matmul", "attention") else op.read_bytes for op in self._ops],
            dtype=np.float64,
        ).reshape(-1, len(Polynomial._fields))
        moves = [at for at, op in enumerate(self._ops) if op.kind not in ("matmul", "attention")]
        if moves:
            amounts[moves] += np.array([self._ops[at].written_bytes for at in moves])
        amounts[[at for at, op in enumerate(self._ops) if op.kind == "attention"]] *= attended
        return amounts

    @cached_property
    def _sides(self) -> Floats:
        """Number of products, m, n and k of products, `[side, op, coefficient]`; else 0."""
        sides = np.zeros((4, len(self._ops), len(Polynomial._fields)))
        for row, op in enumerate(self._ops):
            if op.shape is not None:
                sides[:, row] = op.shape
        return sides


def _dense(op: Op, rates: DeviceRates) -> tuple[Op, float]:
    """The dense product of one with a sparse weight, which is so many times faster; else itself."""
    if op.kept is None:
        return op, 1.0
    density = op.kept.density
    flop = Polynomial(*(coefficient / density for coefficient in op.flop))
    dense = op.model_copy(update={"flop": flop, "kept": None})
    return dense, rates.sparse_efficiency(op) / density


def _padded(side: Floats, rates: DeviceRates) -> Floats:
    """A side of products, with the vocabulary as our runtime pads it."""
    if not rates.pads_vocabulary:
        return side
    tiles = np.ceil(rates.mode.vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
    return np.where(side == rates.mode.vocabulary, tiles, side)


def _launches_seconds(run: LayerPass, rates: DeviceRates, tensor: int) -> float:
    """Seconds in which the host launches a pass, with its overhead of the pass.

    A replay of a recorded step takes a few microseconds however many kernels it launches, and
    nothing here. Source: NVIDIA, "Constant Time Launch for Straight-Line CUDA Graphs", 2024.
    """
    if rates.mode.recorded:
        return 0.0
    pairs = rates.stack.pair_launches * tensor * (tensor - 1) / _PAIRS_OF_8
    calls = sum(op.calls for op in run.ops)
    device = rates.device
    overhead = device.compiled_pass_seconds if rates.mode.compiled else device.pass_seconds
    return calls * rates.launch_seconds * (1.0 + pairs) + overhead


def exposed_seconds(
    rates: DeviceRates,
    work: FloatOrFloats,
    host: FloatOrFloats,
    exchange: FloatOrFloats = 0.0,
    gather: FloatOrFloats = 0.0,
) -> Floats:
    """Seconds of a pass from those of its parts, over arrays of any common shape.

    On a CPU and on a bulk-synchronous device the parts add up. Elsewhere kernels, collectives among
    them, run while the host launches the next ones, and FSDP's gathers run beside both; two
    activities of nearly equal length seldom hide each other fully (`smooth_max`).

    Args:
        rates: rates of the device and its stack.
        work: kernels.
        host: launches.
        exchange: tensor-parallel and context-parallel communication.
        gather: FSDP's gathers of parameters and scatters of gradients.
    """
    stack = rates.stack
    if rates.in_turn:
        return np.asarray(work + host + exchange + gather)
    kernels = work + (1.0 - stack.tensor_overlap) * np.asarray(exchange)
    return smooth_max(smooth_max(kernels, host), gather) + stack.gather_exposed * np.asarray(gather)


def smooth_max(one: FloatOrFloats, other: FloatOrFloats) -> Floats:
    """`(one^4 + other^4)^(1/4)`: the longer of two that overlap, and more if they are close."""
    most = np.maximum(np.maximum(one, other), 1e-30)
    return np.asarray(most * ((one / most) ** 4 + (other / most) ** 4) ** 0.25)


def pass_seconds(
    run: LayerPass, rates: DeviceRates, micro: float, *, tensor: int = 1
) -> TermSeconds:
    """Seconds of one pass of a layer without its communication.

    Args:
        run: the pass.
        micro: sequences of the micro-batch.
        tensor: tensor-parallel degree of the layer.
    """
    micros = np.array([micro])
    terms: dict[CostTerm, float] = dict.fromkeys(TERMS, 0.0)
    work_by_op = PassPrices((run,), rates).ops_seconds(micros)[:, 0].tolist()
    for op, seconds in zip(run.ops, work_by_op, strict=True):
        terms[_WORK[op.kind]] += seconds
    work, host = sum(terms.values()), _launches_seconds(run, rates, tensor)
    terms["launch"] = max(0.0, float(exposed_seconds(rates, work, host)) - work)
    return TermSeconds(**terms)


def quantity_values(
    quantities: Sequence[Polynomial], micros: Floats | Ints, sequence: int
) -> Floats:
    """`Quantity.at` of many quantities, `[quantity, micro-batch size]`."""
    rows = np.array(quantities, dtype=np.float64).reshape(-1, len(Polynomial._fields))
    return np.asarray(rows @ _basis(micros, sequence))


def _basis(micros: Floats | Ints, sequence: int) -> Floats:
    """What the coefficients of a polynomial count, `[coefficient, micro-batch size]`."""
    powers = float(sequence) ** np.arange(3)
    return np.concatenate([np.tile(powers[:, None], len(micros)), powers[:, None] * micros])


def head_width(cost: LayerCost, sequence: int, precision: Precision) -> float:
    """Width of a layer's attention heads; 64 if the layer has no attention to tell it from.

    Fused attention with h heads of width k has `4 b h s^2 k` FLOP and writes `b h s` results of
    width k and as many float32 log-sum-exps. Source: Dao 2023, arXiv:2307.08691, algorithm 1.

    Args:
        precision: of the bytes that the cost states.
    """
    for op in cost.forward:
        if op.kind == "attention":
            results = op.flop.at(1, sequence) / (4 * sequence)
            written = op.written_bytes.at(1, sequence)
            sums = (written - results * PRECISION_BYTES[precision]) / 4
            if sums >= 1 and results / sums >= 1:
                return results / sums
    return float(TYPICAL_HEAD_WIDTH)
