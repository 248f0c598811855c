"""Step walk: one step of a batch of plans, level by level of their passes.

Each stage has a lane for computation, one for messages, one for gathers of weights, one for
gradient reductions and one for transfers of optimizer state, as in the event simulator. All plans
of a batch run the same passes in the same order, so a lane's time is an array over plans.

Most passes only take time. In the first forward pass of a model chunk weights are gathered, tied
weights arrive, and layers wait for updates of the step before; in its last backward pass gradients
are reduced, and those of tied weights leave. There the layers are walked one by one.
"""

from typing import NamedTuple, Self

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.clock.pass_arrays import PassArrays
from windlass.cost.clock.plan_batch import PlanBatch
from windlass.cost.clock.schedule_levels import FORWARD, EdgePass, Level, schedule_levels
from windlass.program import InstructionKind

EXCHANGE_WAITS: tuple[InstructionKind, ...] = ("forward", "send_tied_weights", "reduce_grads")
"""Instructions that wait for a gather or for a reduction that runs beside the passes."""


class StageEnds(NamedTuple):
    """Seconds from the start of a step, `[stage, plan]`."""

    end: Floats
    """When a stage has ended its step."""
    passed: Floats
    """When it has ended its passes."""
    met: Floats
    """When it begins the gradient norm, once all are there, or else its updates."""
    waited: Floats
    """How long it has waited for updates of offloaded state of the step before."""
    exchanged: Floats
    """How long instructions of `EXCHANGE_WAITS` have waited for collectives beside the passes,
    `[kind, stage, plan]`."""

    def line(self, more: Self, times: Floats) -> "StageEnds":
        """A line through these and those of a longer step, `times` their distance from here."""
        return StageEnds(
            *(low + times * (high - low) for low, high in zip(self, more, strict=True))
        )


def stage_ends(
    batch: PlanBatch, passes: PassArrays, microbatches: int, *, clips: bool
) -> StageEnds:
    """When each stage ends a step of so many micro-batches.

    Where optimizer state is offloaded, its updates overlap with the next step: the second of two
    steps counts.

    Args:
        microbatches: micro-batches of the step.
        clips: whether updates wait for the global gradient norm.
    """
    walk = _StepWalk(batch, passes, microbatches, None)
    ends = walk.ends(clips=clips)
    if not batch.offloads.any():
        return ends
    ready = np.where(batch.offloads, walk.updated - ends.end.max(axis=0), -np.inf)
    return _StepWalk(batch, passes, microbatches, ready).ends(clips=clips)


