"""Least bytes: a lower bound on the device memory of each stage, without its program.

No stage holds less at its peak than at any one moment. The moments looked at are each layer's
backward pass in a few micro-batches: the first, before there are gradients; the one in which most
micro-batches wait for theirs; and the last. The program's own count (`program.memory`) is exact.
"""

from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.clock.layer_bytes import ActivationBytes, LayerBytes, StateBytes
from windlass.cost.clock.plan_batch import PlanBatch, distinct
from windlass.cost.clock.plan_columns import PlanColumns
from windlass.cost.clock.stage_moments import Moment, moments
from windlass.program import STAGING_BYTES


class _Sizes(NamedTuple):
    """Bytes of each layer, `[layer, plan]`."""

    plain: ActivationBytes
    selective: ActivationBytes
    """The same if it is recomputed selectively."""
    gradients: Floats
    """Whole gradients, with rows that wait to be added."""
    shards: Floats
    """What is left of them once they are reduced."""
    made: Floats
    """Gradients that a layer's first backward pass makes; as `gradients` but for tied weights."""
    made_shards: Floats
    """What is left of those once the layer's own are reduced."""
    gathered: Floats
    """Whole weights where only a part of them stays between steps, and tied ones of another stage;
    both are freed after their last use."""
    sent: Floats
    """Gradients of those tied weights, which are freed then too."""


class _Running(NamedTuple):
    """A moment, and what does not depend on recompute while its layers run."""

    moment: Moment
    layers: Ints
    """The layers that it runs."""
    starts: Ints
    """Where those of each stage begin."""
    stages: Ints
    """The stages, in this order."""
    plain: Floats
    """Bytes beyond what the stage always holds, `[layer, plan]`."""
    selective: Floats
    """The same if the layer is recomputed selectively."""
    live: Floats
    """Micro-batches of each chunk that wait for their backward pass, `[chunk, plan]`."""


