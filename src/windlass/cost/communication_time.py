"""Time of point-to-point messages and collectives on a machine's links.

Each byte that a device sends costs what a byte takes on the links its ring crosses, and each hop
costs their latency (`cost.ring_bandwidth`). Tensor-parallel ranks are neighbours, so the innermost
link that joins them carries their collectives.
"""

from functools import cache, cached_property, partial
from math import log2

from windlass.cost.ring_bandwidth import LinkCost, all_to_all_cost, message_cost, ring_cost
from windlass.program import (
    MATCHING_RECEIVE,
    CommunicationVolume,
    Instruction,
    InstructionKind,
    PassCollective,
    StateSizes,
    all_gather_bytes,
    all_reduce_bytes,
    exchanged_bytes,
    plan_state_sizes,
    replicated_gradient_sums,
    updates_per_shard,
)
from windlass.schema import (
    OWN_STACK,
    CollectiveAxis,
    CollectiveKind,
    Graph,
    LayerKind,
    Machine,
    Plan,
    TensorAxis,
    group_size,
    group_span,
    optimizer_law,
)


class CommunicationCosts:
    """Seconds of all messages and collectives of one plan on one machine."""

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        self._plan, self._graph, self._machine = plan, graph, machine
        self._ring_cost = cache(partial(ring_cost, machine.links))
        self._stack = machine.stack or OWN_STACK
        self._is_own = self._stack.name == OWN_STACK.name

    @cached_property
    def _volume(self) -> CommunicationVolume:
        return CommunicationVolume(self._plan, self._graph)

    @cached_property
    def _full_kinds(self) -> tuple[LayerKind, ...]:
        return tuple(self._graph.layer_kinds())

    @cached_property
    def _state_sizes(self) -> tuple[StateSizes, ...]:
        return plan_state_sizes(self._plan, self._graph)

    def seconds(self, instruction: Instruction) -> float:
        """Seconds of a message or collective, or of the collectives inside a pass; else 0.

        Raises:
            KeyError: the machine states no link.
        """
        kind, layer, _ = instruction
        if layer is None:
            return 0.0
        if kind == "update":
            return self.whole_weight_seconds(self._full_kinds[layer])
        if kind in MATCHING_RECEIVE:
            return self.message_seconds(self._volume.sent_bytes(instruction))
        if kind in ("unshard_weights", "all_gather_params", "reduce_grads"):
            return self.state_seconds(kind, self._state_sizes[layer])
        seconds = map(self.pass_collective_seconds, self._volume.pass_collectives(instruction))
        return sum(seconds)

    def whole_weight_seconds(self, kind: LayerKind) -> float:
        """Seconds to sum what an optimizer reads of a layer's whole weights over their parts.

        These are the parts of each matrix that it updates whole, or one buffer of a few numbers for
        each weight after every pass but the last.

        Args:
            kind: the layer's kind before tensor parallelism.
        """
        law = optimizer_law(self._plan.optimizer)
        if law.scope == "matrix":
            summed = [weight.count for weight in kind.updated_as_matrices(law)]
        else:
            shapes = [weight.shape for weight in kind.trained]
            summed = [
                sum(law.summed_elements(index, shape) for shape in shapes)
                for index in range(law.passes)
            ]
        itemsize = 8 if self._plan.precision == "float64" else 4
        return sum(self._sum_over_parts_seconds(itemsize * elements) for elements in summed)

    def _sum_over_parts_seconds(self, nbytes: int) -> float:
        """Seconds of the all-reduce of a buffer over the ranks that hold parts of one weight."""
        if not nbytes:
            return 0.0
        shards, tensor = self._plan.sharding.optimizer, int(self._plan.parallel.tensor)
        seconds = self._replica_ring(all_reduce_bytes(nbytes, shards), shards, passes=2)
        if tensor > 1:
            sent = all_reduce_bytes(nbytes, tensor)
            seconds += self.pass_collective_seconds(PassCollective("all_reduce", "all", sent))
        return seconds

    def state_seconds(self, kind: InstructionKind, sizes: StateSizes) -> float:
        """Seconds to all-gather a layer's parameters or updated shards, or to reduce gradients.

        Those of experts, which other replicas share, are gathered and reduced one after the other.
        """
        return sum(self._part_seconds(kind, *part) for part in sizes.parts(self._plan))

    def _part_seconds(self, kind: InstructionKind, plan: Plan, sizes: StateSizes) -> float:
        """Seconds of one part of a layer's state, under the plan as that part sees it."""
        degree, shards = plan.sharding.parameters, updates_per_shard(plan)
        apart = self._apart(plan)
        if kind == "unshard_weights":
            if plan.sharding.reshard:
                return 0.0
            return self._replica_ring(
                all_gather_bytes(sizes.weights, degree), degree, stride=shards * apart
            )
        if kind == "all_gather_params":
            if self._stack.overlaps_gather:
                return 0.0
            updated = sizes.updated_weights * shards
            return self._replica_ring(all_gather_bytes(updated, shards), shards, stride=apart)
        return self._reduce_seconds(plan, sizes)

    def _apart(self, plan: Plan) -> int:
        """Replicas from one to the next of those that share a part of the state."""
        return self._plan.parallel.replicas // plan.parallel.replicas

    def overlapped_seconds(self, instruction: Instruction) -> float:
        """The part of an instruction's communication that overlaps with computation."""
        kind, layer, _ = instruction
        if layer is None:
            return 0.0
        if kind == "unshard_weights":
            return self.overlapped_gather_seconds(self._state_sizes[layer])
        if kind == "reduce_grads":
            return self.overlapped_reduce_seconds(self._state_sizes[layer])
        return 0.0

    def overlapped_gather_seconds(self, sizes: StateSizes) -> float:
        """The part of the all-gather of a layer's weights that overlaps with computation.

        On Windlass's own runtime a chunk starts all of its gathers before its first pass, and each
        layer waits for its own; those of offloaded shards block. On other stacks gathers block,
        except with `sharding.reshard`.
        """
        blocks = not self._is_own or self._plan.is_offloaded("parameters")
        if blocks or not self._has_communication_lane:
            return 0.0
        return self.state_seconds("unshard_weights", sizes)

    def overlapped_reduce_seconds(self, sizes: StateSizes) -> float:
        """The part of a layer's gradient reduction that overlaps with computation.

        On Windlass's own runtime the all-reduce among replicas that update the same shard always
        does, and the reduce-scatter before it on accelerators: gloo's computes on the host. Sums
        over tensor-parallel ranks block. Other stacks overlap all of it or nothing.
        """
        if not self._has_communication_lane:
            return 0.0
        parts = sizes.parts(self._plan)
        if not self._is_own:
            overlaps = self._stack.overlaps_reduction
            return sum(self._reduce_seconds(*part) for part in parts) if overlaps else 0.0
        reduced = sum(self._all_reduce_seconds(*part) for part in parts)
        if self.alternates_reductions:
            reduced += sum(self._scatter_seconds(*part) for part in parts)
        return reduced

    @cached_property
    def alternates_reductions(self) -> bool:
        """Whether a reduction starts only once the one before has ended.

        A reduce-scatter that runs beside the backward pass keeps the full gradient of its layer.
        Windlass's runtime lets only one do so at a time.
        """
        on_cores = self._machine.device.kind == "cpu"
        return self._is_own and not on_cores and self._plan.sharding.optimizer > 1

    @cached_property
    def _has_communication_lane(self) -> bool:
        """Whether collectives over replicas can run beside computation.

        Processes that share one host's cores need these cores for a reduction
        too: on 2 cores of an AMD EPYC, two of them take as long for a backward pass with
        overlapping reductions as for one after the other. Between hosts such a reduction costs no
        extra time.
        """
        parallel, machine = self._plan.parallel, self._machine
        on_cores = machine.device.kind == "cpu"
        within_host = parallel.replicas * parallel.tensor <= machine.devices_per_host
        if machine.execution_model != "overlapping" or (on_cores and within_host):
            return False
        return parallel.replicas > 1

    def pass_collective_seconds(self, collective: PassCollective) -> float:
        """Seconds of one collective inside a pass.

        Other stacks exchange keys and values beside attention, as `_context_seconds` says.
        """
        if not collective.sent_bytes:
            return 0.0
        one, fixed = self.pass_collective_cost(collective.kind, collective.axis)
        return collective.sent_bytes * one + fixed

    def pass_collective_cost(
        self, kind: CollectiveKind, axis: CollectiveAxis
    ) -> tuple[float, float]:
        """Seconds of each byte that a device sends in a collective inside a pass, and of the rest.

        Ranks that divide experts send each other `1 / e` of a buffer at once, so that of all links
        that they cross the slowest counts.
        """
        parallel, tensor = self._plan.parallel, self._plan.parallel.tensor
        rounds, fixed = 2 if kind == "all_reduce" else 1, 0.0
        if axis == "context" and not self._is_own:
            return 0.0, 0.0
        if axis == "experts":
            ranks, rounds = parallel.expert_degree, 1
            cost = all_to_all_cost(
                self._machine.links, ranks, stride=int(tensor), active_devices=self._active_devices
            )
        elif axis == "context":
            ranks = parallel.context or 1
            cost = self._ring(ranks, int(tensor))
        else:
            # The ranks of a row are neighbours; a column's ring reaches over all rows.
            ranks = group_size(tensor, axis)
            cost = self._ring(ranks, group_span(tensor, axis) // ranks)
            fixed = rounds * self._stack.collective_seconds * log2(ranks)
        return cost.byte_seconds, fixed + rounds * (ranks - 1) * cost.hop_seconds

    def gather_seconds(self, instruction: Instruction) -> float:
        """Seconds of communication that runs beside a pass: FSDP's and context parallelism's.

        With `sharding.reshard` a forward and a backward pass each gather the layer's parameters,
        and a backward pass scatters its gradients.
        """
        kind, layer, _ = instruction
        if layer is None or kind not in ("forward", "backward", "recompute"):
            return 0.0
        seconds = self._context_seconds(kind, layer)
        if self._plan.sharding.reshard and kind != "recompute":
            sizes, degree = self._state_sizes[layer], self._plan.sharding.parameters
            sent = all_gather_bytes(sizes.weights, degree)
            if kind == "backward":
                sent += all_gather_bytes(round(self._reduced(sizes.gradients)), degree)
            seconds += self._replica_ring(sent, degree)
        return seconds

    def _context_seconds(self, kind: InstructionKind, layer: int) -> float:
        """Seconds in which another stack passes keys and values on beside attention.

        They go from rank to rank around a ring, and once more in the backward pass. Windlass's own
        attention waits for them, so that they are collectives of its passes.
        """
        degree = self._plan.parallel.context or 1
        if degree == 1 or self._is_own:
            return 0.0
        times = 2 if kind == "backward" else 1
        cost = self._kinds[layer].cost(self._plan.precision, compiled=self._plan.compile)
        sent = round(times * exchanged_bytes(cost, self._plan))
        return self._ring_seconds(sent, degree, int(self._plan.parallel.tensor), times)

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return tuple(self._graph.shard(self._plan.parallel.tensor).layer_kinds())

    def _reduced(self, nbytes: float) -> float:
        """Bytes of gradients as replicas reduce them."""
        each = self._stack.reduce_bytes
        return nbytes if each is None else nbytes * each / self._plan.gradient_itemsize

    def _reduce_seconds(self, plan: Plan, sizes: StateSizes) -> float:
        """Seconds of the gradient reduction of a part of a layer.

        Gradients of weights that tensor-parallel ranks replicate are summed over these ranks, the
        whole is reduce-scattered within the optimizer's sharding group, and the shards are summed
        over the groups. With `sharding.reshard` the passes have scattered them already.
        """
        replicated = sum(
            self._tensor_parallel_ring(sent, axis, passes=2)
            for axis, sent in replicated_gradient_sums(sizes, plan)
        )
        scattered = self._scatter_seconds(plan, sizes)
        return replicated + scattered + self._all_reduce_seconds(plan, sizes)

    def _scatter_seconds(self, plan: Plan, sizes: StateSizes) -> float:
        """Seconds of the reduce-scatter of a gradient within the optimizer's sharding group.

        gloo has no reduce-scatter: each device copies what the others need and sums what arrives,
        `3 B + B / n` bytes read and written by its cores.
        """
        if plan.sharding.reshard:
            return 0.0
        degree, nbytes = plan.sharding.optimizer, round(self._reduced(sizes.gradients))
        sent = all_gather_bytes(nbytes, degree)
        seconds = self._replica_ring(sent, degree, stride=self._apart(plan))
        device = self._machine.device
        if degree > 1 and nbytes and device.kind == "cpu":
            moved = 3 * nbytes + nbytes // degree
            seconds += moved / device.traffic.at(moved)
        return seconds

    def _all_reduce_seconds(self, plan: Plan, sizes: StateSizes) -> float:
        """Seconds of the all-reduce of shards over the replicas that update the same one."""
        degree = plan.sharding.optimizer
        others = plan.parallel.replicas // degree
        sent = all_reduce_bytes(round(self._reduced(sizes.gradient_shard)), others)
        return self._replica_ring(sent, others, stride=degree * self._apart(plan), passes=2)

    def _tensor_parallel_ring(self, sent_bytes: int, axis: TensorAxis, *, passes: int) -> float:
        """Seconds of one ring of tensor-parallel ranks."""
        if not sent_bytes:
            return 0.0
        # The ranks of a row are neighbours; a column's ring reaches over all rows.
        degree = self._plan.parallel.tensor
        ranks = group_size(degree, axis)
        return self._ring_seconds(sent_bytes, ranks, group_span(degree, axis) // ranks, passes)

    def _replica_ring(
        self, sent_bytes: int, ranks: int, *, stride: int = 1, passes: int = 1
    ) -> float:
        """Seconds of one ring of data-parallel replicas.

        Args:
            sent_bytes: bytes that each device sends.
            ranks: devices in the ring.
            stride: replicas from one of them to the next; this many rings run side by side.
            passes: times that the buffer goes around.
        """
        if ranks == 1:
            return 0.0
        parallel = self._plan.parallel
        apart = parallel.tensor * (parallel.pipeline if self._stack.stages_adjacent else 1)
        return self._ring_seconds(sent_bytes, ranks, stride * apart, passes)

    def _ring_seconds(self, sent_bytes: int, ranks: int, stride: int, passes: int) -> float:
        """Seconds of one ring whose neighbours are `stride` devices from each other."""
        cost = self._ring(ranks, stride)
        return sent_bytes * cost.byte_seconds + passes * (ranks - 1) * cost.hop_seconds

    def _ring(self, ranks: int, stride: int) -> LinkCost:
        return self._ring_cost(ranks, stride=stride, active_devices=self._active_devices)

    def message_seconds(self, nbytes: float) -> float:
        """Seconds of a message to another stage."""
        cost = self.message_cost
        return nbytes * cost.byte_seconds + cost.hop_seconds + self._stack.message_seconds

    @cached_property
    def message_cost(self) -> LinkCost:
        """Cost of a message to another stage."""
        parallel, tensor = self._plan.parallel, int(self._plan.parallel.tensor)
        adjacent = self._stack.stages_adjacent
        return message_cost(
            self._machine.links,
            parallel.pipeline * tensor if adjacent else parallel.devices,
            active_devices=tensor if adjacent else parallel.replicas * tensor,
        )

    @property
    def _active_devices(self) -> int:
        """Neighbours among which rings lie: those of a stage, or of all if stages are adjacent."""
        parallel = self._plan.parallel
        if self._stack.stages_adjacent:
            return parallel.devices
        return parallel.replicas * int(parallel.tensor)