class _StepWalk:
    """The lanes of all stages in one step.

    Args:
        microbatches: micro-batches of the step.
        ready: time at which each layer's update of the step before has ended, `[layer, plan]`; None
            if there was no step before.
    """

    def __init__(
        self, batch: PlanBatch, passes: PassArrays, microbatches: int, ready: Floats | None
    ) -> None:
        self._batch, self._layout, self._passes = batch, batch.layout, passes
        self._ready, self._microbatches = ready, microbatches
        schedule = schedule_levels(
            batch.shape._replace(microbatches=microbatches), batch.layout.forward_chunks
        )
        self._levels = schedule.levels
        stages, plans = batch.shape.pipeline, batch.columns.count
        self._now, self._sent, self._reduced, self._gathered = np.zeros((4, stages, plans))
        """Times at which a stage has computed, sent, reduced and gathered all so far,
        `[stage, plan]`."""
        self._waited = np.zeros((stages, plans))
        self._exchanged = np.zeros((len(EXCHANGE_WAITS), stages, plans))
        """How long a stage has waited for collectives beside its passes, as in `StageEnds`."""
        self._layer_reduced = np.zeros((batch.columns.layers, plans))
        """Time at which all reductions up to that of a layer have ended, `[layer, plan]`."""
        self._layer_gathered = np.zeros((batch.columns.layers, plans))
        """Time at which each layer's weights have been gathered, `[layer, plan]`."""
        self._came = np.zeros((schedule.slots, plans))
        """Arrival of the message in each slot."""
        self._tied_weights, self._tied_gradients = np.zeros((2, len(batch.tied), plans))
        """Arrival of tied weights, and of their gradients."""
        self.updated = np.full((batch.columns.layers, plans), -np.inf)
        """End of each layer's update of offloaded state, `[layer, plan]`."""

    def ends(self, *, clips: bool) -> StageEnds:
        """When each stage ends the step."""
        batch = self._batch
        self._send_tied_weights(None)
        for level in self._levels:
            if level.rows.size:
                self._pass_level(level)
            for edge in level.edges:
                if edge.kind == FORWARD:
                    self._first_forward(edge)
                else:
                    self._last_backward(edge)
        for place, tied in enumerate(batch.tied):
            if not self._layout.trains[tied.owner]:
                self._add_tied_gradient(place, self._layout.stage_of[tied.owner])
        if clips:
            met = np.maximum(self._now, self._reduced).max(axis=0)
            end = self._update(met + self._batch.norm, waits=False)
            met = np.broadcast_to(met, end.shape)
            return StageEnds(end, self._now, met, self._waited, self._exchanged)
        end = self._update(self._now, waits=bool((self._reduced > self._now).any()))
        return StageEnds(end, self._now, self._now, self._waited, self._exchanged)

    def _pass_level(self, level: Level) -> None:
        """Runs passes that do not wait for each other."""
        batch, passes, now = self._batch, self._passes, self._now[level.stages]
        if level.loads.size:
            now[level.loads] += batch.load
        if batch.bulk_synchronous:
            now += passes.received.take(level.rows, 0)
        begin = np.maximum(now, self._came.take(level.needs, 0))
        begin += passes.durations.take(level.rows, 0)
        self._now[level.stages] = begin
        if level.senders.size:
            sent = np.maximum(self._sent[level.sender_stages], begin.take(level.senders, 0))
            sent += passes.sending.take(level.sender_rows, 0)
            self._came[level.sends] = self._sent[level.sender_stages] = sent
            if batch.bulk_synchronous:
                self._now[level.sender_stages] = sent

    def _first_forward(self, edge: EdgePass) -> None:
        """Runs the first forward pass of a chunk, once its weights are there."""
        batch, chunk, stage = self._batch, edge.chunk, edge.chunk % self._batch.shape.pipeline
        self._gather(chunk, stage)
        self._send_tied_weights(chunk)
        now = self._now[stage]
        if chunk in (0, batch.shape.chunks - 1):
            now = now + batch.load
        if edge.needs:
            now = self._receive(now, batch.messages[chunk - 1], self._came[edge.needs])
        users = {tied.user: place for place, tied in enumerate(batch.tied)}
        for layer in self._layout.chunks[chunk]:
            if layer in users:
                place = users[layer]
                arrival = self._tied_weights[place]
                now = self._receive(now, batch.tied[place].weights, arrival)
            if self._ready is not None:
                for target in self._layout.targets[layer]:
                    now = self._updated(stage, now, self._ready[target])
            for target in self._layout.targets[layer] if batch.gathers else ():
                now = self._later("forward", stage, now, self._layer_gathered[target])
            now = now + self._passes.forward[layer]
        self._now[stage] = now
        if edge.sends:
            self._came[edge.sends] = self._send(stage, batch.messages[chunk])

    def _gather(self, chunk: int, stage: int) -> None:
        """Gathers weights that a chunk is the first of its stage to use."""
        batch = self._batch
        if not batch.gathers:
            return
        for layer in self._layout.needs[chunk]:
            if self._ready is not None:
                ready = np.where(batch.is_sharded, self._ready[layer], -np.inf)
                self._now[stage] = self._updated(stage, self._now[stage], ready)
            whole, overlapped = batch.state.gather[layer], batch.state.gather_overlapped[layer]
            ended = np.maximum(self._now[stage], self._gathered[stage]) + whole
            ended = np.where(overlapped > 0, ended, self._gathered[stage])
            self._gathered[stage] = self._layer_gathered[layer] = ended
            self._now[stage] += whole - overlapped

    def _send_tied_weights(self, chunk: int | None) -> None:
        """Sends tied weights to the stages that use them, once they are whole.

        Args:
            chunk: the chunk whose weights have been gathered; None for weights that are always
                whole, which leave as the step begins.
        """
        batch = self._batch
        for place, tied in enumerate(batch.tied):
            if chunk is not None and tied.owner not in self._layout.needs[chunk]:
                continue
            stage = self._layout.stage_of[tied.owner]
            leaves = batch.is_sharded == (chunk is not None)
            now, sent = self._now[stage].copy(), self._sent[stage].copy()
            if self._ready is not None:
                ready = np.where(leaves, self._ready[tied.owner], -np.inf)
                self._now[stage] = self._updated(stage, now, ready)
            gathered = np.where(leaves, self._layer_gathered[tied.owner], 0.0)
            begin = self._later("send_tied_weights", stage, self._now[stage], gathered)
            self._now[stage] = begin
            arrival = self._send(stage, tied.weights)
            self._tied_weights[place] = np.where(leaves, arrival, self._tied_weights[place])
            self._now[stage] = np.where(leaves, self._now[stage], now)
            self._sent[stage] = np.where(leaves, self._sent[stage], sent)

    def _last_backward(self, edge: EdgePass) -> None:
        """Runs the last backward pass of a chunk, and reduces its gradients.

        Stages before it wait for the gradient of the chunk's input, so that leaves first; only with
        a single micro-batch, or if no stage waits, each layer's gradient is reduced at once.
        """
        batch, chunk, stage = self._batch, edge.chunk, edge.chunk % self._batch.shape.pipeline
        layers, (first, later) = self._layout.chunks[chunk], batch.sums
        seconds = self._passes.weight if batch.splits else self._passes.backward
        added = first if self._microbatches == 1 else later
        at_once = self._microbatches == 1 or not edge.sends
        if edge.needs:
            self._now[stage] = self._receive(
                self._now[stage], batch.messages[chunk], self._came[edge.needs]
            )
        for layer in reversed(layers):
            self._now[stage] += seconds[layer] + added[layer]
            for place, tied in enumerate(batch.tied):
                if tied.user == layer:
                    self._tied_gradients[place] = self._send(stage, tied.gradients)
            if at_once:
                self._reduce(layer, stage)
        if edge.sends:
            self._came[edge.sends] = self._send(stage, batch.messages[chunk - 1])
        for layer in reversed(layers) if not at_once else ():
            self._reduce(layer, stage)

    def _reduce(self, layer: int, stage: int) -> None:
        """Adds the gradient of tied weights and reduces that of a layer over replicas."""
        batch = self._batch
        for place, tied in enumerate(batch.tied):
            if tied.owner == layer and self._layout.trains[layer]:
                self._add_tied_gradient(place, stage)
        if batch.reduces:
            whole, overlapped = batch.state.reduce[layer], batch.state.overlapped[layer]
            before = np.where(batch.state.alternates[layer] > 0, self._reduced[stage], 0.0)
            self._now[stage] = self._later("reduce_grads", stage, self._now[stage], before)
            ended = np.maximum(self._now[stage], self._reduced[stage]) + whole
            ended = np.where(overlapped > 0, ended, self._reduced[stage])
            self._reduced[stage] = self._layer_reduced[layer] = ended
            self._now[stage] += whole - overlapped

    def _add_tied_gradient(self, place: int, stage: int) -> None:
        """Receives the gradient of tied weights and adds it to that of their owner."""
        tied, arrival = self._batch.tied[place], self._tied_gradients[place]
        now = self._receive(self._now[stage], tied.gradients, arrival)
        self._now[stage] = now + tied.adding

    def _update(self, now: Floats, *, waits: bool) -> Floats:
        """End of all updates of each stage, `[stage, plan]`.

        Args:
            now: when each stage begins.
            waits: whether a layer's gradient may be reduced only later.
        """
        batch, state = self._batch, self._batch.state
        if not waits and not batch.offloads.any():
            return np.asarray(now + self._layout.by_stage(state.update + state.spread))
        overlaps = batch.machine.overlaps_transfers
        shares_cores = batch.machine.device.kind == "cpu"
        ends = now.copy()
        for stage, layers in enumerate(self._layout.stages):
            at = idle = now[stage]
            for layer in layers:
                if not self._layout.owned[layer]:
                    continue
                if waits:
                    own = np.where(state.overlapped[layer] > 0, self._layer_reduced[layer], 0.0)
                    at = np.maximum(at, own)
                work = state.update[layer]
                begun = np.maximum(at, idle)
                at = np.where(batch.offloads & ~batch.scatters & shares_cores, begun, at)
                idle = begun + np.maximum(work, state.moving[layer])
                beside = at + work if shares_cores else at
                offloaded = np.where(batch.scatters, idle, beside if overlaps else idle)
                self.updated[layer] = idle
                at = np.where(batch.offloads, offloaded, at + work) + state.spread[layer]
            ends[stage] = at
        return ends

    def _later(self, kind: InstructionKind, stage: int, now: Floats, exchanged: Floats) -> Floats:
        """Time at which a stage that is free at `now` finds an exchange beside its passes ended."""
        later = np.maximum(now, exchanged)
        self._exchanged[EXCHANGE_WAITS.index(kind), stage] += later - now
        return np.asarray(later)

    def _updated(self, stage: int, now: Floats, ready: Floats) -> Floats:
        """Time at which a stage that is free at `now` finds a layer updated."""
        later = np.maximum(now, ready)
        self._waited[stage] += later - now
        return np.asarray(later)

    def _receive(self, now: Floats, seconds: Floats, arrival: Floats) -> Floats:
        """Time at which a stage that is free at `now` has received a message."""
        ready = now + seconds if self._batch.bulk_synchronous else now
        return np.asarray(np.maximum(ready, arrival))

    def _send(self, stage: int, seconds: Floats) -> Floats:
        """Sends a message from a stage as it is, and returns when it arrives."""
        sent = np.maximum(self._sent[stage], self._now[stage]) + seconds
        self._sent[stage] = sent
        if self._batch.bulk_synchronous:
            self._now[stage] = sent
        return np.asarray(sent)
