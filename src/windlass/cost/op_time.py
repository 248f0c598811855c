"""Time of ATen operations, eager or compiled, split into cost terms.

A matrix product takes `FLOP / rate(FLOP)`, or the time of its tiles in waves over the device's
processors; attention takes `FLOP / rate(sequence, head width)`, every other operation
`bytes / rate(bytes)`, at the rate measured under its own name if the machine states one.

On a CPU launches and communication add to the work, because the same threads do all of it, and on a
bulk-synchronous device because it does one after the other. On other accelerators the host launches
ahead and collectives are kernels too, so a pass takes the longer of its kernels and its launches
(`exposed_seconds`).

The operations of any number of passes are priced together, for any number of micro-batch sizes.
"""

from collections.abc import Sequence
from functools import cached_property
from math import log
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from windlass.cost.arrays import FloatOrFloats, Floats, Ints
from windlass.schema import (
    CACHED_BYTES,
    OWN_STACK,
    PRECISION_BYTES,
    AttentionKernel,
    AttentionRate,
    Curve,
    Device,
    LayerCost,
    LayerKind,
    MatmulRate,
    Op,
    Plan,
    Point,
    Polynomial,
    Precision,
    ProductRate,
    ProductRole,
    Stack,
    TileRate,
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

_KERNELS: tuple[AttentionKernel, ...] = ("unfused", "flash1", "flash2", "flash3")
"""Attention kernels, newest last. A device may lack a stack's kernel, as a V100 lacks all."""


_ATTENTION_TILE = 128
"""Keys of a tile of FlashAttention. Rates are those of causal masks, which leave a share of
`(s + 128) / 2s` of the tiles; without a mask all are computed. Source: Dao 2023, arXiv:2307.08691,
section 3."""


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
    context: int = 1
    """Context-parallel degree."""


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
        self._attention_by_width: dict[tuple[float, bool], Curve] = {}
        self._named: dict[str, Curve] = {}
        # A compiled op that was not measured compiled is as fast as the eager one.
        for compiled in (False, True) if mode.compiled else (False,):
            for op in device.op_rates:
                if op.precision == mode.precision and op.compiled == compiled:
                    self._named[op.name] = op.curve

    def products(self, op: Op) -> MatmulRate:
        """Rates of a matrix product, in the precision of its factors."""
        precision = op.precision or self._products.precision
        same = precision == self._products.precision
        return self._products if same else self.device.rate(precision)

    def product(self, op: Op, *, backward: bool) -> ProductRate | None:
        """Measured time of a matrix product by its sides; None if the machine states none.

        A gradient of weights has sides that depend on no token.
        """
        if op.shape is None:
            return None
        role: ProductRole = "biased" if op.name == "addmm" else "forward"
        if backward:
            fixed = all(side == Polynomial(side.constant) for side in (op.shape.m, op.shape.n))
            role = "weight_gradient" if fixed else "input_gradient"
        return next((each for each in self.products(op).products if each.role == role), None)

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
            return (self._attention(head_width, backward=backward),)
        named = tuple(self._named[part] for part in op.name.split("+") if part in self._named)
        return named or (self.traffic,)

    def share(self, op: Op) -> float:
        """Rate of an operation on this stack over the machine's rate."""
        stack, s = self.stack, self.mode.sequence
        parted = 1.0 + stack.context_attention * (1.0 - 1.0 / self.mode.context)
        if op.is_causal is False and self._attention_rates:
            parted *= 2 * s / (s + _ATTENTION_TILE)
        shares = {"matmul": stack.products, "attention": stack.attention_rate / parted}
        return shares.get(op.kind, stack.traffic)

    @property
    def launch_seconds(self) -> float:
        """Host time to launch one operation."""
        own = self.stack.launch_seconds
        return self.device.launch_seconds if own is None else own

    def _attention(self, head_width: float, *, backward: bool) -> Curve:
        """FLOP/s of fused attention: the rate measured at this sequence length if there is one."""
        measured = self._attention_rates
        if not measured:
            return self._products.attention
        if self.device.kind == "cpu":
            return self._between_widths(head_width, backward=backward)
        nearest = min(measured, key=lambda rate: _log_distance(rate, head_width))
        return self._attention_curves[nearest.head_width][backward]

    def _between_widths(self, head_width: float, *, backward: bool) -> Curve:
        """FLOP/s between those of the two nearest head widths that were measured.

        A CPU's kernels have no tiles of a fixed width, and the same is true of short sequences:
        a head takes as long whatever its width.
        """
        curve = self._attention_by_width.get((head_width, backward))
        if curve is None:
            points = sorted(
                Point(width, curves[backward].points[0].rate)
                for width, curves in self._attention_curves.items()
            )
            rate = Curve(points=tuple(points)).at(head_width)
            curve = Curve(points=(Point(1.0, rate),))
            self._attention_by_width[head_width, backward] = curve
        return curve

    @cached_property
    def _attention_rates(self) -> tuple[AttentionRate, ...]:
        """Rates of the newest kernel that the device and the stack have, else the measured ones.

        Attention stays in bfloat16 where products take 8-bit factors.
        """
        eight_bits = self.mode.precision == "float8"
        products = self.device.rate("bfloat16") if eight_bits else self._products
        rates = products.attention_rates
        stated = {rate.kernel for rate in rates}
        known = _KERNELS[: _KERNELS.index(self.stack.attention) + 1]
        newest = next((kernel for kernel in reversed(known) if kernel in stated), None)
        return tuple(rate for rate in rates if rate.kernel == newest)

    @cached_property
    def _attention_curves(self) -> dict[int, tuple[Curve, Curve]]:
        """By width of heads, forward and backward."""

        def flat(curve: Curve) -> Curve:
            return Curve(points=(Point(1.0, curve.at(self.mode.sequence)),))

        return {
            rate.head_width: (flat(rate.forward), flat(rate.backward))
            for rate in self._attention_rates
        }


class PassSeconds(NamedTuple):
    """Seconds of passes, arrays `[pass, micro-batch size]`."""

    work: Floats
    """Kernels, or the device's own work on a CPU."""
    host: Floats
    """Launches, and the host's overhead of a pass."""


def ops_seconds(passes: Sequence[LayerPass], rates: DeviceRates, micros: Floats | Ints) -> Floats:
    """Seconds of work of all operations of some passes, `[op, micro-batch size]`, pass by pass.

    Args:
        passes: the passes that run them.
        rates: rates of the device.
        micros: micro-batch sizes in sequences, one for each column of the result.
    """
    mode = rates.mode
    ops: list[Op] = []
    shares: list[float] = []
    by_curves: dict[tuple[int, ...], tuple[tuple[Curve, ...], list[int]]] = {}
    by_tiles: dict[int, tuple[MatmulRate, list[int]]] = {}
    by_role: dict[int, tuple[ProductRate, list[int]]] = {}
    for layer_pass in passes:
        width = _head_width(layer_pass.cost, mode)
        for op in layer_pass.ops:
            if op.shape is not None and (rate := rates.products(op)).tiles is not None:
                by_tiles.setdefault(id(rate), (rate, []))[1].append(len(ops))
            elif (product := rates.product(op, backward=layer_pass.backward)) is not None:
                by_role.setdefault(id(product), (product, []))[1].append(len(ops))
            else:
                curves = rates.curves(op, backward=layer_pass.backward, head_width=width)
                by_curves.setdefault(tuple(map(id, curves)), (curves, []))[1].append(len(ops))
            ops.append(op)
            shares.append(rates.share(op))
    amounts = _amounts(ops, micros, mode.sequence)
    work = np.empty_like(amounts)
    for curves, rows in by_curves.values():
        amount = amounts[rows]
        work[rows] = amount / np.minimum.reduce([rates_at(curve, amount) for curve in curves])
    for rate, rows in by_tiles.values():
        work[rows] = tile_seconds(rate, *_sides(ops, rows, micros, mode.sequence))
    for product, rows in by_role.values():
        sides = _sides(ops, rows, micros, mode.sequence)
        work[rows] = product_seconds(product, PRECISION_BYTES[mode.precision], *sides)
    return np.asarray(work / np.array(shares).reshape(-1, 1))


def _sides(
    ops: Sequence[Op], rows: Sequence[int], micros: Floats | Ints, sequence: int
) -> list[Floats]:
    """Number of products, m, n and k of the products at `rows`, each `[op, micro-batch size]`."""
    shapes = [op.shape for op in (ops[row] for row in rows) if op.shape is not None]
    return [quantity_values(list(side), micros, sequence) for side in zip(*shapes, strict=True)]


def passes_seconds(
    passes: Sequence[LayerPass], rates: DeviceRates, micros: Floats | Ints, *, tensor: int = 1
) -> PassSeconds:
    """Seconds of work and of the host, of each pass.

    Args:
        passes: the passes.
        rates: rates of the device.
        micros: micro-batch sizes in sequences, one for each column of the result.
        tensor: tensor-parallel degree of the layers.
    """
    counts = [len(each.ops) for each in passes]
    owner = np.repeat(np.arange(len(passes)), counts)
    member = (owner == np.arange(len(passes))[:, None]).astype(np.float64)
    work = member @ ops_seconds(passes, rates, micros)
    launches = np.array([_launches_seconds(each, rates, tensor) for each in passes])
    return PassSeconds(work, np.broadcast_to(launches[:, None], work.shape))


def _launches_seconds(run: LayerPass, rates: DeviceRates, tensor: int) -> float:
    """Seconds in which the host launches a pass, with its overhead of the pass."""
    pairs = rates.stack.pair_launches * tensor * (tensor - 1) / _PAIRS_OF_8
    calls = sum(op.calls for op in run.ops)
    return calls * rates.launch_seconds * (1.0 + pairs) + host_seconds(rates)


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


def plan_micro(plan: Plan) -> float:
    """Sequences of a micro-batch for each context-parallel rank, which has a part of each.

    Operations on tokens and attention to a whole sequence both take a rank's share of the time.
    """
    return plan.batch.micro / (plan.parallel.context or 1)


def pass_seconds(
    run: LayerPass, rates: DeviceRates, micro: float, *, tensor: int = 1
) -> TermSeconds:
    """Seconds of one pass of a layer without its communication.

    Args:
        run: the pass.
        rates: rates of the device.
        micro: sequences of the micro-batch.
        tensor: tensor-parallel degree of the layer.
    """
    micros = np.array([micro])
    terms: dict[CostTerm, float] = dict.fromkeys(TERMS, 0.0)
    for op, seconds in zip(run.ops, ops_seconds((run,), rates, micros)[:, 0].tolist(), strict=True):
        terms[_WORK[op.kind]] += seconds
    work, host = sum(terms.values()), _launches_seconds(run, rates, tensor)
    terms["launch"] = max(0.0, float(exposed_seconds(rates, work, host)) - work)
    return TermSeconds(**terms)


def host_seconds(rates: DeviceRates) -> float:
    """Host overhead of each pass of a layer apart from its launches."""
    device = rates.device
    return device.compiled_pass_seconds if rates.mode.compiled else device.pass_seconds


_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.5))
"""Rows and columns of the tile that one processor computes at once, and its speed relative to the
fastest tile. Source: NVIDIA, Matrix Multiplication Background User's Guide (the smaller tiles'
shares are read off its figure 3)."""


