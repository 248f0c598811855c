"""Machine: hosts with devices, the links between them, and the source of each number."""

from functools import cached_property
from math import ceil, inf, log
from typing import ClassVar, Literal, Self

from pydantic import Field

from windlass.document import Document
from windlass.schema.machine.device import Device
from windlass.schema.machine.provenance import Source, source_of
from windlass.schema.machine.stack import Stack
from windlass.units import BytesPerSecond, Seconds

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


MachinePart = Literal[
    "compiled code", "sparse products", "float16", "heads of 16", "heads of 32", "heads of 64",
    "heads of 128", "attention without a mask",
]  # fmt: skip
"""What not all plans need of a machine, and is measured when the first of them asks for it."""

HEAD_PARTS: dict[int, MachinePart] = {
    16: "heads of 16", 32: "heads of 32", 64: "heads of 64", 128: "heads of 128",
}  # fmt: skip
"""The part that attention in heads of each measured width is, with a causal mask."""

TYPICAL_HEAD_WIDTH = 64
"""The width at which attention is measured without a mask and compiled too."""


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
    unmeasured: tuple[MachinePart, ...] = ()
    """What was not measured yet; no plan that needs it is considered."""
    stack: Stack | None = None
    """Software that drives it; None means Windlass's own runtime."""
    system: str | None = None
    """Fingerprint of the hardware and library versions that were measured."""
    sources: dict[str, Source] = Field(default_factory=dict)
    """Source of each number, by its key (`device.tiers.device.capacity_bytes`) or by a pattern of
    keys (`device.matmul.*.curve`)."""

    fingerprint_excludes: ClassVar[frozenset[str]] = frozenset({"sources", "unmeasured"})

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
        """This machine of one host with only some of its devices."""
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

    def split(self, devices: int, *, cores: int) -> Self:
        """This machine with its one device split into several that share its cores and memory.

        Args:
            devices: number of processes that compute on it at the same time.
        """
        link = Link(name="loopback", joins=devices, latency=LOOPBACK_SECONDS, rate=LOOPBACK_RATE)
        return self.model_copy(
            update={
                "devices_per_host": devices,
                "device": self.device.split(devices, cores=cores),
                "links": (link,),
            }
        )
