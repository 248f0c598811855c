"""Lower bounds on memory and time of plans in phases, without their programs."""

from typing import NamedTuple

import numpy as np

from windlass.cost import ArrayClock, Floats, InstructionCosts, Ints, KnownCosts
from windlass.planner.space.phase_space import passes_key, state_key
from windlass.planner.space.phase_table import PhaseTable, sums_before
from windlass.program import (
    Instruction,
    InstructionKind,
    TierTraffic,
    plan_layer_sizes,
    plan_state_sizes,
    sparse_gradient_bytes,
    tied_owner_layers,
)
from windlass.schema import Graph, Plan


class LayerState(NamedTuple):
    """Bytes of model state of all layers before each, and of all, each `[layer + 1]`."""

    weights: Ints
    shards: Ints
    gradients: Ints

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> "LayerState":
        """The state of a plan; it depends on micro-batches only in that there are several."""
        sizes = plan_state_sizes(plan, graph)
        columns = [(each.weights, each.weight_shard, each.gradients) for each in sizes]
        return cls(*sums_before(np.array(columns).T))


class LayerPasses(NamedTuple):
    """Bytes that the passes of a micro-batch take, each `[layer]`."""

    output: Ints
    saved: Ints
    running: Ints
    """What runs backward takes beside weights, gradients, its input and output."""

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> "LayerPasses":
        """The passes of a plan; they do not depend on sharding, phases or how many there are."""
        sizes = plan_layer_sizes(plan, graph)
        columns = [(each.output, each.saved, each.saved + each.backward_peak) for each in sizes]
        return cls(*np.array(columns).T)


