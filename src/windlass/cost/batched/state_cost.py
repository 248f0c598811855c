"""Costs of model state (weights, gradients, optimizer state) under sharding, by layer kind.

Computed for all options of many entries at once. What depends on the optimizer's degree alone is
the simulator's own; collectives use the formulas of `CommunicationCosts` over arrays.
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
from windlass.program import (
    STAGING_BYTES,
    StateSizes,
    layer_kind_state_sizes,
    offloaded_state_bytes,
)
from windlass.schema import DEVICE_TIER, Graph, Machine, Plan, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCosts:
    """Bytes and seconds of model state, `[option, kind]`."""

    held: Floats
    """Weights and optimizer state that are always on the device."""
    gather: Floats
    reduce: Floats
    """Gradient reduction on the links."""
    waited: Floats
    """The part of `reduce` that blocks the device."""
    after: Floats
    """What follows the passes: updates, and the all-gather after them."""
    norm_bytes: Floats
    norm_launches: Floats
    under_way: Floats
    """An update that overlaps with what follows it, until the layer can be used again."""
    far: Floats
    """Bytes of offloaded state."""
    staging: Floats
    """Bytes of staging buffers for offloaded state, once for all layers, `[option]`."""
    far_capacity: Floats
    """Bytes of the offload tier, `[option]`; infinite if nothing is offloaded."""


class _Own(NamedTuple):
    """State of each kind on one device; the sharding degree of parameters does not matter."""

    sizes: Ints
    """Bytes of each of `StateSizes`, `[kind, name]`."""
    away: Ints
    """Bytes of offloaded state."""
    update: Floats
    launches: Floats
    """Launch seconds of the gradient norm."""


class StateCostModel:
    """Costs of the state of a graph's layers.

    Args:
        base: states moments and clipping.
        graph: the graph.
        machine: the machine that it runs on.
        rings: costs of rings on its links.
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
        """Costs of all options of some entries, one after the other.

        Raises:
            KeyError: the machine states no rate that an option needs.
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
        """`_Own` of all distinct entries and optimizer degrees, and the index of each option's."""
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
        """Seconds to read and write back a byte of offloaded state, `[option, 1]`."""
        tiers = {tier.name: tier for tier in self._machine.device.tiers}
        seconds = np.zeros(len(self._homes))
        for at in np.unique(home[home > 0]):
            seconds[at] = tiers[self._homes[at]].transfer_seconds(1.0, 1.0)
        return seconds[home][:, None]

    def _updates(
        self, parted: Bools, work: Floats, moving: Floats, spread: Floats
    ) -> tuple[Floats, Floats]:
        """Seconds that updates of offloaded state block the device, and that they overlap.

        State is read, updated and written back concurrently. The all-gather of a layer's updated
        shards waits for all of that, and the next update waits for it. On a CPU the device itself
        works meanwhile. As in `OffloadQueue`.

        Args:
            parted: whether weights are updated in shards, `[option]`.
            work: seconds of the updates themselves, `[option, kind]`.
            moving: seconds that state moves, `[option, kind]`.
            spread: seconds to all-gather its shards, `[option, kind]`.
        """
        lane = np.maximum(work, moving)
        waits = parted[:, None] | (not self._machine.overlaps_transfers)
        beside = work if self._machine.device.kind == "cpu" else np.zeros_like(work)
        return np.where(waits, lane + spread, beside), np.where(waits, 0.0, lane)


def _pairs(
    blocks: Sequence[ShardingOptions], shares: Sequence[ShardingOption], counts: Sequence[int]
) -> ShardingColumns:
    """All options of some entries as arrays."""
    tensors = tuple(dict.fromkeys(block.tensor for block in blocks))
    weights, optimizer = np.array([(share.parameters, share.optimizer) for share in shares]).T
    return ShardingColumns(
        tensors=tensors,
        tensor=np.repeat([tensors.index(block.tensor) for block in blocks], counts),
        replicas=np.repeat([block.replicas for block in blocks], counts),
        parameters=weights,
        optimizer=optimizer,
    )
