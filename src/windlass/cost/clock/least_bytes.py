"""Least bytes: a lower bound on the device memory of each stage, without its program.

No stage holds less at its peak than at any one moment. The moments looked at are each layer's
backward pass in three micro-batches: the first, before there are gradients; the one in which most
micro-batches wait for theirs; and the last. The program's own count (`program.memory`) is exact.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.clock.batch_seconds import BatchSeconds, distinct
from windlass.cost.clock.layer_bytes import ActivationBytes, LayerBytes, StateBytes
from windlass.cost.clock.plan_columns import PipelineShape
from windlass.cost.clock.schedule_levels import BACKWARD, FORWARD, WEIGHT, stage_passes
from windlass.program import STAGING_BYTES

_TOKEN_BYTES = 8


class Moment(NamedTuple):
    """One pass of each stage that is not forward."""

    is_weight: bool
    """Whether it makes the weight gradients of a split backward."""
    chunk: Ints
    """Model chunk that it runs, `[stage]`."""
    ends: Bools
    """Whether it is the last that adds to the gradients of its chunk, `[stage]`."""
    is_made: Bools
    """Whether each chunk's gradients exist before it, `[chunk]`."""
    is_done: Bools
    """Whether each chunk's last one comes before it, `[chunk]`."""
    live: Floats
    """Micro-batches of each chunk that wait for their backward pass, this one too, `[chunk]`."""
    parted: Floats
    """Micro-batches of each chunk that only wait for their weight gradients, `[chunk]`."""
    exists: Bools
    """Whether a stage has such a pass, `[stage]`."""


class _Sizes(NamedTuple):
    """Bytes of each layer, `[layer, plan]`."""

    activations: ActivationBytes
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
    is_full: Bools
    """Whether the layer is recomputed in full."""
    tokens: Floats
    """Bytes of the tokens of a micro-batch, `[plan]`."""


def least_bytes(batch: BatchSeconds, layers: LayerBytes, sequence: int) -> Floats:
    """Device memory that each stage needs at least, `[plan, stage]`.

    Args:
        batch: the plans.
        layers: bytes of the layers.
        sequence: tokens of a sequence.
    """
    state = _state(batch, layers)
    always = batch.by_stage(state.weight_shard) + batch.process_bytes
    always += np.where(batch.offloads, STAGING_BYTES, batch.by_stage(state.optimizer))
    least = always + batch.by_stage(state.gradient_shard)
    sizes = _sizes(batch, layers, state, sequence)
    if batch.shape.microbatches > 1:
        least = least + _reducing(batch, sizes)
    for moment in moments(batch.shape):
        most = always + _activations(batch, sizes, moment)
        least = np.where(moment.exists[:, None], np.maximum(least, most), least)
    return np.asarray(least.T)


def _reducing(batch: BatchSeconds, sizes: _Sizes) -> Floats:
    """Bytes beyond the shards of gradients while a stage scatters whole ones, `[stage, plan]`.

    The gradient of tied weights arrives before that of their owner is scattered.
    """
    whole = _through(batch, sizes.gradients - sizes.sent - sizes.shards)
    most = whole + np.where(batch.columns.optimizer > 1, sizes.shards, 0.0)
    for tied in batch.tied:
        arrived = whole[tied.owner] + tied.gradient_bytes
        most[tied.owner] = np.maximum(most[tied.owner], arrived)
    chunks = np.maximum.reduceat(most, batch.columns.chunk_bounds[:-1], axis=0)
    sides = batch.shape.virtual_stages, batch.shape.pipeline, -1
    return np.asarray(chunks.reshape(sides).max(axis=0))


