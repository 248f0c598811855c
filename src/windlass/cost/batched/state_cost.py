"""States, layer by layer: what weights, gradients and optimizer state take, as replicas share them.

Found for all ways to share of many blocks at once. What rts' alone decides is the clock's own; what
replicas exchange is `Links`' formulas over columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain as joined
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.batched.collective_time import BatchedCollectives, ShardingColumns
from windlass.cost.batched.config_keys import ShardingOption, ShardingOptions, priced_plan
from windlass.cost.optimizer_time import norm_launch_seconds, update_seconds
from windlass.cost.ring_bandwidth import RingCosts
from windlass.program.memory.layer_sizes import StateSizes, layer_kind_state_sizes
from windlass.program.memory.offloaded_bytes import offloaded_state_bytes
from windlass.program.memory.values import STAGING_BYTES
from windlass.schema.graph import Graph, Precision
from windlass.schema.machine import Machine
from windlass.schema.plan import DEVICE_TIER, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Bytes of state and seconds that it costs: for each pair of a block and kind of layer."""

    held: Floats
    """Weights and optimizer state that are always there."""
    gather: Floats
    reduce: Floats
    """On the links."""
    waited: Floats
    """Of `reduce`, in which the device does nothing else."""
    after: Floats
    """What comes behind the passes: updates and what follows them."""
    norm_bytes: Floats
    norm_launches: Floats
    under_way: Floats
    """Of an update that goes on beside what follows, until the layer can be used again."""
    far: Floats
    """Bytes of state at home beyond the near tier."""
    staging: Floats
    """Of each pair: bytes that such state passes through, once for all layers."""
    far_capacity: Floats
    """Of each pair: bytes of the tier that it lives in; infinite where it stays near."""


class _Own(NamedTuple):
    """Of each kind, what a device has of the states of a layer; rts does not matter."""

    sizes: Ints
    """Bytes of `StateSizes` (columns)."""
    away: Ints
    """Bytes of state that is not near."""
    update: Floats
    launches: Floats
    """Of the norm, in seconds."""


