"""Time of collectives on model state, for many sharding options at once.

`CommunicationCosts` computes the same for one plan.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.communication_time import tensor_parallel_ring
from windlass.cost.op_time import rates_at
from windlass.cost.ring_bandwidth import RingCosts
from windlass.program import REPLICATED_SIZES, all_gather_bytes, all_reduce_bytes
from windlass.schema import Machine


class ShardingColumns(NamedTuple):
    """Sharding options as arrays, `[option]`."""

    tensors: tuple[int, ...]
    """Tensor-parallel degrees, each once."""
    tensor: Ints
    """Index among `tensors`."""
    replicas: Ints
    parameters: Ints
    """Sharding degree of parameters."""
    optimizer: Ints
    """Sharding degree of optimizer state."""

    @property
    def parts(self) -> Ints:
        """Optimizer shards in one parameter shard."""
        return np.asarray(self.optimizer // self.parameters)

    @property
    def slices(self) -> Ints:
        """Tensor-parallel ranks."""
        return np.array([int(each) for each in self.tensors])[self.tensor]


class CollectiveSeconds(NamedTuple):
    """Seconds of collectives, `[option, layer kind]`."""

    gather: Floats
    spread: Floats
    """All-gather of parameters after an update of optimizer shards."""
    reduce: Floats
    waited: Floats
    """The part of `reduce` that blocks the device."""


class BatchedCollectives:
    """Time of collectives on model state.

    Args:
        machine: the machine that they run on.
        rings: costs of rings on its links.
    """

    def __init__(self, machine: Machine, rings: RingCosts) -> None:
        self._machine, self._rings = machine, rings

    def of(self, pairs: ShardingColumns, sizes: Mapping[str, Ints]) -> CollectiveSeconds:
        """Seconds of all options; zero on a machine without links.

        Args:
            pairs: sharding options.
            sizes: bytes by name of `StateSizes`, `[option, layer kind]`.
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
        """Whether the all-reduce of gradients overlaps with computation, `[option]`."""
        machine = self._machine
        within_host = pairs.replicas * pairs.slices <= machine.devices_per_host
        waits = within_host & (machine.device.kind == "cpu")
        waits |= machine.execution_model != "overlapping"
        return np.asarray((pairs.replicas > pairs.optimizer) & ~waits)

    def _common(self, pairs: ShardingColumns, sizes: Mapping[str, Ints]) -> Floats:
        """Seconds to sum the gradients that tensor-parallel ranks replicate."""
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
        """Seconds of a reduce-scatter of this many bytes among the optimizer's sharding group."""
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
            pairs: sharding options.
            sent: bytes that each device sends.
            ranks: devices in the ring.
            apart: replicas from one of them to the next; this many rings run side by side.
            passes: times that the buffer goes around.
        """
        slices = pairs.slices
        ways = self._rings.costs(ranks, apart * slices, pairs.replicas * slices)
        each_byte, each_hop = (way[:, None] for way in ways)
        return np.asarray(sent * each_byte + passes * (ranks - 1)[:, None] * each_hop)


def _gathered(nbytes: Ints, ranks: Ints) -> Ints:
    return all_gather_bytes(nbytes, ranks[:, None])
