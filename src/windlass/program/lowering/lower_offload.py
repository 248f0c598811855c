"""Weight streaming: lowers a stage whose weights are offloaded between their uses.

Forward runs phase by phase: all micro-batches run through one phase while the weights of the next
are prefetched. Backward runs in reverse: while a phase computes, the weights of the one before it
are prefetched, and each layer's gradient is offloaded as soon as its last micro-batch has added to
it. So weights are transferred once in each direction of a step, however many micro-batches it has.
In a pipeline every stage does so: its first phase receives each micro-batch from the previous
stage, its last phase sends it on. Where a stage has several model chunks, each receives and sends,
and is a phase: all stages run one phase of theirs at a time, each a few micro-batches behind the
one before, and none waits for all phases of another.

Where replicas share weights, each prefetches its shard. A phase unshards its layers as it begins,
so that only one phase is unsharded at a time, beside the shards of the next.

A layer's micro-batches add to its gradient in the same order as without offloading, so that the
sums are equal bit for bit. The exception are layers of two phases that share a tied weight: without
offloading they alternate, here all micro-batches of the later layer come first.

With gradient clipping the norm is known only at the end of a step. Layers that are offloaded by
then are updated at their first prefetch in the next step, or by `flush_deferred_updates` if there
is none.

Source: the order of passes is that of Pudipeddi et al. 2020, L2L, arXiv:2002.05645, with phases in
place of single layers.
"""

from collections.abc import Iterable, Iterator

from windlass.program.device_mesh import chunks_of_stage
from windlass.program.instruction import Instruction
from windlass.program.lowering.insert_collectives import CollectiveInserter
from windlass.program.phases import (
    backward_needs,
    deferred_update_layers,
    offloaded_activation_layers,
    offloaded_gradient_layers,
    phase_needs,
    phases_of_stage,
    resident_layers,
    trained_layers,
)
from windlass.schema import Graph, Plan

_Instructions = tuple[Instruction, ...]

_SHARD_KINDS = ("prefetch_weights", "update", "free_shard")
"""What brings a layer's shard into device memory, and what frees it."""


def lower_offloaded_stage(
    plan: Plan, graph: Graph, stage: int
) -> tuple[_Instructions, _Instructions]:
    """The instructions of one step of a stage, and those that flush its deferred updates.

    Args:
        plan: a valid plan with offloaded parameters.
    """
    lowering = _OffloadedStage(plan, graph, stage)
    return tuple(lowering.step()), tuple(lowering.flush_deferred_updates())


