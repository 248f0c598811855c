"""Stage layout: which layers, weights and messages the model chunks of a pipeline have."""

from collections.abc import Callable
from functools import cache, cached_property
from itertools import pairwise

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.program import (
    TiedWeights,
    tied_across_stages,
    tied_elements_within_stage,
    tied_owner_layers,
)
from windlass.schema import Graph, Parallelism, Plan, Stage


class StageLayout:
    """The model chunks of the stages of some plans.

    Args:
        bounds: first layer of each model chunk, and the number of layers.
    """

    def __init__(self, base: Plan, graph: Graph, pipeline: int, bounds: tuple[int, ...]) -> None:
        self._base, self._graph = base, graph
        self.pipeline, self.bounds = pipeline, np.array(bounds)
        self.chunks = tuple(range(*pair) for pair in pairwise(bounds))
        """Layers of each model chunk."""
        self.chunk_of: Ints = np.repeat(np.arange(len(self.chunks)), np.diff(self.bounds))
        """The model chunk of each layer."""
        self.stage_of: Ints = self.chunk_of % pipeline
        """The stage of each layer."""
        self.tied: Callable[[int], tuple[TiedWeights, ...]] = cache(
            lambda tensor: tied_across_stages(self._plan(tensor), graph)
        )
        """Weights that two stages compute with, at a tensor-parallel degree."""
        self.shared: Callable[[int], dict[int, int]] = cache(
            lambda tensor: tied_elements_within_stage(self.stage_of.tolist(), graph.shard(tensor))
        )
        """Elements of each layer that another layer of its stage uses too, likewise."""

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage."""
        count = self.pipeline
        return tuple(
            tuple(layer for chunk in self.chunks[stage::count] for layer in chunk)
            for stage in range(count)
        )

    @cached_property
    def trains(self) -> Bools:
        """Whether a backward pass comes down to each layer, `[layer]`."""
        return np.arange(self.bounds[-1]) >= self._graph.first_trained

    @cached_property
    def forward_chunks(self) -> int:
        """Number of model chunks at the front that no backward pass comes down to."""
        return int((self.bounds[1:] <= self._graph.first_trained).sum())

    @cached_property
    def owned(self) -> tuple[bool, ...]:
        """Whether each layer owns parameters."""
        return tuple(kind.parameter_count > 0 for kind in self._graph.layer_kinds())

    @cached_property
    def is_embedding(self) -> Bools:
        """Whether each layer only looks up rows of its weights."""
        return np.array([kind.is_embedding for kind in self._graph.layer_kinds()])

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """The layers of its stage whose weights each layer computes with, `[layer]`."""
        stages = self.stage_of.tolist()
        return tuple(
            (layer, *(owner for owner in owners if stages[owner] == stages[layer] != layer))
            for layer, owners in enumerate(tied_owner_layers(self._graph))
        )

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """The layers whose weights each chunk is the first of its stage to use, `[chunk]`."""
        seen, needs = set[int](), []
        for chunk in self.chunks:
            used = {target for layer in chunk for target in self.targets[layer]}
            needs.append(tuple(each for each in sorted(used - seen) if self.owned[each]))
            seen |= used
        return tuple(needs)

    def by_chunk(self, layers: Floats) -> Floats:
        """Sums over the layers of each model chunk, `[chunk, plan]`."""
        return np.asarray(np.add.reduceat(layers, self.bounds[:-1], axis=0))

    def by_stage(self, layers: Floats) -> Floats:
        """Sums over the layers of each stage, `[stage, plan]`."""
        return self.over_chunks(self.by_chunk(layers))

    def over_chunks(self, chunks: Floats) -> Floats:
        """Sums over the model chunks of each stage, `[stage, plan]`."""
        if len(chunks) == self.pipeline:
            return chunks
        return np.asarray(chunks.reshape(-1, self.pipeline, chunks.shape[1]).sum(axis=0))

    def through(self, layers: Floats) -> Floats:
        """Sums over each layer and those before it in its model chunk, `[layer, plan]`."""
        total = np.cumsum(layers, axis=0)
        before = total[self.bounds[:-1]] - layers[self.bounds[:-1]]
        return np.asarray(total - before[self.chunk_of])

    def _plan(self, tensor: int) -> Plan:
        """A plan of this layout."""
        parallel = Parallelism.model_construct(
            pipeline=self.pipeline,
            tensor=tensor,
            virtual_stages=len(self.chunks) // self.pipeline,
        )
        stages = (Stage.model_construct(phases=((c.start, c.stop),)) for c in self.chunks)
        return self._base.model_copy(update={"parallel": parallel, "stages": tuple(stages)})