class StateCostModel:
    """Prices of the states of a chain of layers.

    Args:
        base: says moments and clipping.
        graph: of the chain.
        machine: that it runs on.
        rings: on its links.
    """

    def __init__(self, base: Plan, graph: Graph, machine: Machine, rings: RingCosts) -> None:
        self._base, self._graph, self._machine, self._rings = base, graph, machine, rings
        self._names = tuple(dict.fromkeys(kind.name for kind in graph.layer_kinds()))
        tiers = machine.device.tiers
        self._homes = (DEVICE_TIER, *(tier.name for tier in tiers if tier.name != DEVICE_TIER))
        self._capacity = np.array(
            [np.inf, *(t.capacity_bytes for t in tiers if t.name != DEVICE_TIER)]
        )
        self._exchanges = BatchedCollectives(machine, rings)
        self._own: Callable[[Precision, bool, bool, int, int], _Own] = cache(self._own_of)

    def of(self, blocks: Sequence[ShardingOptions]) -> StateCosts:
        """The numbers of all pairs of some blocks, one behind the other.

        Raises:
            KeyError: the machine states no rate that a pair needs.
        """
        counts = [len(block.options) for block in blocks]
        shares = list(joined.from_iterable(block.options for block in blocks))
        pairs = _pairs(blocks, shares, counts)
        own, place = self._all_own(blocks, pairs.optimizer, counts)
        sizes = dict(zip(StateSizes._fields, own.sizes[place].transpose(2, 0, 1), strict=True))
        home = np.array([self._homes.index(share.optimizer_tier) for share in shares])
        away = (home > 0)[:, None]
        held = sizes["weights"] // pairs.parameters[:, None]
        sent = self._exchanges.of(pairs, sizes)
        far = np.where(away, own.away[place], 0)
        after, under_way = self._updates(
            pairs.parts > 1, own.update[place], self._moving(home) * far, sent.spread
        )
        return StateCosts(
            held=1.0 * (held + np.where(away, 0, sizes["optimizer"])),
            gather=sent.gather,
            reduce=sent.reduce,
            waited=sent.waited,
            after=np.where(away, after, own.update[place] + sent.spread),
            norm_bytes=1.0 * sizes["gradient_shard"],
            norm_launches=own.launches[place],
            under_way=np.where(away, under_way, 0.0),
            far=1.0 * far,
            staging=np.where(home > 0, float(STAGING_BYTES), 0.0),
            far_capacity=self._capacity[home],
        )

    def _all_own(
        self, blocks: Sequence[ShardingOptions], optimizer: Ints, counts: Sequence[int]
    ) -> tuple[_Own, Ints]:
        """`_Own` of all blocks and rts', each once, and of each pair its place among those."""
        known: dict[tuple[Precision, bool, bool, int, int], int] = {}
        each = [
            (block.precision, block.accumulates, block.offloads, block.tensor)
            for block, count in zip(blocks, counts, strict=True)
            for _ in range(count)
        ]
        keys = zip(each, optimizer.tolist(), strict=True)
        place = [known.setdefault((*key, degree), len(known)) for key, degree in keys]
        found = [self._own(*key) for key in known]
        return _Own(*map(np.stack, zip(*found, strict=True))), np.array(place)

    def _own_of(
        self, precision: Precision, sums: bool, moves: bool, tensor: int, optimizer: int
    ) -> _Own:
        plan = priced_plan(self._base, precision, accumulates=sums, optimizer=optimizer)
        device = self._machine.device.effective(offloads=moves)
        kinds = [self._graph.shard(tensor).kinds[name] for name in self._names]
        sizes = [layer_kind_state_sizes(plan, kind) for kind in kinds]
        return _Own(
            sizes=np.array(sizes),
            away=np.array([offloaded_state_bytes(plan, each) for each in sizes]),
            update=np.array([update_seconds(plan, kind, device).total for kind in kinds]),
            launches=np.array([norm_launch_seconds(kind, device) for kind in kinds]),
        )

    def _moving(self, home: Ints) -> Floats:
        """Seconds in which a byte is fetched from each of some homes, and written back there."""
        tiers = {tier.name: tier for tier in self._machine.device.tiers}
        seconds = np.zeros(len(self._homes))
        for at in np.unique(home[home > 0]):
            seconds[at] = tiers[self._homes[at]].transfer_seconds(1.0, 1.0)
        return seconds[home][:, None]

    def _updates(
        self, parted: Bools, work: Floats, moving: Floats, spread: Floats
    ) -> tuple[Floats, Floats]:
        """Seconds that updates of state away hold the device up, and go on beside what follows.

        State that comes from home is fetched, updated and written back beside each other. What puts
        parts of a layer together waits for all of that, and the next update for it. On a CPU the
        device itself works meanwhile. As `streamed.FarLane` has it.

        Args:
            parted: of each pair whether its weights are updated in parts.
            work: seconds of the updates themselves, of each kind.
            moving: seconds that state moves.
            spread: seconds of putting its parts together.
        """
        lane = np.maximum(work, moving)
        waits = parted[:, None] | (not self._machine.overlaps_transfers)
        beside = work if self._machine.device.kind == "cpu" else np.zeros_like(work)
        return np.where(waits, lane + spread, beside), np.where(waits, 0.0, lane)


def _pairs(
    blocks: Sequence[ShardingOptions], shares: Sequence[ShardingOption], counts: Sequence[int]
) -> ShardingColumns:
    """All pairs of blocks of so many pairs."""
    tensors = tuple(dict.fromkeys(block.tensor for block in blocks))
    weights, optimizer = np.array([(share.parameters, share.optimizer) for share in shares]).T
    return ShardingColumns(
        tensors=tensors,
        tensor=np.repeat([tensors.index(block.tensor) for block in blocks], counts),
        replicas=np.repeat([block.replicas for block in blocks], counts),
        parameters=weights,
        optimizer=optimizer,
    )
