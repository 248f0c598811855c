"""Time of point-to-point messages and collectives on a machine's links.

Each byte that a device sends costs what a byte takes on the links its ring crosses, and each hop
costs their latency (`cost.ring_bandwidth`). Tensor-parallel ranks are neighbours, so the innermost
link that joins them carries their collectives.
"""

from functools import cached_property

from windlass.cost.ring_bandwidth import LinkCost, RingCosts, message_cost
from windlass.program.communication_volume import (
    CommunicationVolume,
    PassCollective,
    all_gather_bytes,
    all_reduce_bytes,
    replicated_gradient_sums,
)
from windlass.program.instruction import MATCHING_RECEIVE, Instruction, InstructionKind
from windlass.program.memory.layer_sizes import StateSizes, plan_state_sizes
from windlass.program.zero_sharding import updates_per_shard
from windlass.schema import tensor_grid as grid
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorAxis


class CommunicationCosts:
    """Seconds of all messages and collectives of one plan on one machine.

    Args:
        plan: the plan.
        graph: the graph that it partitions.
        machine: the machine that it runs on.
    """

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        self._plan, self._graph, self._machine = plan, graph, machine
        self._rings = RingCosts(machine.links)

    @cached_property
    def _sent(self) -> CommunicationVolume:
        return CommunicationVolume(self._plan, self._graph)

    @cached_property
    def _states(self) -> tuple[StateSizes, ...]:
        return plan_state_sizes(self._plan, self._graph)

    def seconds(self, instruction: Instruction) -> float:
        """Seconds of a message or collective, or of the collectives inside a pass; else 0.

        Raises:
            KeyError: the machine states no link.
        """
        kind, layer, _ = instruction
        if layer is None:
            return 0.0
        if kind in MATCHING_RECEIVE:
            return self.message_seconds(self._sent.sent_bytes(instruction))
        if kind in ("unshard_weights", "all_gather_params", "reduce_grads"):
            return self.state_seconds(kind, self._states[layer])
        return self._inside(instruction)

    def state_seconds(self, kind: InstructionKind, sizes: StateSizes) -> float:
        """Seconds to all-gather a layer's parameters or updated shards, or to reduce gradients."""
        degree, shards = self._plan.sharding.parameters, updates_per_shard(self._plan)
        if kind == "unshard_weights":
            return self._ring(all_gather_bytes(sizes.weights, degree), degree, apart=shards)
        if kind == "all_gather_params":
            return self._ring(all_gather_bytes(sizes.weight_shard, shards), shards)
        return self._reduce(sizes)

    def overlapped_seconds(self, instruction: Instruction) -> float:
        """The part of an instruction's communication that overlaps with computation."""
        kind, layer, _ = instruction
        if kind != "reduce_grads" or layer is None:
            return 0.0
        return self.overlapped_reduce_seconds(self._states[layer])

    def overlapped_reduce_seconds(self, sizes: StateSizes) -> float:
        """The part of a layer's gradient reduction that overlaps with computation."""
        return self._summed(sizes) if self.overlaps_reduction else 0.0

    @cached_property
    def overlaps_reduction(self) -> bool:
        """Whether the all-reduce of gradients over replicas overlaps with computation.

        All-reduces among replicas that update the same shard are asynchronous; every other
        collective blocks. Processes that share one host's cores need these cores for a reduction
        too: on 2 cores of an AMD EPYC, two of them take as long for a backward pass with
        overlapping reductions as for one after the other. Between hosts such a reduction costs no
        extra time.
        """
        parallel, machine = self._plan.parallel, self._machine
        on_cores = machine.device.kind == "cpu"
        within_host = parallel.data * parallel.tensor <= machine.devices_per_host
        if machine.execution_model != "overlapping" or (on_cores and within_host):
            return False
        return parallel.data > self._plan.sharding.optimizer

    def _inside(self, instruction: Instruction) -> float:
        """Seconds of a pass's tensor-parallel collectives, one after the other."""
        return sum(map(self.tensor_parallel_seconds, self._sent.pass_collectives(instruction)))

    def tensor_parallel_seconds(self, each: PassCollective) -> float:
        """Seconds of one tensor-parallel collective."""
        return self._slices(
            each.sent_bytes, each.axis, passes=2 if each.kind == "all_reduce" else 1
        )

    def _reduce(self, sizes: StateSizes) -> float:
        """Seconds of a layer's gradient reduction.

        Gradients of weights that tensor-parallel ranks replicate are summed over these ranks, the
        whole is reduce-scattered within the optimizer's sharding group, and the shards are summed
        over the groups.
        """
        replicated = sum(
            self._slices(sent, axis, passes=2)
            for axis, sent in replicated_gradient_sums(sizes, self._plan)
        )
        return replicated + self._scattered(sizes.gradients) + self._summed(sizes)

    def _scattered(self, nbytes: int) -> float:
        """Seconds of a reduce-scatter of a buffer within the optimizer's sharding group.

        gloo has no reduce-scatter: each device copies what the others need and sums what arrives,
        `3 B + B / n` bytes read and written by its cores.
        """
        degree = self._plan.sharding.optimizer
        seconds = self._ring(all_gather_bytes(nbytes, degree), degree)
        device = self._machine.device
        if degree > 1 and nbytes and device.kind == "cpu":
            moved = 3 * nbytes + nbytes // degree
            seconds += moved / device.traffic.at(moved)
        return seconds

    def _summed(self, sizes: StateSizes) -> float:
        """Seconds of the all-reduce of shards over the replicas that update the same one."""
        degree = self._plan.sharding.optimizer
        others = self._plan.parallel.data // degree
        return self._ring(
            all_reduce_bytes(sizes.gradient_shard, others), others, apart=degree, passes=2
        )

    def _slices(self, sent: int, axis: TensorAxis, *, passes: int) -> float:
        """Seconds of one ring of tensor-parallel ranks."""
        if not sent:
            return 0.0
        ranks, apart = tensor_parallel_ring(self._plan.parallel.tensor, axis)
        return self._rounds(sent, ranks, apart, passes)

    def _ring(self, sent: int, ranks: int, *, apart: int = 1, passes: int = 1) -> float:
        """Seconds of one ring of data-parallel replicas.

        Args:
            sent: bytes that each device sends.
            ranks: devices in the ring.
            apart: replicas from one of them to the next; this many rings run side by side.
            passes: times that the buffer goes around.
        """
        if ranks == 1:
            return 0.0
        return self._rounds(sent, ranks, apart * self._plan.parallel.tensor, passes)

    def _rounds(self, sent: int, ranks: int, apart: int, passes: int) -> float:
        """Seconds of one ring whose neighbours are `apart` devices from each other."""
        parallel = self._plan.parallel
        cost = self._rings.cost(ranks, apart, parallel.data * int(parallel.tensor))
        return sent * cost.byte_seconds + passes * (ranks - 1) * cost.hop_seconds

    def message_seconds(self, nbytes: float) -> float:
        """Seconds of a message to another stage."""
        cost = self.message_cost
        return nbytes * cost.byte_seconds + cost.hop_seconds

    @cached_property
    def message_cost(self) -> LinkCost:
        """Cost of a message to another stage."""
        parallel = self._plan.parallel
        return message_cost(
            self._machine.links, parallel.devices, active_devices=parallel.data * parallel.tensor
        )


def tensor_parallel_ring(slices: int, axis: TensorAxis) -> tuple[int, int]:
    """Ranks in one ring of a layer's tensor-parallel group, and devices from one to the next.

    The ranks of a row are neighbours; a column's ring reaches over all rows.
    """
    ranks = grid.group_size(slices, axis)
    return ranks, grid.group_span(slices, axis) // ranks
