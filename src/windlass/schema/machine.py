"""Machine: devices with their rates and memory tiers, and where each number comes from."""

from bisect import bisect_left
from itertools import pairwise
from math import ceil, exp, inf, log
from typing import ClassVar, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.plan import MomentFormat
from windlass.schema.provenance import Source, source_of
from windlass.units import Bytes, BytesPerSecond, FlopPerSecond, Seconds

MAX_CONTENTION = 0.05
"""Above this, measured rates tell of other processes as much as of the machine: products on two
cores wait 0.4 % of their time when alone there, and 40 % beside one busy process."""


LOOPBACK_SECONDS = 2e-4
LOOPBACK_RATE = 1e9
"""Of gloo between processes of one host, bytes/s that each sends: on 2 cores of a Zen 4 a small
message takes 0.05 to 0.4 ms, and a gathering or a sum 0.4 to 1.8 GB/s."""


ExecutionModel = Literal["overlapping", "bulk-synchronous"]
"""How devices go on while something moves. `overlapping`: messages and moves between tiers go on
beside computing. `bulk-synchronous`: a device computes, exchanges and synchronises in turn; moves
between tiers go on beside computing only where compute units are set apart for them."""


class Point(NamedTuple):
    """One measured or published point of a curve."""

    size: float
    rate: float