def _activations(batch: BatchSeconds, sizes: _Sizes, moment: Moment) -> Floats:
    """Bytes beyond model state at the fullest layer of a pass, `[stage, plan]`."""
    shape, bounds, chunk_of = batch.shape, np.array(batch.columns.chunk_bounds), batch.chunk_of
    output, saved, peak, gradients = sizes.activations
    entering, leaving = np.concatenate((np.zeros_like(output[:1]), output[:-1])), output.copy()
    leaving[-1] = 0.0
    comes = entering[bounds[:-1]]
    for chunk in {0, shape.chunks - 1}:
        comes[chunk] += sizes.tokens
    last, kept = bounds[1:] - 1, np.where(sizes.is_full, 0.0, saved) + output
    holds = comes + batch.by_chunk(kept) - np.where(sizes.is_full, output, 0.0)[last]
    # What a micro-batch holds more between the parts of a split backward.
    waits = saved + np.where(sizes.is_full, saved, 0.0) + leaving
    live = moment.live[:, None] * np.ones(batch.columns.count)
    if shape.schedule == "gpipe" and shape.pipeline > 1 and not moment.is_made.any():
        live = np.broadcast_to(batch.columns.accumulation, live.shape)
    own = (live + moment.parted[:, None]) * holds + moment.parted[:, None] * batch.by_chunk(waits)
    # From here on arrays are over layers: what there is more, or less, while each is run.
    made = np.where(moment.is_made[chunk_of][:, None], 0.0, sizes.made)
    sparse = batch.is_embedding[:, None]
    if moment.is_weight:
        below = _through(batch, kept + waits)
        more = comes[chunk_of] + below - (holds + batch.by_chunk(waits))[chunk_of]
        more += np.maximum(made, gradients + np.where(sparse, made, 0.0))
    elif batch.splits:
        more = batch.by_chunk(waits)[chunk_of] - _through(batch, waits) + leaving
        more += np.where(sizes.is_full, saved, 0.0) + np.maximum(peak, saved + entering)
    else:
        more = comes[chunk_of] + _through(batch, kept) - holds[chunk_of] + leaving
        more += np.where(sizes.is_full, saved, 0.0)
        more += np.maximum(peak, entering + np.maximum(made, gradients + np.where(sparse, made, 0)))
    if shape.pipeline > 1 and not batch.splits:  # the loss frees the tokens
        more[bounds[-2] : bounds[-1] - 1] -= sizes.tokens
    more = more + _model_state(batch, sizes, moment)
    running = np.isin(chunk_of, moment.chunk)[:, None]
    most = np.maximum.reduceat(np.where(running, more, -np.inf), bounds[:-1], axis=0)
    sides = shape.virtual_stages, shape.pipeline, -1
    return np.asarray(own.reshape(sides).sum(axis=0) + most.reshape(sides).max(axis=0))


def _model_state(batch: BatchSeconds, sizes: _Sizes, moment: Moment) -> Floats:
    """Gradients and gathered weights of a layer's stage while it is run, `[layer, plan]`."""
    chunk_of, stage_of = batch.chunk_of, np.array(batch.stage_of)
    adds = moment.is_weight or not batch.splits
    ends = moment.ends[stage_of][:, None] & adds
    # A chunk behind another one sends the gradient of its input before it reduces.
    at_once = (batch.shape.microbatches == 1) | (chunk_of == 0) | batch.splits
    reduced = ends & at_once[:, None]
    is_done, is_made = moment.is_done[:, None], moment.is_made[:, None]
    exist = np.where(is_made, batch.by_chunk(sizes.gradients), 0.0)
    whole = np.where(is_done, batch.by_chunk(sizes.shards), exist + batch.by_chunk(sizes.gathered))
    new = np.where(reduced, sizes.made_shards, sizes.made) * adds
    changes = np.where(
        is_made[chunk_of], np.where(reduced, sizes.shards - sizes.gradients, 0.0), new
    )
    freed = sizes.gathered + np.where(reduced, 0.0, sizes.sent)
    changes = changes - np.where(ends, freed, 0.0)
    sides = batch.shape.virtual_stages, batch.shape.pipeline, -1
    stages = whole.reshape(sides).sum(axis=0)
    above = batch.by_chunk(changes)[chunk_of] - _through(batch, changes)
    return np.asarray(stages[stage_of] + above)


def _through(batch: BatchSeconds, layers: Floats) -> Floats:
    """Sums over each layer and those before it in its model chunk, `[layer, plan]`."""
    total = np.cumsum(layers, axis=0)
    firsts = np.array(batch.columns.chunk_bounds[:-1])
    return np.asarray(total - (total - layers)[firsts][batch.chunk_of])