class PhaseMemory:
    """Lower bounds on device memory of plans that differ only in phases and what is offloaded.

    They leave out what the process itself takes.

    Args:
        plan: one of them.
        graph: the graph that they partition.
        state: sizes of its layers' model state.
        passes: what its layers' passes of a micro-batch take.
    """

    def __init__(self, plan: Plan, graph: Graph, state: LayerState, passes: LayerPasses) -> None:
        self._count, self._first_trained = plan.batch.accumulation, graph.first_trained
        self._owners = tied_owner_layers(graph)[-1]
        self._weights, self._shards = state.weights, state.shards
        self._output, self._saved, self._running = passes
        kinds = graph.shard(plan.parallel.tensor, loss=plan.loss).kinds
        rows = {name: sparse_gradient_bytes(plan, kind) for name, kind in kinds.items()}
        self._tied = state.gradients
        self._gradients = state.gradients + sums_before(
            [rows[kind.name] for kind in graph.layer_kinds()]
        )

    @classmethod
    def of(cls, plan: Plan, graph: Graph) -> "PhaseMemory":
        """The bounds of one plan and its kin."""
        return cls(plan, graph, LayerState.of(plan, graph), LayerPasses.of(plan, graph))

    def of_fullest_stage(self, table: PhaseTable, *, offloads_activations: bool) -> Ints:
        """Bytes of the fullest phase at its second or its last micro-batch but one, `[plan]`.

        While that runs backward all weights of the phase are there and its gradients are created,
        beside what never leaves. Every micro-batch waits with what the previous stage has sent and
        the outputs of the phases before; those that have not run backward, with what they left in
        this phase; those that have, with the gradient of what enters it.

        Args:
            table: the plans.
            offloads_activations: whether they offload activations too.
        """
        output, first_trained = self._output, self._first_trained
        plan, begin, end, first = table.plan, table.begin, table.end, table.stage_begin
        stays = table.waits & ~table.moves if offloads_activations else table.waits
        waiting = np.where(stays, output, 0) + np.where(table.saves, self._saved, 0)
        before = sums_before(waiting)
        received = np.where(first >= max(1, first_trained), output[first - 1], 0)
        if offloads_activations:
            received = np.where(table.recomputed[plan, first], 0, received)
        # The next phase leaves a gradient in place of the output that it took.
        ends_inside = end < table.stage_end
        leaving = np.where(ends_inside, output[end - 1] - waiting[plan, end - 1], 0)
        left = before[plan, end] - before[plan, begin] + leaving
        left += np.where(begin == first, received, waiting[plan, begin - 1])
        entering = np.where((begin > first) & (begin > first_trained), output[begin - 1], 0)
        earlier = np.where(
            begin > first, received + before[plan, begin - 1] - before[plan, first], 0
        )
        is_chunk = (begin == first) & (end == table.stage_end)
        earlier += table.before_on_device(np.where(is_chunk, left, 0))
        beside = np.where(table.stays, 0, self._staying(table) + self._count * earlier)
        beside += max(0, self._count - 2) * np.maximum(left, entering)
        # Nothing runs backward there, or each micro-batch right after its forward.
        beside[(end <= first_trained) | ((begin == first) & (end == len(output)))] = 0
        running = np.maximum.reduceat(self._running, begin)
        running[end == len(output)] = self._running_at_once(table)
        return table.most(self._state(begin, end) + running + beside)

    def _running_at_once(self, table: PhaseTable) -> Ints:
        """Bytes of a micro-batch that runs backward in the last phase of all, `[plan]`."""
        layers = np.arange(len(self._output))
        begin = table.begin[table.end == len(layers), None]
        kept = np.where(table.recomputed, 0, self._saved) + self._output
        is_inside = layers >= begin
        before = sums_before(np.where(is_inside & (layers >= self._first_trained), kept, 0))
        return np.asarray(np.where(is_inside, before[:, :-1] + self._running, 0).max(axis=1))

    def of_fullest_layer(self) -> int:
        """Bytes of the layer that needs most while it runs backward alone, as a phase at least."""
        layers = np.arange(len(self._output))
        return int((self._state(layers, layers + 1) + self._running).max())

    def offloaded_outputs(self, table: PhaseTable) -> Ints:
        """Bytes of its own and received outputs that all micro-batches offload, `[phase]`."""
        row, begin, output = table.plan, table.begin, self._output
        before = sums_before(np.where(table.moves, output, 0))
        takes = (begin == table.stage_begin) & (begin >= max(1, self._first_trained))
        received = np.where(takes & table.recomputed[row, begin], output[begin - 1], 0)
        return np.asarray(self._count * (before[row, table.end] - before[row, begin] + received))

    def _state(self, begin: Ints, end: Ints) -> Ints:
        """Weights and gradients of layers that are on the device together, `[phase]`."""
        held = self._weights[end] - self._weights[begin]
        if self._count > 1:
            held += self._gradients[end] - self._gradients[begin]
        return np.asarray(held)

    def _staying(self, table: PhaseTable) -> Ints:
        """Weights of the first phase of each phase's stage, with tied gradients, `[phase]`.

        Those the last layer has added to, whose backward comes first.
        """
        first, end = table.resident_begin, table.resident_end
        staying = self._shards[end] - self._shards[first]
        if self._count > 1:
            for owner in self._owners:
                adds = (table.stage_end == len(self._output)) & (first <= owner) & (owner < end)
                staying += np.where(adds, self._tied[owner + 1] - self._tied[owner], 0)
        return np.asarray(staying)


