"""Links: seconds that messages and collectives take on a machine's links.

A collective costs what each device sends over the rate of its link, and the latency of each hop of
the ring. Groups of one stage that exchange at once over one link share its rate. The slices of a
layer lie next to each other, so that the innermost link that joins them is theirs.

Source of the formulas: Patarasuk & Yuan 2009, JPDC 69(2).
"""

from functools import cached_property

from windlass.program.exchanged import Sent, all_reduce_bytes, gather_bytes
from windlass.program.instruction import ANSWERS, Instruction, Kind
from windlass.program.shards import parts
from windlass.program.sizes import StateSizes, states_of
from windlass.spec.graph import Collective, Graph
from windlass.spec.machine import Link, Machine
from windlass.spec.plan import Plan


class Links:
    """Seconds of the exchanges of one plan on one machine.

    Args:
        plan: the plan.
        graph: that it cuts.
        machine: that it runs on.
    """

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        self._plan, self._graph, self._machine = plan, graph, machine

    @cached_property
    def _sent(self) -> Sent:
        return Sent(self._plan, self._graph)

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
        if kind in ANSWERS:
            return self.message_seconds(self._sent.of(instruction))
        if kind in ("gather", "spread", "reduce"):
            return self.state_seconds(kind, self._states[layer])
        return self._inside(instruction)

    def state_seconds(self, kind: Kind, sizes: StateSizes) -> float:
        """Seconds that replicas take to gather, spread or reduce what they share of one layer."""
        degree, apart = self._plan.sharding.weights, parts(self._plan)
        if kind == "gather":
            return self._ring(gather_bytes(sizes.weights, degree), degree, apart=apart)
        if kind == "spread":
            return self._ring(gather_bytes(sizes.held, apart), apart)
        return self._reduce(sizes)

    def message_seconds(self, nbytes: float) -> float:
        """Seconds of a message of so many bytes to another stage."""
        link = self._link(self._plan.cut.devices)
        return link.latency + nbytes / link.rate

    def _inside(self, instruction: Instruction) -> float:
        """What the slices of a layer exchange in a pass, one collective after the other."""
        return sum(self.slice_seconds(how, sent) for how, sent in self._sent.inside(instruction))

    def slice_seconds(self, how: Collective, sent: int) -> float:
        """Seconds of one collective of a layer's slices, for which each sends so many bytes."""
        return self._slices(sent, passes=2 if how == "sum" else 1)

    def _reduce(self, sizes: StateSizes) -> float:
        """What slices have whole is summed over them, the whole scattered within rts' replicas.

        Then shards are summed over the others.
        """
        degree, slices = self._plan.sharding.optimizer, self._plan.cut.tensor
        others = self._plan.cut.replicas // degree
        scattered = self._ring(gather_bytes(sizes.gradients, degree), degree)
        summed = all_reduce_bytes(sizes.shard, others)
        whole = self._slices(all_reduce_bytes(sizes.common, slices), passes=2)
        return whole + scattered + self._ring(summed, others, apart=degree, passes=2)

    def _slices(self, sent: int, *, passes: int) -> float:
        """Seconds of one ring of the slices of a layer."""
        degree = self._plan.cut.tensor
        return self._hops(sent, degree, degree, passes) if sent else 0.0

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
        return self._hops(sent, ranks, ranks * apart * self._plan.cut.tensor, passes)

    def _hops(self, sent: int, ranks: int, spans: int, passes: int) -> float:
        """Seconds of one ring, whose ends are so many devices from each other."""
        link, cut = self._link(spans), self._plan.cut
        at_once = max(1, min(link.joins, cut.replicas * cut.tensor) // ranks)
        return sent * at_once / link.rate + passes * (ranks - 1) * link.latency

    def _link(self, joined: int) -> Link:
        """The innermost link that joins so many devices, else the outermost there is."""
        links = self._machine.links
        if not links:
            raise KeyError(f"{self._machine.name} states no link between devices")
        return next((link for link in links if link.joins >= joined), links[-1])