def product_seconds(
    rate: ProductRate, itemsize: int, count: Floats, m: Floats, n: Floats, k: Floats
) -> Floats:
    """Seconds of `count` products (m, k) by (k, n), as `ProductRate` states.

    Args:
        rate: the measured terms.
        itemsize: bytes of an element.
        count: number of products.
        m: rows of the result.
        n: columns of the result.
        k: elements of each sum.
    """
    made = {"weight_gradient": 0.0, "input_gradient": CACHED_BYTES}.get(rate.role, np.inf)
    cold = itemsize * k * n + np.maximum(0.0, itemsize * k * m - made)
    read = cold / rate.read if rate.read else 0.0
    written = itemsize * m * n / rate.write if rate.write else 0.0
    return np.asarray(rate.call_seconds + count * (2 * m * n * k / rate.flop_rate + read + written))


def tile_seconds(
    rate: MatmulRate, batch: Floats, rows: Floats, columns: Floats, depth: Floats
) -> Floats:
    """Seconds of `batch` products of (rows, depth) by (depth, columns), with the best tile.

    Each tile costs `2 rows columns (depth + ramp)` FLOP of one processor, and tiles run in waves of
    as many as there are processors. Sides are rounded up to whole tiles.

    Source: NVIDIA, Matrix Multiplication Background User's Guide, "tile quantization" and "wave
    quantization".

    Args:
        rate: rate of a device that states `tiles`.
        batch: number of products of this shape.
        rows: rows of the left factor.
        columns: columns of the right factor.
        depth: length of the summed dimension.
    """
    tiles = rate.tiles or TileRate(processors=1, efficiency=1.0)
    flop_rate = rate.peak * tiles.efficiency
    seconds = []
    for high, wide, speed in _TILES:
        full = np.ceil(rows / high) * np.ceil(columns / wide) * batch / tiles.processors
        waves = tiles.waves * np.ceil(full) + (1.0 - tiles.waves) * np.maximum(full, 1.0)
        flop = 2.0 * high * wide * (depth + tiles.ramp) * waves * tiles.processors
        seconds.append(flop / (flop_rate * speed))
    odd, part = (
        np.logical_or.reduce([np.mod(side, by) > 0 for side in (columns, depth)]) for by in (8, 64)
    )
    longer = 1.0 + np.where(odd, tiles.unaligned, np.where(part, tiles.uneven, 0.0))
    return np.asarray(np.minimum.reduce(seconds) * longer)