class LeastBytes:
    """Lower bounds on the memory of plans that differ in recompute.

    Args:
        layers: bytes of their layers.
    """

    def __init__(self, batch: PlanBatch, layers: LayerBytes) -> None:
        self._batch, self._layout, self._layers = batch, batch.layout, layers
        each = [batch.prices.example_bytes(config) for config in batch.columns.configs]
        self._tokens = np.array(each, dtype=np.float64)[batch.columns.config] * batch.columns.micro

    @property
    def state(self) -> Floats:
        """Bytes of model state that no recompute saves, never above those of `of`, `[plan, stage]`.

        They are weights, optimizer state and shards of gradients, which an update needs.
        """
        return self._updating.T

    def of(self, columns: PlanColumns) -> Floats:
        """Device memory that each stage needs at least, `[plan, stage]`.

        Args:
            columns: the plans of the batch; their recompute counts.
        """
        layout, sizes = self._layout, self._sizes
        full, selective = columns.recompute_modes()
        output, saved = sizes.plain.output, sizes.plain.saved
        selects = bool(selective.any())
        if selects:
            saved = np.where(selective, sizes.selective.saved, saved)
        again = np.where(full, saved, 0.0)
        kept, last = saved - again + output * self._waits, layout.bounds[1:] - 1
        holds = (
            self._comes
            + layout.by_chunk(kept)
            - np.where(full[last], (output * self._waits)[last], 0.0)
        )
        inner, parted = layout.through(kept) - holds[layout.chunk_of], None
        if self._batch.splits:
            waits = saved + again + self._leaving
            parted = layout.by_chunk(waits)
            weight = inner + layout.through(waits) - parted[layout.chunk_of]
            inner = parted[layout.chunk_of] - layout.through(waits) + again
        else:
            inner += again
        always, least = self._always
        for each in self._running:
            part = weight if each.moment.is_weight else inner
            own = each.plain
            if selects:
                own = np.where(selective[each.layers], each.selective, own)
            highest = np.maximum.reduceat(own + part[each.layers], each.starts, axis=0)
            waiting = each.live * holds
            if parted is not None:
                waiting = waiting + each.moment.parted[:, None] * (holds + parted)
            most = always + layout.over_chunks(waiting)
            most[each.stages] += highest
            exists = each.moment.exists[:, None]
            least = np.where(exists, np.maximum(least, most), least)
        return np.asarray(least.T)

    @cached_property
    def _resident(self) -> Floats:
        """Bytes of the process, weights and optimizer state, `[stage, plan]`."""
        batch, by_stage, state = self._batch, self._layout.by_stage, self._state
        optimizer = np.where(batch.offloads, STAGING_BYTES, by_stage(state.optimizer))
        return np.asarray(by_stage(state.weight_shard) + batch.process_bytes + optimizer)

    @cached_property
    def _updating(self) -> Floats:
        """The same with shards of gradients, which an update needs at least, `[stage, plan]`."""
        return np.asarray(self._resident + self._layout.by_stage(self._state.gradient_shard))

    @cached_property
    def _always(self) -> tuple[Floats, Floats]:
        """Bytes of weights and optimizer state; and those, with gradients, that updates need."""
        reducing = self._reducing if self._batch.shape.microbatches > 1 else 0.0
        return self._resident, self._updating + reducing

    @property
    def _reducing(self) -> Floats:
        """Bytes beyond shards of gradients while a stage scatters whole ones, `[stage, plan]`.

        The gradient of tied weights arrives before that of their owner is scattered.
        """
        batch, layout, sizes = self._batch, self._layout, self._sizes
        whole = layout.through(sizes.gradients - sizes.sent - sizes.shards)
        most = whole + np.where(batch.columns.optimizer > 1, sizes.shards, 0.0)
        for tied in batch.tied:
            arrived = whole[tied.owner] + tied.gradient_bytes
            most[tied.owner] = np.maximum(most[tied.owner], arrived)
        chunks = np.maximum.reduceat(most, layout.bounds[:-1], axis=0)
        return np.asarray(chunks.reshape(-1, layout.pipeline, chunks.shape[1]).max(axis=0))

    @cached_property
    def _running(self) -> tuple[_Running, ...]:
        return tuple(map(self._run, moments(self._batch.shape)))

    def _run(self, moment: Moment) -> _Running:
        batch, layout, sizes = self._batch, self._layout, self._sizes
        chunks = np.sort(moment.chunk)
        layers = np.concatenate([layout.chunks[chunk] for chunk in chunks.tolist()])
        starts = np.searchsorted(layout.chunk_of[layers], chunks)
        common = self._model_state(moment)
        made = np.where(moment.is_made[layout.chunk_of][:, None], 0.0, sizes.made)
        made = np.maximum(
            made, sizes.plain.pass_gradients + np.where(layout.is_embedding[:, None], made, 0.0)
        )
        if not batch.splits or moment.is_weight:
            common = common + self._comes[layout.chunk_of]
        if layout.pipeline > 1 and (not batch.splits or moment.is_weight):
            # The loss, which the last layer computes, has freed the tokens.
            common[layout.bounds[-2] : layout.bounds[-1] - 1] -= self._tokens

        def own(activations: ActivationBytes) -> Floats:
            if moment.is_weight:
                return common + made
            peak, entering = activations.backward_peak, self._entering
            most = entering + (activations.saved if batch.splits else made)
            return np.asarray(common + self._leaving + np.maximum(peak, most))

        live = np.broadcast_to(moment.live[:, None], (len(moment.live), batch.columns.count))
        if batch.shape.schedule == "gpipe" and layout.pipeline > 1:
            more = batch.columns.accumulation - moment.microbatches
            live = live + np.where(moment.ends[:, None], 0, more)
        return _Running(
            moment=moment,
            layers=layers,
            starts=starts,
            stages=chunks % layout.pipeline,
            plain=own(sizes.plain)[layers],
            selective=own(sizes.selective)[layers],
            live=live,
        )

    def _model_state(self, moment: Moment) -> Floats:
        """Gradients and gathered weights of a stage while a layer runs, `[layer, plan]`."""
        batch, layout, sizes = self._batch, self._layout, self._sizes
        adds = moment.is_weight or not batch.splits
        ends = moment.ends[layout.stage_of][:, None] & adds
        # A chunk behind another one sends the gradient of its input before it reduces.
        at_once = (batch.shape.microbatches == 1) | (layout.chunk_of == 0) | batch.splits
        reduced = ends & at_once[:, None]
        is_done, is_made = moment.is_done[:, None], moment.is_made[:, None]
        exist = np.where(is_made, layout.by_chunk(sizes.gradients), 0.0)
        whole = np.where(
            is_done, layout.by_chunk(sizes.shards), exist + layout.by_chunk(sizes.gathered)
        )
        new = np.where(reduced, sizes.made_shards, sizes.made) * adds
        scattered = np.where(reduced, sizes.shards - sizes.gradients, 0.0)
        changes = np.where(is_made[layout.chunk_of], scattered, new)
        freed = sizes.gathered + np.where(reduced, 0.0, sizes.sent)
        changes = changes - np.where(ends, freed, 0.0)
        above = layout.by_chunk(changes)[layout.chunk_of] - layout.through(changes)
        return np.asarray(layout.over_chunks(whole)[layout.stage_of] + above)

    @cached_property
    def _leaving(self) -> Floats:
        """Gradient of each layer's output."""
        leaving = np.where(self._layout.trains[:, None], self._sizes.plain.output, 0.0)
        leaving[-1] = 0.0
        return leaving

    @cached_property
    def _entering(self) -> Floats:
        """Gradient of each layer's input."""
        return np.concatenate((np.zeros_like(self._leaving[:1]), self._leaving[:-1]))

    @cached_property
    def _waits(self) -> Bools:
        """Whether a layer's output waits for a backward pass in its chunk, `[layer, 1]`.

        Before the first trained layer only its input does.
        """
        trains, chunks = self._layout.trains, self._layout.chunk_of
        enters = np.append(trains[1:] & ~trains[:-1] & (chunks[1:] == chunks[:-1]), False)
        return np.asarray(trains | enters)[:, None]

    @cached_property
    def _comes(self) -> Floats:
        """What a micro-batch brings to each chunk that waits: its input and tokens.

        `[chunk, plan]`.
        """
        firsts, trains = self._layout.bounds[:-1], self._layout.trains
        output = self._sizes.plain.output
        before = np.concatenate((np.zeros_like(output[:1]), output[:-1]))
        comes = np.where(trains[firsts][:, None], before[firsts], 0.0)
        for chunk in {0 if trains[0] else len(comes) - 1, len(comes) - 1}:
            comes[chunk] += self._tokens
        return comes

    @cached_property
    def _state(self) -> StateBytes:
        """Bytes of model state, `[layer, plan]`."""
        batch = self._batch
        states = np.array([self._layers.state(key) for key in batch.state_keys])
        kinds = batch.prices.columns[:, None]
        return StateBytes(*(states[batch.state_place, at, kinds] for at in range(states.shape[1])))

    @cached_property
    def _sizes(self) -> _Sizes:
        batch, layout, state = self._batch, self._layout, self._state
        columns, kinds = batch.columns, batch.prices.columns[:, None]
        keys, place = distinct(columns.config, columns.micro)
        rows = np.array(
            [
                row
                for config, alike in groupby(keys, itemgetter(0))
                for row in self._layers.activations(
                    columns.configs[config], [micro for _, micro in alike]
                )
            ]
        )
        plain, selective = (
            ActivationBytes(*(rows[place, at, some, kinds] for at in range(rows.shape[1])))
            for some in (0, 1)
        )
        if not layout.trains[0]:
            plain, selective = (
                ActivationBytes(each.output, *(layout.trains[:, None] * part for part in each[1:]))
                for each in (plain, selective)
            )
        steps, step = distinct(columns.config, columns.micro, columns.accumulation)
        looked_up = np.array(
            [self._layers.rows_bytes(columns.configs[config], *each) for config, *each in steps]
        )
        gradients = state.gradients + looked_up[step, kinds]
        shards = np.minimum(state.gradient_shard, gradients)
        made, made_shards, sent = gradients.copy(), shards.copy(), np.zeros_like(gradients)
        gathers = batch.is_sharded & ~batch.reshards & layout.trains[:, None]
        gathered = np.where(gathers, state.gathered, 0.0)
        for tied in batch.tied:
            gathered[tied.user] += tied.weight_bytes
            for each in (gradients, made, sent):
                each[tied.user] += tied.gradient_bytes
        users = {owner: user for user, owned in enumerate(layout.targets) for owner in owned[1:]}
        for owner, user in users.items():
            made[user] += state.gradients[owner]
            made_shards[user] += state.gradients[owner]
            # Rows wait from the owner's own backward pass on.
            made[owner] = made_shards[owner] = gradients[owner] - state.gradients[owner]
        return _Sizes(plain, selective, gradients, shards, made, made_shards, gathered, sent)
