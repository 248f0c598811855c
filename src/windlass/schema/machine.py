"""Machine: devices with their memory tiers, links, and the source of each number."""

from functools import cached_property
from math import ceil, inf, log
from typing import ClassVar, Literal, Self, TypeVar

from pydantic import Field

from windlass.document import Document
from windlass.schema.graph import Precision
from windlass.schema.provenance import Source, source_of
from windlass.schema.rates import Curve, MatmulRate, MomentRate, OpRate, Point, ProductRate
from windlass.schema.stack import Stack
from windlass.units import Bytes, BytesPerSecond, Seconds

MAX_CONTENTION = 0.05
"""Contention above which measured rates depend as much on other processes as on the machine: matrix
products on two idle cores wait 0.4 % of their time, and 40 % beside one busy process."""


_CACHING_KINDS = ("cuda", "amd", "xpu")
"""Devices whose memory torch's caching allocator hands out."""
_ALLOCATOR_SHARE = 0.061
"""Bytes that the caching allocator holds beyond live ones, as a share of these, with
`expandable_segments`: fitted to peak memory of torchtitan's runs, see `stacks/torchtitan.toml`."""
_WORKSPACE_BYTES = 2 * 32 * 2**20
"""Workspaces of cuBLAS and cuBLASLt: 32 MiB each on Hopper. Source: pytorch/pytorch#120925."""
_COMMUNICATOR_BYTES = 32 * 10 * 2**20
"""Buffers of one communicator of NCCL in a host: 32 channels of 10 MiB to one neighbour. Source:
NVIDIA/nccl#1685, measured on 8 H100."""
_COMMUNICATORS = 4
"""Communicators that a plan uses at most at a time: gathers, scatters, tensor-parallel sums and
messages. By convention; those of a kind share their buffers."""

LOOPBACK_SECONDS = 2e-4
LOOPBACK_RATE = 1e9
"""Latency, and bytes/s that each process sends, of gloo between processes of one host: on 2 cores
of a Zen 4 a small message takes 0.05 to 0.4 ms, and collectives run at 0.4 to 1.8 GB/s."""


