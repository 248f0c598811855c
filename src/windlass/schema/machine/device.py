"""Device: one processor with its memory tiers, and the rates at which it computes."""

from typing import Self, TypeVar

from pydantic import Field

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.machine.rates import (
    Curve,
    MatmulRate,
    MomentRate,
    OpRate,
    Point,
    ProductRate,
)
from windlass.units import Bytes, BytesPerSecond, Seconds


class Tier(Document):
    """One memory tier of a device; device memory is first in `Device.tiers`."""

    name: str
    """`device`, `host` or `disk` (a machine may use names of its own)."""
    capacity_bytes: Bytes
    read: BytesPerSecond | None = None
    """Rate from this tier to device memory; None for device memory itself."""
    write: BytesPerSecond | None = None
    """Rate from device memory to this tier; None for device memory itself."""
    both: BytesPerSecond | None = None
    """Total rate of reading and writing at once; None means that they take turns."""

    def transfer_seconds(self, read: float, written: float) -> float:
        """Seconds to read and write so many bytes at the same time.

        Raises:
            KeyError: the tier states no rates.
        """
        if not self.read or not self.write:
            raise KeyError(f"tier `{self.name}` states no rates for reading and writing")
        separate = (read / self.read, written / self.write)
        if self.both:
            return max(*separate, (read + written) / self.both)
        return sum(separate)