class _OffloadedStage:
    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self._plan = plan
        self._phases = phases_of_stage(plan, stage)
        self._last = len(self._phases) - 1
        self._layers = graph.layers
        self._begins = frozenset(plan.stages[i].first_layer for i in chunks_of_stage(plan, stage))
        """Layers that take what another stage sends, but for the model's first."""
        self._ends = frozenset(plan.stages[i].end_layer for i in chunks_of_stage(plan, stage))
        self._has_loss = graph.layers in self._ends
        """Whether the stage ends the model: then the last phase's backward follows at once."""
        chunks_take_turns = all(len(each.phases) == 1 for each in plan.stages)
        self._lag = min(plan.parallel.pipeline, plan.batch.accumulation) - 1
        """Passes by which the stage at the other end of the pipeline is behind."""
        self._is_first = chunks_take_turns and stage == 0 and self._last > 0
        self._is_last = chunks_take_turns and self._has_loss and self._last > 0
        self._micro_batches = range(plan.batch.accumulation)
        self._needs = phase_needs(plan, graph, stage)
        self._trained = trained_layers(plan, graph, stage)
        self._resident = resident_layers(plan, graph, stage)
        self._deferred = deferred_update_layers(plan, graph, stage)
        self._offloaded_gradients = frozenset(offloaded_gradient_layers(plan, graph, stage))
        self._offloaded_outputs = frozenset(offloaded_activation_layers(plan, graph, stage))
        self._first_trained = graph.first_trained
        ends = [end for _, end in self._phases]
        self._lowest = sum(end <= graph.first_trained for end in ends)
        """The first phase that has a backward pass; one more than there are if none has."""
        self._inserter = CollectiveInserter(plan, graph, stage)
        self._recomputed = self._inserter.tensors.recomputed_layers
        self._shards_weights = plan.sharding.parameters > 1
        self._backward_uses = backward_needs(plan, graph, stage)
        """The layers whose weights each phase's backward passes use, [phase][layer]."""

    def step(self) -> Iterator[Instruction]:
        """The instructions of one step."""
        instructions = tuple(self._passes_and_updates())
        yield from instructions
        for layer in self._missing_shards(instructions):
            yield Instruction("prefetch_weights", layer)
        yield Instruction("sync")

    def _passes_and_updates(self) -> Iterator[Instruction]:
        yield from self._inserter.insert((*self._all_forward(), *self._all_backward()))
        if self._plan.clip:
            yield Instruction("grad_norm")
        for layer in self._trained:
            if layer not in self._offloaded_gradients:
                yield Instruction("update", layer)
                yield from self._inserter.all_gather_params(layer)

    def _missing_shards(self, instructions: _Instructions) -> Iterator[int]:
        """The layers of the first phase whose shards are gone after the last pass.

        An update brings a shard back, and frozen layers have none.
        """
        last = {layer: kind for kind, layer, _ in instructions if kind in _SHARD_KINDS}
        yield from (layer for layer in self._resident if last.get(layer) == "free_shard")

    def flush_deferred_updates(self) -> Iterator[Instruction]:
        """The deferred updates, one layer at a time beside the first phase's weights."""
        for layer in self._deferred:
            yield Instruction("update", layer)
            yield from self._inserter.all_gather_params(layer)
            yield self._inserter.free(layer)

    def _all_forward(self) -> Iterator[Instruction]:
        used = set[int]()
        for phase in range(self._last + 1):
            if phase < self._last:
                for layer in self._only(phase + 1, phase):
                    is_due = layer in self._deferred and layer not in used
                    yield Instruction("update" if is_due else "prefetch_weights", layer)
            yield from self._begin_phase(phase, used)
            if phase == self._last and self._has_loss:
                return
            for micro_batch in self._micro_batches:
                yield from self._forward(phase, micro_batch)
                yield from self._receive_ahead(phase, micro_batch)
            if phase < self._last:
                later = (*self._needs[phase + 1 :], *self._backward_uses)
                yield from self._free(self._used_again(self._only(phase, phase + 1), later))

    def _begin_phase(self, phase: int, used: set[int]) -> Iterator[Instruction]:
        """Unshards a phase's weights; on first use completes their update and sends tied weights.

        An update runs in the background of the phase before, so that its parts are all-gathered
        only now.
        """
        layers = self._only(phase, phase - 1) if phase else self._needs[0]
        first_used = [layer for layer in layers if layer not in used]
        for layer in first_used:
            if layer in self._deferred:
                yield from self._inserter.all_gather_params(layer)
        yield from self._inserter.unshard(layers)
        yield from self._inserter.send_tied_weights(first_used)
        used.update(layers)

    def _all_backward(self) -> Iterator[Instruction]:
        if self._lowest > self._last:
            for layer in self._only(0, self._last):
                yield Instruction("prefetch_weights", layer)
            yield from self._free(self._used_again(self._only(self._last, 0), ()))
        for phase in reversed(range(self._lowest, self._last + 1)):
            if phase > 0:
                for layer in reversed(self._prefetched_below(phase)):
                    yield Instruction("prefetch_weights", layer)
            if phase < self._last:
                used = self._backward_uses[phase]
                unsharded = (layer for layer in self._only(phase, phase + 1) if layer in used)
                yield from self._inserter.unshard(reversed([*unsharded]))
            for micro_batch in self._micro_batches:
                if phase == self._last and self._has_loss:
                    # Forward runs right before backward here, so that nothing has to be saved.
                    yield from self._forward(phase, micro_batch)
                yield from self._backward(phase, micro_batch)
                yield from self._receive_ahead(phase, micro_batch, backward=True)
            if phase > 0:
                yield from self._free(self._freed_after_backward(phase))

    def _prefetched_below(self, phase: int) -> tuple[int, ...]:
        """The layers that come while a phase runs backward.

        Shards that no backward pass unshards come only for the first phase, which keeps them.
        """
        below = self._below(phase)
        layers = self._only(below, phase)
        if not self._shards_weights or below == 0:
            return layers
        return tuple(layer for layer in layers if layer in self._backward_uses[below])

    def _below(self, phase: int) -> int:
        """The phase whose weights are there once a phase has run backward.

        Below the lowest one that does, that is the first, which begins the next step.
        """
        return phase - 1 if phase > self._lowest else 0

    def _freed_after_backward(self, phase: int) -> tuple[int, ...]:
        """The layers that are freed after a phase's backward passes."""
        layers = self._only(phase, self._below(phase))
        return self._used_again(layers, self._backward_uses[:phase])

    def _used_again(
        self, layers: tuple[int, ...], later: Iterable[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Layers to free here, among those that are no longer needed for now.

        Where weights are sharded these are the layers that are used again later in the step; the
        others were freed at their last use.
        """
        if not self._shards_weights:
            return layers
        again = {layer for used in later for layer in used}
        return tuple(layer for layer in layers if layer in again)

    def _only(self, phase: int, other: int) -> tuple[int, ...]:
        """The layers that one phase needs and the other does not."""
        return tuple(layer for layer in self._needs[phase] if layer not in self._needs[other])

    def _free(self, layers: Iterable[int]) -> Iterator[Instruction]:
        for layer in layers:
            yield Instruction("free_weights", layer)

    def _receive_ahead(
        self, phase: int, micro_batch: int, *, backward: bool = False
    ) -> Iterator[Instruction]:
        """What the stage at the other end has sent by now for the phase after.

        It is a few passes behind this one. Unless each is taken as it comes, it waits there.
        """
        if not (self._is_last if backward else self._is_first):
            return
        before, micro_batch = divmod(micro_batch - self._lag, len(self._micro_batches))
        taking = phase - before - 1 if backward else phase + before + 1
        if self._lowest <= taking < self._last if backward else 0 < taking <= self._last:
            message = self._output(taking) if backward else self._input(taking)
            if message is not None:
                yield Instruction("receive", message, micro_batch)

    def _input(self, phase: int) -> int | None:
        """The layer whose output a phase takes from another stage; None if it takes none."""
        first, _ = self._phases[phase]
        return first - 1 if first in self._begins and first > 0 else None

    def _output(self, phase: int) -> int | None:
        """The layer whose output a phase sends to another stage; None if it sends none."""
        _, end = self._phases[phase]
        return end - 1 if end in self._ends and end < self._layers else None

    def _forward(self, phase: int, micro_batch: int) -> Iterator[Instruction]:
        first, end = self._phases[phase]
        takes_targets = self._has_loss and phase == self._last and 0 not in self._begins
        if first == 0 or takes_targets:
            yield Instruction("load_batch", None, micro_batch)
        if (before := self._input(phase)) is not None and not self._is_first:
            yield Instruction("receive", before, micro_batch)
        for layer in range(first, end):
            yield Instruction("forward", layer, micro_batch)
            if layer - 1 in self._offloaded_outputs:
                yield Instruction("offload_activation", layer - 1, micro_batch)
        if (after := self._output(phase)) is not None:
            yield Instruction("send", after, micro_batch)

    def _backward(self, phase: int, micro_batch: int) -> Iterator[Instruction]:
        first, end = self._phases[phase]
        if (after := self._output(phase)) is not None and not self._is_last:
            yield Instruction("receive", after, micro_batch)
        for layer in reversed(range(max(first, self._first_trained), end)):
            if layer - 1 in self._offloaded_outputs:
                yield Instruction("reload_activation", layer - 1, micro_batch)
            if layer in self._recomputed:
                yield Instruction("recompute", layer, micro_batch)
            yield Instruction("backward", layer, micro_batch)
        if (before := self._input(phase)) is not None and first > self._first_trained:
            yield Instruction("send", before, micro_batch)
