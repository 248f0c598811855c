"""World: the devices of a run, a process each, and what they exchange and agree on.

It rides on torch.distributed: gloo between CPUs, nccl between GPUs. What an instruction brings
together, and who is at the other end of a message, the program says; here it only happens.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from windlass.models.tensor_parallel.collectives import Place as SlicePlace
from windlass.models.tensor_parallel.collectives import all_gather, reduce_scatter
from windlass.program.communication_volume import all_reduce_bytes, gather_bytes
from windlass.program.device_mesh import Place, device_of, place_of
from windlass.program.instruction import Instruction, Kind
from windlass.program.process_groups import Peers
from windlass.program.zero_sharding import agreeing, gathering, scattering, spreading
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorAxis, grid_columns, group_size

WAIT = timedelta(minutes=30)
"""How long a device waits for others before it gives up. A watchdog, which knows more, is there
much sooner: this only ends what nobody watches."""

LOOPBACK = "127.0.0.1"

AMONG: tuple[TensorAxis, ...] = ("all", "tokens", "features")
"""The rings of a grid of slices."""

_LANES = ("onward", "back", "recv_tied_weights", "accumulate_tied_grads")
"""Kinds of messages, each in its own order; its index is the message's tag."""


class Rendezvous(NamedTuple):
    """Where the devices of a run find each other."""

    host: str
    port: int
    device: int
    """Which of them this process is."""
    devices: int


class Told(NamedTuple):
    """What all devices of an attempt must know."""

    attempt: int
    checkpoint: str | None
    """That all go on from; None begins anew."""


def join(rendezvous: Rendezvous, kind: str) -> None:
    """Meets the other devices; returns when all are there.

    The store listens already, in the process that chose the port.

    Args:
        rendezvous: where.
        kind: of what this process computes on, as torch names it.
    """
    if rendezvous.host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = TCPStore(rendezvous.host, rendezvous.port, rendezvous.devices, is_master=False)
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        store=store,
        rank=rendezvous.device,
        world_size=rendezvous.devices,
        timeout=WAIT,
    )


def meet(device: int, devices: int, kind: str, *, local: int, host: str) -> None:
    """Meets the other devices where torch's launcher says; returns when all are there.

    Args:
        device: which of them this process is.
        devices: how many there are.
        kind: of what this process computes on, as torch names it.
        local: which of those on its host this is.
        host: where devices find each other.
    """
    if kind == "cuda":
        torch.cuda.set_device(local)
    if host in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # From its environment, for it says also who keeps the store, and how often all began anew.
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo",
        init_method="env://",
        rank=device,
        world_size=devices,
        timeout=WAIT,
    )


def told(told: Told | None, on: torch.device) -> Told:
    """What device 0 tells all others.

    Args:
        told: on device 0; None elsewhere.
        on: where tensors lie that devices exchange.
    """
    text = json.dumps(told).encode() if told else b""
    length = torch.tensor(len(text), device=on)
    dist.broadcast(length, 0)
    letters = torch.zeros(int(length), dtype=torch.uint8, device=on)
    if told:
        letters.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
    dist.broadcast(letters, 0)
    return Told(*json.loads(bytes(letters.tolist())))


def leave() -> None:
    """Ends what `join` began; harmless if nothing did."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another device is gone, not what went wrong.

    torch's store and nccl have errors of their own; gloo gives plain ones that name its source.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


class World(Protocol):
    """What a run asks of the devices it is one of."""

    device: int
    place: Place
    devices: int

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of each value over all devices, in float64."""

    def most(self, value: float) -> float:
        """The largest over all devices."""


class Alone:
    """One device, which agrees with itself."""

    device = 0
    place = Place(0, 0, 0)
    devices = 1

    def total(self, values: Sequence[float]) -> list[float]:
        """The values themselves."""
        return list(values)

    def most(self, value: float) -> float:
        """The value itself."""
        return value