class Device(Document):
    """One processor with its own memory."""

    kind: str
    """`cpu` or `cuda` if Windlass can run there, else the vendor's name."""
    matmul: tuple[MatmulRate, ...]
    traffic: Curve
    """Bytes/s (read plus written) of element-wise ops over the bytes that one op moves."""
    launch_seconds: Seconds
    """Overhead of launching one op."""
    update_rate: BytesPerSecond
    """Bytes/s (read plus written) of the fused optimizer."""
    mixed_update_rate: BytesPerSecond | None = None
    """The same if it also converts bfloat16 gradients to float32 and master weights to bfloat16;
    None means the same rate."""
    moment_rates: tuple[MomentRate, ...] = ()
    """Measured rates of moment formats; others run as element-wise ops at the rate of `traffic`."""
    fused_traffic: Curve | None = None
    """Like `traffic`, for compiled element-wise ops; None means the same curve."""
    op_rates: tuple[OpRate, ...] = ()
    """Rates of ops that are bound by arithmetic or by an irregular access pattern."""
    norm_rate: BytesPerSecond | None = None
    """Bytes/s of the gradient norm over the gradients it reads; None means that of `traffic`."""
    mixed_norm_rate: BytesPerSecond | None = None
    """The same over bfloat16 gradients, converted to float32; None means the same rate."""
    pass_seconds: Seconds = 0.0
    """Host overhead of one forward or backward pass of a layer, apart from its ops."""
    compiled_pass_seconds: Seconds = 0.0
    """The same for a compiled layer."""
    compile_seconds: Seconds = 0.0
    """Time to compile one kind of layer, forward and backward, with nothing cached."""
    runtime_bytes: Bytes = 0
    """Memory of the process before it allocates any tensor: libraries, allocator."""
    compiler_bytes: Bytes = 0
    """Additional memory of a process that compiled something."""
    update_call_seconds: Seconds = 0.0
    """Host overhead of updating one weight, apart from its bytes."""
    moving_share: float = Field(default=0.0, ge=0, lt=1)
    """Share of compute units that plans with offloading reserve for transfers; these then overlap
    computing on a bulk-synchronous machine too."""
    on_chip_bytes: Bytes | None = Field(default=None, gt=0)
    """Memory on the chip (last-level cache or SRAM) in which fused ops keep what passes between
    them; as much as the device memory if that is on the chip itself. None means not stated."""
    tiers: tuple[Tier, ...] = Field(min_length=1)
    """Memory tiers, device memory first."""

    def process_bytes(self, *, compiled: bool) -> int:
        """Memory of the process before it allocates any tensor, with its compiler if `compiled`."""
        return self.runtime_bytes + (self.compiler_bytes if compiled else 0)

    def computes_in(self, precision: Precision) -> bool:
        """Whether layers can compute in `precision`."""
        if precision == "float64":
            return self.kind == "cpu"
        return self._stated_rate(precision) is not None

    @property
    def half_precision(self) -> Precision:
        """The 16-bit format that training takes here; float32 if the device computes in none.

        bfloat16 needs no loss scale, so float16 is taken only where a device has no bfloat16.
        """
        halves: tuple[Precision, ...] = ("bfloat16", "float16")
        return next((each for each in halves if self.computes_in(each)), "float32")

    @property
    def memory(self) -> Tier:
        """Device memory: the tier that ops read and write."""
        return self.tiers[0]

    def rate(self, precision: Precision) -> MatmulRate:
        """Rates of matrix products in `precision`; for float64 those of float32, twice its own.

        Raises:
            KeyError: this device states none.
        """
        # float64 is for verification only and so is not measured.
        rate = self._stated_rate("float32" if precision == "float64" else precision)
        if rate is None:
            raise KeyError(f"{self.kind} states no rate for {precision}")
        return rate

    def _stated_rate(self, precision: Precision) -> MatmulRate | None:
        """The rates for `precision`, or for one that the device computes in as fast.

        A CPU multiplies factors that were rounded to float8 in bfloat16. An accelerator that torch
        computes on has float16 at the rate of bfloat16; of others their files say so (`also`).
        """
        for rate in self.matmul:
            if precision == rate.precision or precision in rate.also:
                return rate
        follows = precision == ("float8" if self.kind == "cpu" else "float16")
        is_on_torch = self.kind in ("cpu", *_ON_TORCH)
        return self._stated_rate("bfloat16") if follows and is_on_torch else None

    def effective(self, *, offloads: bool) -> Self:
        """This device without the compute units that offloading reserves for transfers."""
        return (
            self.slowed_down(1 / (1 - self.moving_share))
            if offloads and self.moving_share
            else self
        )

    def split(self, sharers: int, *, cores: int) -> Self:
        """One of several equal devices that share the cores, memory and disk of this one.

        Rates are divided among them. Overheads of the host stay as long as there is a core for
        each; of more devices than cores, several wait for one core, which has the overheads of all.

        Args:
            sharers: the devices, each of which computes in a process of its own.
        """
        tiers = tuple(
            tier.model_copy(
                update={
                    "capacity_bytes": tier.capacity_bytes // sharers,
                    **{name: _over(getattr(tier, name), sharers) for name in _TIER_RATES},
                }
            )
            for tier in self.tiers
        )
        shared = self.slowed_down(sharers).model_copy(update={"tiers": tiers})
        return shared.with_overheads(max(1.0, sharers / cores))

    def with_overheads(self, times: float) -> Self:
        """This device with `times` longer fixed times of ops, passes and updates."""
        if times == 1.0:
            return self
        matmul = tuple(
            rate.model_copy(
                update={
                    name: tuple(
                        each.model_copy(update={"call_seconds": times * each.call_seconds})
                        for each in getattr(rate, name)
                    )
                    for name in ("products", "sparse_products")
                }
            )
            for rate in self.matmul
        )
        moments = tuple(
            rate.model_copy(update={"part_seconds": times * rate.part_seconds})
            for rate in self.moment_rates
        )
        overheads = {name: times * getattr(self, name) for name in _DEVICE_OVERHEADS}
        return self.model_copy(update={"matmul": matmul, "moment_rates": moments, **overheads})

    def slowed_down(self, times: float) -> Self:
        """This device with `times` lower compute rates; its memory tiers stay as fast."""
        matmul = tuple(
            rate.model_copy(
                update={
                    "peak": rate.peak / times,
                    **{
                        name: _curve_over(getattr(rate, name), times)
                        for name in ("curve", "biased", "attention")
                    },
                    "products": tuple(_product_over(each, times) for each in rate.products),
                    "sparse_products": tuple(
                        _product_over(each, times) for each in rate.sparse_products
                    ),
                    "attention_rates": tuple(
                        attention.model_copy(
                            update={
                                name: _curve_over(getattr(attention, name), times)
                                for name in ("forward", "backward")
                            }
                        )
                        for attention in rate.attention_rates
                    ),
                }
            )
            for rate in self.matmul
        )
        return self.model_copy(
            update={
                "matmul": matmul,
                "traffic": _curve_over(self.traffic, times),
                "fused_traffic": _curve_over(self.fused_traffic, times),
                "op_rates": tuple(
                    rate.model_copy(update={"curve": _curve_over(rate.curve, times)})
                    for rate in self.op_rates
                ),
                "moment_rates": tuple(
                    rate.model_copy(update={"elements": rate.elements / times})
                    for rate in self.moment_rates
                ),
                **{name: _over(getattr(self, name), times) for name in _DEVICE_RATES},
            }
        )

    def with_slower_products(self, times: float) -> Self:
        """This device with `times` lower rates of products and attention, which need most power."""
        return self.model_copy(update={"matmul": self.slowed_down(times).matmul})

    def with_ideal_sparsity(self) -> Self:
        """This device with products of kept blocks at the rates of dense ones."""
        matmul = tuple(
            rate.model_copy(update={"sparse_products": (), "sparse_efficiency": None})
            for rate in self.matmul
        )
        return self.model_copy(update={"matmul": matmul})


ProductT = TypeVar("ProductT", bound=ProductRate)
_ON_TORCH = ("cuda", "xpu", "hpu", "mps")
"""Kinds of accelerators that torch computes on."""
_TIER_RATES = ("read", "write", "both")
_DEVICE_OVERHEADS = (
    "launch_seconds", "pass_seconds", "compiled_pass_seconds", "compile_seconds",
    "update_call_seconds",
)  # fmt: skip
_DEVICE_RATES = ("update_rate", "mixed_update_rate", "norm_rate", "mixed_norm_rate")


def _over(rate: float | None, times: float) -> float | None:
    return None if rate is None else rate / times


def _product_over(rate: ProductT, times: float) -> ProductT:
    names = ("flop_rate", "read", "write")
    rates = {name: _over(getattr(rate, name), times) for name in names}
    return rate.model_copy(update={**rates, "by_weights": _curve_over(rate.by_weights, times)})


def _curve_over(curve: Curve | None, times: float) -> Curve | None:
    if curve is None:
        return None
    return Curve(points=tuple(Point(point.size, point.rate / times) for point in curve.points))