class PhasePrices:
    """Least seconds of what plans in phases do beside passes, found once for those with one state.

    Replicas exchange: sharded weights are gathered before a phase runs forward, and again before it
    runs backward unless it is the last; gradients are reduced once. A device does nothing else in
    the part that does not overlap. Tied weights may stay for another phase, so that they count
    once.

    Tiers transfer: with clipped gradients a layer's update waits for the next step, in which all
    updates come before any backward pass; the gradients leave before their norm is known. Layers
    outside a stage's first phase do so, and the weights of all outside its last come before they
    run backward. All pass one queue.

    Args:
        clock: prices plans of one model on one machine.
    """

    def __init__(self, clock: ArrayClock) -> None:
        self.clock, self.graph, self.machine = clock, clock.graph, clock.machine
        self._tiers = {tier.name: tier for tier in clock.machine.device.tiers}
        self._costs: dict[tuple[object, ...], KnownCosts] = {}
        self._exchanges: dict[tuple[object, ...], tuple[Floats, Floats, Floats]] = {}
        self._transfers: dict[tuple[object, ...], tuple[Floats, Floats, Floats]] = {}
        owners = [owner for owners in tied_owner_layers(clock.graph) for owner in owners]
        self._again = np.arange(clock.graph.layers) >= clock.graph.first_trained
        """Whether weights surely come again before a phase runs backward that is not the last."""
        self._again[owners] = False

    def costs(self, plan: Plan) -> InstructionCosts:
        """Costs of a plan's instructions, most of which plans in other phases share."""
        known = KnownCosts()
        if plan.parallel.virtual_stages == 1:  # phases decide on which stage a layer lies else
            key = *state_key(plan), *passes_key(plan), plan.offload
            known = self._costs.setdefault(key, known)
        return InstructionCosts(plan, self.graph, self.machine, known)

    def exchanges(self, plan: Plan) -> tuple[Floats, Floats, Floats]:
        """Seconds of all layers before each: in a step, again for phases but the last, reductions.

        All reductions of a stage follow each other, beside passes or not.

        Args:
            plan: what the plans share, offloaded to any tier.
        """
        key = state_key(plan)
        if key not in self._exchanges:
            gather = reduce = beside = np.zeros(self.graph.layers)
            if plan.parallel.replicas > 1 and self.machine.stack is None:
                gather, reduce, beside = self.clock.exchange_seconds(plan)
            again = np.where(self._again, gather, 0.0)
            once, again, reduce = sums_before((gather + reduce - beside, again, reduce))
            self._exchanges[key] = once, again, reduce
        return self._exchanges[key]

    def transfers(self, plan: Plan) -> tuple[Floats, Floats, Floats]:
        """Seconds of updates, of gradients and of weights of all layers before each.

        Args:
            plan: what the plans share, offloaded to a tier.
        """
        key = *state_key(plan), plan.offload.parameters
        if key not in self._transfers:
            traffic, kinds = TierTraffic(plan, self.graph), tuple(self.graph.layer_kinds())
            lasts = {kind.name: layer for layer, kind in enumerate(kinds)}

            def seconds(kind: InstructionKind) -> Floats:
                times: dict[str, float] = {}
                # The last layer of a kind is in the first phase only if all of them are.
                for name, layer in lasts.items():
                    each = traffic.instruction_traffic(Instruction(kind, layer))
                    moves = plan.defers_updates and self.graph.kinds[name].trained_count
                    times[name] = sum(
                        self._tiers[tier].transfer_seconds(*moved)
                        for tier, moved in (each.items() if moves else ())
                    )
                return np.array([times[each.name] for each in kinds])

            weights = np.where(self._again, seconds("prefetch_weights"), 0.0)
            update, gradients, weights = sums_before(
                (seconds("update"), seconds("offload_grads"), weights)
            )
            self._transfers[key] = update, gradients, weights
        return self._transfers[key]


def chunked_seconds(plan: Plan, clock: ArrayClock) -> float:
    """Least seconds of a step in which each phase is a model chunk, by the order of its passes.

    A device runs all micro-batches of a chunk, one after the other, before those of its next one,
    and each as soon as the chunk before has sent it. Memory tiers and replicas delay nothing here.
    On a bulk-synchronous machine both ends of a message wait for it.
    """
    forward, recompute, first, later = clock.pass_seconds(plan)
    sent, ranks, count = (
        clock.message_seconds(plan),
        plan.parallel.pipeline,
        plan.batch.accumulation,
    )
    waits = clock.machine.execution_model == "bulk-synchronous"
    table = PhaseTable.of(plan, (plan.stages,), clock.graph)
    again = np.where(table.recomputed[0], recompute, 0.0)
    ends, arrivals, trained = np.zeros(ranks), np.zeros(count), clock.graph.first_trained
    chunks = tuple(zip(table.begin.tolist(), table.end.tolist(), strict=True))

    def visit(chunk: int, seconds: Floats, takes: float, sends: float) -> Floats:
        """When each micro-batch comes to the next chunk, `[micro-batch]`."""
        busy = takes + sends if waits else 0.0
        before = np.cumsum(seconds + busy)
        late = np.maximum.accumulate(arrivals - (takes if waits else 0.0) - before + seconds + busy)
        left = before + np.maximum(late, ends[chunk % ranks])
        ends[chunk % ranks] = left[-1]
        return np.asarray(left if waits else left + sends)

    for chunk, (begin, end) in enumerate(chunks[:-1]):
        seconds = np.full(count, forward[begin:end].sum())
        takes = sent[begin - 1] if begin else 0.0
        arrivals = visit(chunk, seconds, takes, sent[end - 1])
    for chunk, (begin, end) in reversed(tuple(enumerate(chunks))):
        if end <= trained:
            break
        own, is_last = slice(max(begin, trained), end), chunk == len(chunks) - 1
        seconds = np.full(count, (again[own] + later[own]).sum())
        seconds[0] += (first[own] - later[own]).sum()
        seconds += forward[begin:end].sum() if is_last else 0.0
        takes, sends = sent[begin - 1] if is_last else sent[end - 1], 0.0
        if begin > trained:
            sends = sent[begin - 1]
        arrivals = visit(chunk, seconds, takes, sends)
    return float(ends.max())