def rates_at(curve: Curve, sizes: Floats) -> Floats:
    """`Curve.at` for many sizes; a size of zero has the rate of the smallest point."""
    points = np.log(np.array(curve.points))
    sizes = np.log(np.maximum(sizes, curve.points[0].size))
    return np.asarray(np.exp(np.interp(sizes, points[:, 0], points[:, 1])))


def quantity_values(
    quantities: Sequence[Polynomial], micros: Floats | Ints, sequence: int
) -> Floats:
    """`Quantity.at` of many quantities, `[quantity, micro-batch size]`."""
    powers = float(sequence) ** np.arange(3)
    basis = np.concatenate([np.tile(powers[:, None], len(micros)), powers[:, None] * micros])
    return np.asarray(np.array(quantities, dtype=np.float64).reshape(-1, len(basis)) @ basis)


def _amounts(ops: Sequence[Op], micros: Floats | Ints, sequence: int) -> Floats:
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
            results = _attention_results(op, mode.sequence)
            written = op.written_bytes.at(1, mode.sequence)
            sums = (written - results * PRECISION_BYTES[mode.precision]) / 4
            if sums >= 1 and results / sums >= 1:
                return results / sums
    return 64.0


def key_value_bytes(cost: LayerCost, sequence: int) -> float:
    """Bytes of the keys and values of one sequence in a layer; 0 without fused attention.

    Fused attention reads queries, as many as its results, with keys and values.
    """
    width = PRECISION_BYTES[cost.precision]
    return sum(
        max(0.0, op.read_bytes.at(1, sequence) - width * _attention_results(op, sequence))
        for op in cost.forward
        if op.kind == "attention"
    )