class Curve(Document):
    """A rate over the size of the work, straight lines between points in log(size), log(rate)."""

    points: tuple[Point, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _points_rise_and_have_rates(self) -> Self:
        for point in self.points:
            if not (0 < point.size < inf and 0 < point.rate < inf):
                raise ValueError(f"point {list(point)} must have a size and a rate above 0")
        for low, high in pairwise(self.points):
            if log(high.size) <= log(low.size):  # as `at` compares them
                raise ValueError(f"size {high.size:g} follows {low.size:g}; sizes must rise")
        return self

    def at(self, size: float) -> float:
        """The rate at `size`; beyond the ends the nearest point's rate holds."""
        index = bisect_left(self.points, size, key=lambda point: point.size)
        if index == 0:
            return self.points[0].rate
        if index == len(self.points):
            return self.points[-1].rate
        low, high = self.points[index - 1], self.points[index]
        share = (log(size) - log(low.size)) / (log(high.size) - log(low.size))
        return exp(log(low.rate) + share * (log(high.rate) - log(low.rate)))


class Tier(Document):
    """One level of memory of a device, nearest first in `Device.tiers`."""

    name: str
    """`memory`, `host` or `disk` (a machine may use names of its own)."""
    capacity_bytes: Bytes
    read: BytesPerSecond | None = None
    """From this tier into the near one; None for the near tier itself."""
    write: BytesPerSecond | None = None
    both: BytesPerSecond | None = None
    """Read and written together where both go on at once; None: they take turns."""

    def transfer_seconds(self, read: float, written: float) -> float:
        """Seconds that it takes to read and write so many bytes beside each other.

        Raises:
            KeyError: it states no rate for it.
        """
        if not self.read or not self.write:
            raise KeyError(f"tier `{self.name}` states no rates for reading and writing")
        alone = (read / self.read, written / self.write)
        return max(*alone, (read + written) / self.both) if self.both else sum(alone)


class AttentionRate(Document):
    """How fast fused attention runs for heads of one width, FLOP/s over the length of a sequence.

    FLOP are counted over the full square of scores, so that a kernel which skips the half that a
    causal mask hides seems twice as fast.
    """

    head_width: int
    forward: Curve
    backward: Curve


class OpRate(Document):
    """Bytes/s over bytes moved of one ATen op that `traffic` does not tell, by measurement."""

    name: str
    """ATen's name. A compiled run of ops is as slow as the slowest of its names."""
    precision: Precision
    compiled: bool = False
    curve: Curve


class MomentRate(Document):
    """How fast the optimizer's moments are read from and written back to one format."""

    moments: MomentFormat
    elements: float = Field(gt=0, lt=inf)
    """Parameters a second, both moments of each decoded and encoded again, in whole parts."""
    part_seconds: Seconds = 0.0
    """Cost of one part apart from its elements, of which a weight takes at least one."""


class MatmulRate(Document):
    """How fast matrix products run in one precision."""

    precision: Precision
    peak: FlopPerSecond
    """The dense peak that MFU is measured against."""
    curve: Curve
    """FLOP/s over FLOP of one product."""
    biased: Curve | None = None
    """The same of a product that a bias is added to; None means that it takes no longer."""
    attention: Curve
    """FLOP/s of fused attention over FLOP of one call."""
    attention_rates: tuple[AttentionRate, ...] = ()
    """Where measured, in place of `attention`: one for each head width."""


class Device(Document):
    """One processor with memory of its own."""

    kind: str
    """`cpu` or `cuda` if this program can run there, else the vendor's name."""
    matmul: tuple[MatmulRate, ...]
    traffic: Curve
    """Bytes/s (read and written together) of element-wise ops over the bytes that one op moves."""
    launch_seconds: Seconds
    """Cost of starting one op."""
    update_rate: BytesPerSecond
    """Bytes/s of the fused optimizer over all that it reads and writes."""
    mixed_update_rate: BytesPerSecond | None = None
    """The same where it also turns bfloat16 gradients into float32, and masters into bfloat16
    weights; None means the same rate."""
    moment_rates: tuple[MomentRate, ...] = ()
    """Where measured; what is not named takes its element-wise ops, at the rate of `traffic`."""
    fused_traffic: Curve | None = None
    """Like `traffic`, for compiled element-wise runs; None means the same curve."""
    op_rates: tuple[OpRate, ...] = ()
    """Ops that are bound by arithmetic or by an awkward order, not by plain traffic."""
    norm_rate: BytesPerSecond | None = None
    """Bytes/s of the gradient norm over the gradients it reads; None means plain traffic."""
    mixed_norm_rate: BytesPerSecond | None = None
    """The same over bfloat16 gradients, which are turned into float32; None means the same rate."""
    pass_seconds: Seconds = 0.0
    """Cost on the host of one forward or backward pass of a layer, apart from its ops."""
    compiled_pass_seconds: Seconds = 0.0
    """The same of a compiled layer."""
    compile_seconds: Seconds = 0.0
    """Cost of compiling one kind of layer, forward and backward, with nothing cached."""
    runtime_bytes: Bytes = 0
    """Held by the process before any tensor: libraries, allocator."""
    compiler_bytes: Bytes = 0
    """Held on top by a process that compiled something."""
    update_call_seconds: Seconds = 0.0
    """Cost on the host of updating one weight, apart from its bytes."""
    moving_share: float = Field(default=0.0, ge=0, lt=1)
    """Of its compute units, set apart for moves between tiers by plans that move something; then
    moves go on beside computing on a bulk-synchronous machine too."""
    tiers: tuple[Tier, ...] = Field(min_length=1)

    def process_bytes(self, *, compiled: bool) -> int:
        """Held by the process before any tensor, compiled code and its compiler included."""
        return self.runtime_bytes + (self.compiler_bytes if compiled else 0)

    def computes_in(self, precision: Precision) -> bool:
        """Whether layers can compute in `precision`."""
        if precision == "float64":
            return self.kind == "cpu"
        return any(rate.precision == precision for rate in self.matmul)

    @property
    def memory(self) -> Tier:
        """The tier that ops read and write."""
        return self.tiers[0]

    def rate(self, precision: Precision) -> MatmulRate:
        """Matrix product rates in `precision`; of float64 those of float32, twice what it is.

        Raises:
            KeyError: this device has none stated.
        """
        for rate in self.matmul:
            if rate.precision == precision:
                return rate
        if precision == "float64":  # for proofs, so that nobody measures it
            return self.rate("float32")
        raise KeyError(f"{self.kind} states no rate for {precision}")

    def effective(self, *, offloads: bool) -> Self:
        """This device as it computes, `moves` saying whether the plan moves between tiers."""
        return self.slowed_down(1 / (1 - self.moving_share)) if offloads and self.moving_share else self

    def split(self, sharers: int) -> Self:
        """One of several equal devices that the cores, memory and disk of this one are lent to.

        Rates are divided among them. Starting an op costs what it did, as long as there is a core
        for each.
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
        return self.slowed_down(sharers).model_copy(update={"tiers": tiers})

    def slowed_down(self, times: float) -> Self:
        """A device that computes so many times as slowly; its tiers are as fast as before."""
        matmul = tuple(
            rate.model_copy(
                update={
                    "peak": rate.peak / times,
                    **{
                        name: _curve_over(getattr(rate, name), times)
                        for name in ("curve", "biased", "attention")
                    },
                    "attention_rates": tuple(
                        each.model_copy(
                            update={
                                name: _curve_over(getattr(each, name), times)
                                for name in ("forward", "backward")
                            }
                        )
                        for each in rate.attention_rates
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
                    each.model_copy(update={"curve": _curve_over(each.curve, times)})
                    for each in self.op_rates
                ),
                "moment_rates": tuple(
                    each.model_copy(update={"elements": each.elements / times})
                    for each in self.moment_rates
                ),
                **{name: _over(getattr(self, name), times) for name in _DEVICE_RATES},
            }
        )


_TIER_RATES = ("read", "write", "both")
_DEVICE_RATES = ("update_rate", "mixed_update_rate", "norm_rate", "mixed_norm_rate")


def _over(rate: float | None, times: float) -> float | None:
    return None if rate is None else rate / times


def _curve_over(curve: Curve | None, times: float) -> Curve | None:
    if curve is None:
        return None
    return Curve(points=tuple(Point(each.size, each.rate / times) for each in curve.points))


class Link(Document):
    """What joins devices: a collective or message costs latency + bytes / rate."""

    name: str
    joins: int
    """Devices that reach each other over it."""
    latency: Seconds
    rate: BytesPerSecond
    """One direction, of one port."""
    shared_by: int | None = Field(default=None, ge=1)
    """Neighbouring devices that share one port, such as a host's network card; 1: each has its
    own. None: all that it joins share it, as processes share the memory of their host."""


class Machine(Document):
    """All of it: hosts of devices, links between them."""

    name: str
    hosts: int = 1
    devices_per_host: int = 1
    device: Device
    links: tuple[Link, ...] = ()
    """Innermost first."""
    execution_model: ExecutionModel = "overlapping"
    source: str
    """Where the numbers come from: `measured here`, or the publication."""
    date: str
    """ISO date of the measurement or publication."""
    noise: float | None = None
    """Standard deviation of log(time) between repeats of one measurement; None if not measured."""
    deviation: float | None = Field(default=None, gt=0, lt=inf)
    """Standard deviation of log(measured / predicted) of published runs on such machines, predicted
    as plans are; None where none were compared."""
    stragglers: float | None = Field(default=None, ge=0, lt=inf)
    """Share of a step that it waits for the slowest of several hosts, for each e-fold of hosts, as
    published runs on such hosts showed it; None where no such runs are known."""
    contention: float = 0.0
    """Share of its time that the measuring process waited for a core that others held."""
    speed_check_seconds: Seconds = 0.0
    """That the yardstick took meanwhile; what it takes later tells by how much the machine has
    become slower or faster. 0 if not measured."""
    system: str | None = None
    """Fingerprint of hardware and library versions that a measurement holds for."""
    sources: dict[str, Source] = Field(default_factory=dict)
    """Where each number comes from, by its place (`device.tiers.near.capacity_bytes`) or by a
    pattern of places (`device.matmul.*.curve`)."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"sources"})

    def __hash__(self) -> int:
        """Of what it is, since a table of sources has none."""
        return hash((self.name, self.hosts, self.devices_per_host, self.device, self.links))

    def source_of(self, place: str) -> Source:
        """Where the number in `place` comes from: its own source, else that of the whole file."""
        found = source_of(place, self.sources)
        if found is not None:
            return found
        how = "published" if self.noise is None else "measured"
        return Source(how=how, source=f"{self.source}, {self.date}")

    @property
    def overlaps_transfers(self) -> bool:
        """Whether moves between tiers go on while devices compute."""
        return self.execution_model == "overlapping" or self.device.moving_share > 0

    @property
    def is_contended(self) -> bool:
        """Whether others held its cores while it was measured."""
        return self.contention > MAX_CONTENTION

    @property
    def label(self) -> str:
        """`name@fingerprint`: how plans refer to this machine."""
        return f"{self.name}@{self.fingerprint()}"

    @property
    def devices(self) -> int:
        """Devices in all hosts."""
        return self.hosts * self.devices_per_host

    def straggler_factor(self, devices: int) -> float:
        """Times that a step on so many devices takes as long for its slowest host: `1 + s ln(n)`.

        Hosts are filled one after the other. The law is that of `stragglers` in
        `published/gpu.py`; without a constant the slowest host is as fast as any.
        """
        hosts = ceil(devices / self.devices_per_host)
        return 1.0 + (self.stragglers or 0.0) * log(hosts)

    def split(self, devices: int) -> Self:
        """This machine of one device as one of several, which share what it has.

        Args:
            devices: how many processes are to compute on it side by side.
        """
        link = Link(name="loopback", joins=devices, latency=LOOPBACK_SECONDS, rate=LOOPBACK_RATE)
        return self.model_copy(
            update={
                "devices_per_host": devices,
                "device": self.device.split(devices),
                "links": (link,),
            }
        )
