"""Links: seconds that messages and collectives take on a machine's links.

A collective costs, for each byte that a device sends, what a byte takes on the links that its ring
crosses, and the latency of each hop (`cost.rings`). The slices of a layer lie next to each other,
so that the innermost link that joins them is theirs.
"""

from functools import cached_property

from windlass.cost.ring_bandwidth import LinkCost, RingCosts, message_cost
from windlass.program.communication_volume import (
    PassCollective,
    CommunicationVolume,
    all_reduce_bytes,
    replicated_gradient_sums,
    all_gather_bytes,
)
from windlass.program.instruction import MATCHING_RECEIVE, Instruction, InstructionKind
from windlass.program.memory.layer_sizes import StateSizes, states_of
from windlass.program.zero_sharding import updates_per_shard
from windlass.schema import tensor_grid as grid
from windlass.schema.graph import Graph
from windlass.schema.machine import Machine
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorAxis


class CommunicationCosts:
    """Seconds of the exchanges of one plan on one machine.

    Args:
        plan: the plan.
        graph: that it cuts.
        machine: that it runs on.
    """

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        self._plan, self._graph, self._machine = plan, graph, machine
        self._rings = RingCosts(machine.links)

    @cached_property
    def _sent(self) -> CommunicationVolume:
        return CommunicationVolume(self._plan, self._graph)

    @cached_property
    def _states(self) -> tuple[StateSizes, ...]:
        return states_of(self._plan, self._graph)

    def seconds(self, instruction: Instruction) -> float:
        """Seconds that a message or collective takes, or the collectives inside a pass; else 0.

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
        """Seconds that replicas take to gather, spread or reduce what they share of one layer."""
        degree, apart = self._plan.sharding.parameters, updates_per_shard(self._plan)
        if kind == "unshard_weights":
            return self._ring(all_gather_bytes(sizes.weights, degree), degree, apart=apart)
        if kind == "all_gather_params":
            return self._ring(all_gather_bytes(sizes.held, apart), apart)
        return self._reduce(sizes)

    def beside_seconds(self, instruction: Instruction) -> float:
        """Seconds of these that go on beside computing."""
        kind, layer, _ = instruction
        if kind != "reduce_grads" or layer is None:
            return 0.0
        return self.summing_seconds(self._states[layer])

    def summing_seconds(self, sizes: StateSizes) -> float:
        """Seconds of reducing a layer's gradients in which its devices go on computing."""
        return self._summed(sizes) if self.sums_beside else 0.0

    @cached_property
    def sums_beside(self) -> bool:
        """Whether gradients are summed over replicas beside computing.

        Sums over those that update the same shard are begun and waited for later; all else that
        replicas exchange is waited for at once. Processes on one host's cores need these for a sum
        too: on 2 cores of an AMD EPYC two of them take as long for a backward pass and sums beside
        it as for one after the other. Between hosts such sums take no longer than without it.
        """
        cut, machine = self._plan.parallel, self._machine
        on_cores = machine.device.kind == "cpu"
        within_host = cut.data * cut.tensor <= machine.devices_per_host
        if machine.rule != "overlapping" or (on_cores and within_host):
            return False
        return cut.data > self._plan.sharding.optimizer

    def _inside(self, instruction: Instruction) -> float:
        """What the slices of a layer exchange in a pass, one collective after the other."""
        return sum(map(self.slice_seconds, self._sent.pass_collectives(instruction)))

    def slice_seconds(self, each: PassCollective) -> float:
        """Seconds of one collective of a layer's slices."""
        return self._slices(
            each.sent_bytes, each.axis, passes=2 if each.kind == "all_reduce" else 1
        )

    def _reduce(self, sizes: StateSizes) -> float:
        """What slices have in common is summed over them, the whole scattered within rts' replicas.

        Then shards are summed over the others.
        """
        common = sum(
            self._slices(sent, among, passes=2) for among, sent in replicated_gradient_sums(sizes, self._plan)
        )
        return common + self._scattered(sizes.gradients) + self._summed(sizes)

    def _scattered(self, nbytes: int) -> float:
        """Each of rts' replicas is left with its part of a sum of so many bytes.

        gloo has no such collective: there each device copies what goes to the others, and sums what
        comes, `3 B + B / n` read and written by its cores.
        """
        degree = self._plan.sharding.optimizer
        seconds = self._ring(all_gather_bytes(nbytes, degree), degree)
        device = self._machine.device
        if degree > 1 and nbytes and device.kind == "cpu":
            moved = 3 * nbytes + nbytes // degree
            seconds += moved / device.traffic.at(moved)
        return seconds

    def _summed(self, sizes: StateSizes) -> float:
        """Shards are summed over the replicas that update the same one."""
        degree = self._plan.sharding.optimizer
        others = self._plan.parallel.data // degree
        return self._ring(all_reduce_bytes(sizes.shard, others), others, apart=degree, passes=2)

    def _slices(self, sent: int, among: TensorAxis, *, passes: int) -> float:
        """Seconds of one ring of slices of a layer."""
        if not sent:
            return 0.0
        ranks, apart = tensor_parallel_ring(self._plan.parallel.tensor, among)
        return self._rounds(sent, ranks, apart, passes)

    def _ring(self, sent: int, ranks: int, *, apart: int = 1, passes: int = 1) -> float:
        """Seconds of one ring of replicas.

        Args:
            sent: bytes that each device sends.
            ranks: devices in the ring.
            apart: replicas from one of them to the next; so many rings lie side by side.
            passes: times that the buffer goes around.
        """
        if ranks == 1:
            return 0.0
        return self._rounds(sent, ranks, apart * self._plan.parallel.tensor, passes)

    def _rounds(self, sent: int, ranks: int, apart: int, passes: int) -> float:
        """Seconds of one ring, whose neighbours are so many devices from each other."""
        cut = self._plan.parallel
        way = self._rings.way(ranks, apart, cut.data * int(cut.tensor))
        return sent * way.byte_seconds + passes * (ranks - 1) * way.round_seconds

    def message_seconds(self, nbytes: float) -> float:
        """Seconds of a message of so many bytes to another stage."""
        way = self.message_way
        return nbytes * way.byte_seconds + way.round_seconds

    @cached_property
    def message_way(self) -> LinkCost:
        """What a message to another stage takes."""
        cut = self._plan.parallel
        return message_cost(self._machine.links, cut.devices, exchanging=cut.data * cut.tensor)


def tensor_parallel_ring(slices: int, among: TensorAxis) -> tuple[int, int]:
    """Slices of one ring of a layer, and devices from one of them to the next.

    The slices of a row lie next to each other; a column's ring reaches over all rows.
    """
    ranks = grid.group_size(slices, among)
    return ranks, grid.group_span(slices, among) // ranks