def _state(batch: BatchSeconds, layers: LayerBytes) -> StateBytes:
    """Bytes of model state, `[layer, plan]`."""
    states = np.array([layers.state(key) for key in batch.state_keys])
    kinds = batch.prices.columns[:, None]
    return StateBytes(*(states[batch.state_place, name, kinds] for name in range(states.shape[1])))


def _sizes(batch: BatchSeconds, layers: LayerBytes, state: StateBytes, sequence: int) -> _Sizes:
    columns, kinds = batch.columns, batch.prices.columns[:, None]
    configs = columns.configs
    keys, place = distinct(columns.config, columns.micro)
    rows = np.array([layers.activations(configs[key[0]], key[1:])[0] for key in keys])
    full, selective = columns.recompute_modes()
    steps, step = distinct(columns.config, columns.micro, columns.accumulation)
    looked_up = [layers.rows_bytes(configs[config], *numbers) for config, *numbers in steps]
    gradients = state.gradients + np.array(looked_up)[step, kinds]
    shards = np.minimum(state.gradient_shard, gradients)
    made, made_shards = gradients.copy(), shards.copy()
    reshards = np.array([bool(each.reshard) for each in configs])[columns.config]
    gathered, sent = np.where(batch.is_sharded & ~reshards, state.weights, 0.0), np.zeros_like(made)
    for tied in batch.tied:
        gathered[tied.user] += tied.weight_bytes
        for each in (gradients, made, sent):
            each[tied.user] += tied.gradient_bytes
    users = {owner: user for user, owned in enumerate(batch.targets) for owner in owned[1:]}
    for owner, user in users.items():
        made[user] += gradients[owner]
        made_shards[user] += gradients[owner]
        made[owner] = made_shards[owner] = 0.0
    return _Sizes(
        activations=ActivationBytes(
            *(rows[place, name, selective.astype(int), kinds] for name in range(rows.shape[1]))
        ),
        gradients=gradients,
        shards=shards,
        made=made,
        made_shards=made_shards,
        gathered=gathered,
        sent=sent,
        is_full=full,
        tokens=np.asarray(2.0 * _TOKEN_BYTES * columns.micro * sequence),
    )


@lru_cache(maxsize=256)
def moments(shape: PipelineShape) -> tuple[Moment, ...]:
    """The passes at which a shape's stages are looked at."""
    passes = stage_passes(shape)
    stage, splits = np.arange(shape.pipeline), shape.schedule == "zero-bubble"
    is_chunk = (passes.chunks // shape.pipeline)[..., None] == np.arange(shape.virtual_stages)
    backward = passes.kinds == BACKWARD
    adds = passes.kinds == WEIGHT if splits else backward
    last = passes.micros == shape.microbatches - 1

    def before(chosen: Bools) -> Ints:
        """Passes of each chunk before each, `[stage, turn, chunk of the stage]`."""
        counted = is_chunk & chosen[..., None]
        return np.asarray(np.cumsum(counted, axis=1) - counted)

    live, parted = (
        before(passes.kinds == FORWARD) - before(backward),
        before(backward) - before(adds),
    )
    is_made, is_done = before(adds) > 0, before(adds & last) > 0
    held = live.sum(axis=2) + 2 * parted.sum(axis=2)
    found = []
    for kind in (BACKWARD, WEIGHT) if splits else (BACKWARD,):
        passing = passes.kinds == kind
        for chosen in (
            _first(passing),
            _first(passing & (passes.chunks < shape.pipeline)),
            passing & ~last & is_made.all(axis=2),
            _first(passing & last),
        ):
            turn = np.where(chosen, held, -1).argmax(axis=1)

            def at(counts: Ints | Bools, turn: Ints = turn) -> Ints:
                return np.asarray(counts[stage, turn].T.ravel())

            found.append(
                Moment(
                    is_weight=kind == WEIGHT,
                    chunk=passes.chunks[stage, turn],
                    ends=last[stage, turn],
                    is_made=at(is_made) > 0,
                    is_done=at(is_done) > 0,
                    live=at(live).astype(np.float64),
                    parted=at(parted).astype(np.float64),
                    exists=np.asarray(chosen.any(axis=1)),
                )
            )
    return tuple(found)


def _first(chosen: Bools) -> Bools:
    """Only the first of the chosen passes of each stage."""
    return np.asarray(chosen & (np.cumsum(chosen, axis=1) == 1))