def min_step_seconds(
    plan: Plan, table: PhaseTable, prices: PhasePrices, outputs: Floats | None = None
) -> Floats:
    """Least seconds of a step: one way through all stages, or the passes of its slowest, `[plan]`.

    The way: a stage sends nothing on before all micro-batches have passed all of its phases but the
    last, and nothing back before they have passed all but the first backward. Where each phase is a
    model chunk it is that of one micro-batch, after all others in the slowest chunk, and a device
    waits for one micro-batch to pass the first chunks of those before it, and back.

    Args:
        plan: what the plans share.
        table: the plans.
        prices: what they do beside their passes, and the clock.
        outputs: seconds in which activations are offloaded and come back, `[phase]`; None means
            that they stay.
    """
    row, begin, end, count = table.plan, table.begin, table.end, plan.batch.accumulation
    times = prices.clock.pass_seconds(plan)
    forward, _, first, backward = sums_before(times)
    again = sums_before(np.where(table.recomputed, times[1], 0.0))
    onward = count * (forward[end] - forward[begin])
    back = first[end] - first[begin] + (count - 1) * (backward[end] - backward[begin])
    back += count * (again[row, end] - again[row, begin])
    is_on_way = (end < table.stage_end) | (table.stage_end == times.shape[1])
    is_on_way_back = (begin > table.stage_begin) | (table.stage_begin == 0)
    way = np.where(is_on_way, onward, 0.0) + np.where(is_on_way_back, back, 0.0)
    once, gathered_again, reductions = (sums[end] - sums[begin] for sums in prices.exchanges(plan))
    stages = table.by_device(onward + back + once + np.where(table.turns, 0.0, gathered_again))
    one_way = forward[end] - forward[begin] + again[row, end] - again[row, begin]
    one_way += np.minimum(first[end] - first[begin], backward[end] - backward[begin])
    first_chunk = table.stays & (begin == table.stage_begin) & (end == table.stage_end)
    fill = table.by_device(np.where(first_chunk, one_way, 0.0))
    stages += np.cumsum(fill, axis=1) - fill
    updates, gradients, weights = (sums[end] - sums[begin] for sums in prices.transfers(plan))
    moved = np.where(table.stays, 0.0, updates + gradients) + np.where(table.turns, 0.0, weights)
    moving = table.by_device(moved if outputs is None else moved + outputs)
    if prices.clock.machine.overlaps_transfers:
        late = table.by_device(np.where(table.stays, 0.0, updates) + back)
        stages = np.maximum(np.maximum(stages, late), moving)
    else:
        stages += moving
    stages = np.maximum(stages, table.by_device(reductions))
    way = np.bincount(row, way, len(table.stages))
    if plan.parallel.schedule == "interleaved":
        slowest = np.maximum(onward / count, backward[end] - backward[begin])
        way = np.bincount(row, one_way, len(table.stages)) + (count - 1) * table.most(slowest)
    return np.asarray(np.maximum(way, stages.max(axis=1)))
