"""What replicas exchange of their layers' states, for many ways to share at once.

`Links` says the same of one plan.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.collectives import tensor_parallel_ring
from windlass.cost.op_time import rates_at
from windlass.cost.ring_bandwidth import RingCosts
from windlass.program.communication_volume import (
    REPLICATED_SIZES,
    all_gather_bytes,
    all_reduce_bytes,
)
from windlass.schema.machine import Machine


class ShardingColumns(NamedTuple):
    """Ways in which replicas share states: columns."""

    tensors: tuple[int, ...]
    """Numbers of slices, each once."""
    tensor: Ints
    """A place among these."""
    replicas: Ints
    parameters: Ints
    """rts."""
    optimizer: Ints
    """rts'."""

    @property
    def parts(self) -> Ints:
        """Optimizer shards in one weight shard."""
        return np.asarray(self.optimizer // self.parameters)

    @property
    def slices(self) -> Ints:
        """Of a layer."""
        return np.array([int(each) for each in self.tensors])[self.tensor]


class CollectiveSeconds(NamedTuple):
    """Seconds of exchanges: for each pair (rows) and kind of layer (columns)."""

    gather: Floats
    spread: Floats
    """Until parts of weights that replicas have updated are together."""
    reduce: Floats
    waited: Floats
    """Of these, those in which the device does nothing else."""


class BatchedCollectives:
    """Prices of what replicas exchange.

    Args:
        machine: that they run on.
        rings: on its links.
    """

    def __init__(self, machine: Machine, rings: RingCosts) -> None:
        self._machine, self._rings = machine, rings

    def of(self, pairs: ShardingColumns, sizes: Mapping[str, Ints]) -> CollectiveSeconds:
        """What all pairs take; nothing on a machine without links.

        Args:
            pairs: how replicas share.
            sizes: what `StateSizes` names of the layers of each kind (columns), by pair.
        """
        weights = sizes["weights"]
        if not self._machine.links:
            return CollectiveSeconds(*np.zeros((4, *weights.shape)))
        parts, others = pairs.parts, pairs.replicas // pairs.optimizer
        held = weights // pairs.parameters[:, None]
        gather = self._ring(pairs, _gathered(weights, pairs.parameters), pairs.parameters, parts)
        spread = self._ring(pairs, _gathered(held, parts), parts)
        shards = all_reduce_bytes(sizes["gradient_shard"], others[:, None])
        summed = self._ring(pairs, shards, others, pairs.optimizer, passes=2)
        reduce = self._common(pairs, sizes) + self._scattered(pairs, sizes["gradients"]) + summed
        beside = np.where(self._sums_beside(pairs)[:, None], summed, 0.0)
        each = (gather, spread, reduce, reduce - beside)
        return CollectiveSeconds(*(np.where(weights > 0, seconds, 0.0) for seconds in each))

    def _sums_beside(self, pairs: ShardingColumns) -> Bools:
        """Whether gradients are summed over replicas beside computing."""
        machine = self._machine
        within_host = pairs.replicas * pairs.slices <= machine.devices_per_host
        waits = within_host & (machine.device.kind == "cpu")
        waits |= machine.execution_model != "overlapping"
        return np.asarray((pairs.replicas > pairs.optimizer) & ~waits)

    def _common(self, pairs: ShardingColumns, sizes: Mapping[str, Ints]) -> Floats:
        """What slices have in common is summed over them."""
        found = np.zeros(sizes["weights"].shape)
        for place, tensor in enumerate(pairs.tensors):
            rows = np.flatnonzero(pairs.tensor == place)
            for among, name in REPLICATED_SIZES.items():
                ranks, apart = tensor_parallel_ring(tensor, among)
                sent = all_reduce_bytes(sizes[name][rows], np.array(ranks))
                if sent.any():
                    exchanging = pairs.replicas[rows] * int(tensor)
                    ways = self._rings.costs(np.array(ranks), np.array(apart), exchanging)
                    each_byte, each_hop = (way[:, None] for way in ways)
                    found[rows] += np.where(
                        sent > 0, sent * each_byte + 2 * (ranks - 1) * each_hop, 0.0
                    )
        return found

    def _scattered(self, pairs: ShardingColumns, nbytes: Ints) -> Floats:
        """Each of rts' replicas is left with its part of a sum of so many bytes."""
        degree = pairs.optimizer
        seconds = self._ring(pairs, _gathered(nbytes, degree), degree)
        device = self._machine.device
        if device.kind == "cpu":
            moved = 3.0 * nbytes + nbytes // degree[:, None]
            copying = moved / rates_at(device.traffic, moved)
            seconds += np.where(degree[:, None] > 1, copying, 0.0)
        return seconds

    def _ring(
        self,
        pairs: ShardingColumns,
        sent: Ints,
        ranks: Ints,
        apart: Ints | int = 1,
        *,
        passes: int = 1,
    ) -> Floats:
        """Seconds of one ring of replicas.

        Args:
            pairs: how they share.
            sent: bytes that each device sends.
            ranks: devices in the ring.
            apart: replicas from one of them to the next; so many rings lie side by side.
            passes: times that the buffer goes around.
        """
        slices = pairs.slices
        ways = self._rings.costs(ranks, apart * slices, pairs.replicas * slices)
        each_byte, each_hop = (way[:, None] for way in ways)
        return np.asarray(sent * each_byte + passes * (ranks - 1)[:, None] * each_hop)


def _gathered(nbytes: Ints, ranks: Ints) -> Ints:
    return all_gather_bytes(nbytes, ranks[:, None])