class Pod:
    """Several devices, of which this process is one. Made on all of them at once, after `join`.

    Args:
        plan: of more than one device.
        graph: that it cuts.
        device: which of its devices this is.
        on: where tensors lie.
    """

    def __init__(self, plan: Plan, graph: Graph, device: int, on: torch.device) -> None:
        self.device, self.devices = device, plan.parallel.devices
        self.place = place_of(device, plan.parallel)
        self._plan, self._on = plan, on
        self._peers = Peers(plan, graph)
        self._groups = _Groups(plan)
        self._rings = {among: self._groups.of(_slices(self.place, plan, among)) for among in AMONG}
        names = {among: ring.group_name if ring else "" for among, ring in self._rings.items()}
        self.slice = SlicePlace(
            degree=int(plan.parallel.tensor),
            index=self.place.slice,
            columns=grid_columns(plan.parallel.tensor),
            group=names["all"],
            column_group=names["tokens"],
            row_group=names["features"],
        )
        """Which slice of each layer this device computes."""
        self._lanes = self._groups.lanes(on)
        self._under_way: list[tuple[Tensor, dist.Work]] = []
        self.sent: Counter[Kind] = Counter()
        """Bytes that this device has sent, by the instruction's kind."""

    # What a group does together.

    def gather(self, whole: Tensor, held: Tensor) -> None:
        """Puts the shards of a layer's weights together, `[n]` of `[n / rts]`."""
        self._gather("unshard_weights", self._with(gathering), whole, held)

    def sum_slices(self, common: Tensor, among: TensorAxis) -> None:
        """Sums in place what all of those slices have a contribution to."""
        dist.all_reduce(common, group=self._rings[among])
        self.sent["reduce_grads"] += all_reduce_bytes(
            common.nbytes, group_size(self._plan.parallel.tensor, among)
        )

    def spread(self, held: Tensor, part: Tensor) -> None:
        """Puts the updated parts of one shard of weights together, `[n]` of `[n / q]`."""
        self._gather("all_gather_params", self._with(spreading), held, part)

    def put_together(self, held: Tensor, part: Tensor) -> None:
        """As `spread`, before the first step: it counts in none."""
        all_gather(held, part, group=self._groups.of(self._with(spreading)))

    def reduce(self, whole: Tensor) -> "Coming":
        """The sum of a flat gradient over all replicas; of it only the device's shard `[n / rts']`.

        What sums shards that are the same goes on beside the computing that follows.

        Args:
            whole: `[n]`; may be changed.
        """
        shard = whole
        within = self._with(scattering)
        if len(within) > 1:
            shard = torch.empty(len(whole) // len(within), dtype=whole.dtype, device=whole.device)
            reduce_scatter(shard, whole, group=self._groups.of(within))
            self.sent["reduce_grads"] += gather_bytes(whole.nbytes, len(within))
        among = self._with(agreeing)
        if len(among) > 1:
            self.sent["reduce_grads"] += all_reduce_bytes(shard.nbytes, len(among))
            return Coming(
                shard, dist.all_reduce(shard, group=self._groups.of(among), async_op=True)
            )
        return Coming(shard, None)

    def _gather(self, kind: Kind, devices: tuple[int, ...], whole: Tensor, part: Tensor) -> None:
        all_gather(whole, part, group=self._groups.of(devices))
        self.sent[kind] += gather_bytes(whole.nbytes, len(devices))

    # Messages.

    def send(self, instruction: Instruction, tensor: Tensor) -> None:
        """Sends a tensor to the device at the other end, and goes on at once."""
        self._forget_arrived()
        tensor = tensor.detach().contiguous()
        peer, lane = self._other_end(instruction)
        work = dist.isend(tensor, peer, group=self._lanes[lane], tag=_LANES.index(lane))
        if work is not None:
            self._under_way.append((tensor, work))
        self.sent[instruction.kind] += tensor.nbytes

    def receive(self, instruction: Instruction, into: Tensor) -> Tensor:
        """Waits for a tensor from the device at the other end."""
        peer, lane = self._other_end(instruction)
        work = dist.irecv(into, peer, group=self._lanes[lane], tag=_LANES.index(lane))
        if work is not None:
            work.wait()
        return into

    def _other_end(self, instruction: Instruction) -> tuple[int, str]:
        peer = self._peers.of(instruction, self.device)
        if peer is None:
            raise ValueError(f"{instruction} lies on no boundary of device {self.device}")
        return peer, self._peers.lane(instruction, self.device)

    def _forget_arrived(self) -> None:
        self._under_way = [each for each in self._under_way if not each[1].is_completed()]

    def settle_messages(self) -> None:
        """Returns when all that was sent has arrived."""
        for _, work in self._under_way:
            work.wait()
        self._under_way.clear()

    # What all agree on.

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums of each value over all devices, in float64."""
        return self._agreed(values, dist.ReduceOp.SUM)

    def most(self, value: float) -> float:
        """The largest over all devices."""
        return self._agreed((value,), dist.ReduceOp.MAX)[0]

    def _agreed(self, values: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        told = torch.tensor(values, dtype=torch.float64, device=self._on)
        dist.all_reduce(told, op)
        found: list[float] = told.tolist()
        return found

    def _with(self, replicas: "_Sharers") -> tuple[int, ...]:
        return _sharing(self.place, self._plan, replicas)


_Sharers = Callable[[int, Plan], tuple[int, ...]]
"""The replicas that share something with one, such as `gathering`."""


class Coming(NamedTuple):
    """A tensor that others still add to."""

    tensor: Tensor
    work: dist.Work | None

    def come(self) -> Tensor:
        """The tensor, once all have."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class _Groups:
    """torch's groups, by their devices.

    All devices make all groups, in one order. If only a group's own made it, torch 2.13 would have
    them wait for each other for ever as soon as groups overlap.
    """

    def __init__(self, plan: Plan) -> None:
        places = [place_of(device, plan.parallel) for device in range(plan.parallel.devices)]
        shared = (gathering, spreading, scattering, agreeing)
        wanted = {_sharing(place, plan, each) for place in places for each in shared}
        wanted |= {_slices(place, plan, among) for place in places for among in AMONG}
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        for devices in sorted(each for each in wanted if len(each) > 1):
            self._made[devices] = dist.new_group(list(devices), timeout=WAIT)

    def of(self, devices: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The group of these devices; None for one device alone."""
        return self._made.get(devices)

    def lanes(self, on: torch.device) -> dict[str, dist.ProcessGroup | None]:
        """The group that each kind of message goes through.

        gloo tells messages apart by their tags. nccl knows no tags, and what goes both ways through
        one group is done in one order: there each kind has a group of its own.
        """
        if on.type != "cuda":
            return dict.fromkeys(_LANES)
        return {lane: dist.new_group(timeout=WAIT) for lane in _LANES}


def _sharing(place: Place, plan: Plan, replicas: _Sharers) -> tuple[int, ...]:
    """The devices of the replicas that share something with a place."""
    return tuple(
        device_of(place._replace(replica=each), plan.parallel)
        for each in replicas(place.replica, plan)
    )


def _slices(place: Place, plan: Plan, among: TensorAxis) -> tuple[int, ...]:
    """The devices of the slices that a place exchanges with: all of its layer, or some."""
    degree, columns = int(plan.parallel.tensor), grid_columns(plan.parallel.tensor)
    row, column = divmod(place.slice, columns)
    ranges = {
        "all": range(degree),
        "tokens": range(column, degree, columns),
        "features": range(row * columns, (row + 1) * columns),
    }
    return tuple(device_of(place._replace(slice=at), plan.parallel) for at in ranges[among])