def _attention_results(op: Op, sequence: int) -> float:
    """Numbers that fused attention to one sequence gives, `h s k`."""
    return op.flop.at(1, sequence) / (4 * sequence)


def _log_distance(rate: AttentionRate, head_width: float) -> float:
    return abs(log(rate.head_width / head_width))


_ByteCount = TypeVar("_ByteCount", float, npt.NDArray[np.float64])

_TOKEN_BYTES = 8
_SUM_BYTES = 4
"""Gradients are summed in float32."""
_LOAD_PASSES = 8
"""Passes of a layer that take the host as long as drawing a micro-batch."""


def batch_load_bytes(tokens: _ByteCount) -> _ByteCount:
    """Bytes copied to load the inputs and targets of a micro-batch with this many tokens."""
    return 2 * 2 * tokens * _TOKEN_BYTES


def batch_load_host_seconds(device: Device) -> float:
    """Host time to draw a micro-batch's sequences, which nothing hides on a CPU.

    It is interpreted code, as a pass is; on 2 cores of an AMD EPYC it takes as long as 8 passes.
    """
    return (_LOAD_PASSES if device.kind == "cpu" else 1) * device.pass_seconds


def tied_grad_add_bytes(elements: _ByteCount, gradient_bytes: int) -> _ByteCount:
    """Bytes moved to add a tied weight's gradient from another stage: two reads and a write."""
    return 3 * elements * gradient_bytes


def grad_accumulation_bytes(
    kind: LayerKind, plan: Plan, stack: Stack | None, *, shared: int, rows: int, first: bool
) -> tuple[int, ...]:
    """Bytes moved by each operation that accumulates a layer's new gradients.

    The first micro-batch's gradients become the accumulated ones without a copy, except for weights
    that already have some; in bfloat16 with accumulation they are converted to float32. An
    embedding's rows are added to its gradient, which is created as zeros by the first micro-batch.

    Args:
        kind: the layer kind.
        plan: states the bytes of an element of a new and of an accumulated gradient.
        stack: software that sums them; None means Windlass's own runtime.
        shared: elements whose gradient another layer of the stage has already created.
        rows: gradient elements that one pass of an embedding gives.
        first: whether these are the first micro-batch's gradients.
    """
    weight_bytes, gradient_bytes = plan.parameter_itemsize, plan.gradient_itemsize
    sums = (stack or OWN_STACK).gradient_sums
    if sums != "separate":
        gradient_bytes = weight_bytes
    if sums == "fused" and not kind.is_embedding:
        return (0,)
    element_bytes = weight_bytes + 2 * gradient_bytes
    counts = [parameter.count for parameter in kind.parameters]
    if kind.is_embedding:
        created = (kind.parameter_count - shared) * gradient_bytes if first else 0
        return rows * element_bytes, created
    if not first:
        return (sum(counts) * element_bytes,)
    converted = counts if gradient_bytes != weight_bytes else []
    return shared * element_bytes, *(count * (weight_bytes + _SUM_BYTES) for count in converted)