ExecutionModel = Literal["overlapping", "bulk-synchronous"]
"""How devices overlap work. `overlapping`: communication and offload transfers overlap computing.
`bulk-synchronous`: a device computes, communicates and synchronises in turn; offload transfers
overlap computing only if compute units are reserved for them."""


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
        return any(rate.precision == precision for rate in self.matmul) or (
            precision == "float16" and self.kind != "cpu" and self.computes_in("bfloat16")
        )

    @property
    def memory(self) -> Tier:
        """Device memory: the tier that ops read and write."""
        return self.tiers[0]

    def rate(self, precision: Precision) -> MatmulRate:
        """Rates of matrix products in `precision`; for float64 those of float32, twice its own.

        Accelerators compute in float16 as fast as in bfloat16, and their files state one of them.

        Raises:
            KeyError: this device states none.
        """
        for rate in self.matmul:
            if rate.precision == precision:
                return rate
        if precision == "float64":  # it is for verification only and so is not measured
            return self.rate("float32")
        if precision == "float16" and self.kind != "cpu":
            return self.rate("bfloat16")
        raise KeyError(f"{self.kind} states no rate for {precision}")

    def effective(self, *, offloads: bool) -> Self:
        """This device without the compute units that offloading reserves for transfers."""
        return (
            self.slowed_down(1 / (1 - self.moving_share))
            if offloads and self.moving_share
            else self
        )

    def split(self, sharers: int) -> Self:
        """One of several equal devices that share the cores, memory and disk of this one.

        Rates are divided among them. The launch overhead stays, as long as there is a core for
        each.
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
_TIER_RATES = ("read", "write", "both")
_DEVICE_RATES = ("update_rate", "mixed_update_rate", "norm_rate", "mixed_norm_rate")


def _over(rate: float | None, times: float) -> float | None:
    return None if rate is None else rate / times


def _product_over(rate: ProductT, times: float) -> ProductT:
    names = ("flop_rate", "read", "write")
    return rate.model_copy(update={name: _over(getattr(rate, name), times) for name in names})


def _curve_over(curve: Curve | None, times: float) -> Curve | None:
    if curve is None:
        return None
    return Curve(points=tuple(Point(point.size, point.rate / times) for point in curve.points))


class Link(Document):
    """A connection between devices: a message costs latency + bytes / rate."""

    name: str
    joins: int
    """Number of devices that reach each other over it."""
    latency: Seconds
    rate: BytesPerSecond
    """Rate of one port in one direction."""
    shared_by: int | None = Field(default=None, ge=1)
    """Number of neighbouring devices that share one port, such as a host's network card; 1 means
    each has its own. None means that all devices share it, as processes share host memory."""
    crowding: float = Field(default=0.0, ge=0, lt=inf)
    """Share by which a byte takes longer where several rings, each with several members behind
    shared ports, choose among these ports without knowing of each other."""


class Machine(Document):
    """Hosts with devices, and the links between them."""

    name: str
    hosts: int = 1
    devices_per_host: int = 1
    device: Device
    links: tuple[Link, ...] = ()
    """Links, innermost first."""
    execution_model: ExecutionModel = "overlapping"
    source: str
    """Source of the numbers: `measured here`, or the publication."""
    date: str
    """ISO date of the measurement or publication."""
    noise: float | None = None
    """Standard deviation of log(time) between repeats of a measurement; None if not measured."""
    deviation: float | None = Field(default=None, gt=0, lt=inf)
    """Standard deviation of log(measured / predicted) over published runs on such machines; None if
    none were compared."""
    stragglers: float | None = Field(default=None, ge=0, lt=inf)
    """Share of a step spent waiting for the slowest host, for each e-fold of hosts, from published
    runs on such hosts; None if no such runs are known."""
    contention: float = 0.0
    """Share of its time that the measuring process waited for a busy core."""
    speed_check_seconds: Seconds = 0.0
    """Time of the speed check during the measurement; a later speed check tells by how much the
    machine has become slower or faster. 0 if not measured."""
    spread: float | None = Field(default=None, ge=0, lt=inf)
    """How much longer the slowest device of the host takes than the fastest, as a share; the rates
    are those of the slowest. None if its devices were not measured one by one."""
    stack: Stack | None = None
    """Software that drives it; None means Windlass's own runtime."""
    system: str | None = None
    """Fingerprint of the hardware and library versions that were measured."""
    sources: dict[str, Source] = Field(default_factory=dict)
    """Source of each number, by its key (`device.tiers.device.capacity_bytes`) or by a pattern of
    keys (`device.matmul.*.curve`)."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"sources"})

    def __hash__(self) -> int:
        """Hash of everything but the sources, which are not hashable."""
        return hash(
            (self.name, self.hosts, self.devices_per_host, self.device, self.links, self.stack)
        )

    def source_of(self, place: str) -> Source:
        """The source of the number at key `place`: its own, else that of the whole file."""
        source = source_of(place, self.sources)
        if source is not None:
            return source
        how = "published" if self.noise is None else "measured"
        return Source(how=how, source=f"{self.source}, {self.date}")

    @property
    def overlaps_transfers(self) -> bool:
        """Whether offload transfers overlap computing."""
        return self.execution_model == "overlapping" or self.device.moving_share > 0

    @property
    def is_contended(self) -> bool:
        """Whether other processes used its cores while it was measured."""
        return self.contention > MAX_CONTENTION

    @cached_property
    def label(self) -> str:
        """`name@fingerprint`: how plans refer to this machine."""
        return f"{self.name}@{self.fingerprint()}"

    @property
    def devices(self) -> int:
        """Devices in all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def fixed_seconds(self) -> float:
        """Host time of a step outside passes and updates, on the machine's stack."""
        return 0.0 if self.stack is None else self.stack.step_seconds

    def with_devices(self, count: int) -> Self:
        """This machine of one host with only some of its devices.

        Args:
            count: number of devices, at most those of the host.
        """
        links: list[Link] = []
        for link in self.links if count > 1 else ():
            joins = min(link.joins, count)
            if joins > (links[-1].joins if links else 1):
                links.append(link.model_copy(update={"joins": joins}))
        return self.model_copy(update={"devices_per_host": count, "links": tuple(links)})

    @property
    def budget_bytes(self) -> int:
        """Device memory that Windlass's own plans fill unless a request names another budget.

        On a GPU a reserve is left, which no program counts: what the caching allocator holds
        beyond live tensors, workspaces of libraries, and buffers of communicators. Other stacks
        have constants of their own for these.
        """
        capacity = self.device.memory.capacity_bytes
        if self.stack is not None or self.device.kind not in _CACHING_KINDS:
            return capacity
        buffers = _COMMUNICATORS * _COMMUNICATOR_BYTES if self.devices > 1 else 0
        return max(1, round((capacity - _WORKSPACE_BYTES - buffers) / (1 + _ALLOCATOR_SHARE)))

    def straggler_factor(self, devices: int) -> float:
        """Factor by which the slowest of n hosts lengthens a step: `1 + s ln(n)`.

        Hosts are filled one after the other. Without a constant the slowest host is as fast as
        any.
        """
        hosts = ceil(devices / self.devices_per_host)
        return 1.0 + (self.stragglers or 0.0) * log(hosts)

    def split(self, devices: int) -> Self:
        """This machine with its one device split into several that share its cores and memory.

        Args:
            devices: number of processes that compute on it at the same time.
        """
        link = Link(name="loopback", joins=devices, latency=LOOPBACK_SECONDS, rate=LOOPBACK_RATE)
        return self.model_copy(
            update={
                "devices_per_host": devices,
                "device": self.device.split(devices),
                "links": (link,),
            }
        )
