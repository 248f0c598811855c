"""Inserts weight and gradient instructions among a stage's passes, as early as is exact.

The passes determine when each layer is used, and everything else follows: tied weights arrive
before their first use; unsharded weights are freed after their last; a gradient is sent to its
owner, accumulated, reduced, and then offloaded or applied after the last backward pass that adds
to it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from windlass.program.instruction import GRADIENT_PASSES, WEIGHT_PASSES, Instruction
from windlass.program.memory.stage_tensors import StageTensors
from windlass.program.phases import offloaded_gradient_layers, owned_layers, resident_layers
from windlass.program.replicas.zero_sharding import updates_per_shard
from windlass.schema import Graph, Plan

_BACKWARD_KINDS = (*GRADIENT_PASSES, "recompute", "reload_activation")
"""What a stage's backward pass consists of, up to the gradient that it sends."""


class CollectiveInserter:
    """Inserts the communication and updates of one stage among its passes."""

    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self._plan = plan
        self.tensors = StageTensors(plan, graph, stage)
        self._owned = owned_layers(plan, graph, stage)
        self._offloaded_gradients = frozenset(offloaded_gradient_layers(plan, graph, stage))
        self._resident = frozenset(resident_layers(plan, graph, stage))
        self._shards_weights = plan.sharding.parameters > 1

    def insert(self, passes: Sequence[Instruction]) -> Iterator[Instruction]:
        """The passes with all weight and gradient instructions that depend on them."""
        timeline = _PassTimeline(passes, self.tensors)
        for layer, tied in self.tensors.tied_as_user.items():
            timeline.before[timeline.first_use[layer]].append(
                Instruction("recv_tied_weights", layer)
            )
            timeline.after[timeline.ended[tied.owner_layer]].append(
                Instruction("send_tied_grads", layer)
            )
        layers = sorted(self._owned, key=timeline.ended.__getitem__)
        for layer in layers:
            if self._shards_weights:
                timeline.after[timeline.last_use[layer]].append(Instruction("free_weights", layer))
            timeline.after[self._reduce_position(layer, timeline)] += self._reduce(layer)
        offloaded = [layer for layer in layers if layer in self._offloaded_gradients]
        if self._plan.defers_updates:
            for layer in offloaded:
                timeline.after[timeline.last_gradient[layer]].append(
                    Instruction("offload_grads", layer)
                )
        else:
            self._insert_updates(offloaded, timeline)
        return iter(timeline)

    def _reduce_position(self, layer: int, timeline: "_PassTimeline") -> int:
        """Index of the pass after which a gradient is reduced.

        All previous stages wait for the gradient of this stage's input, so that is sent first. The
        owner of frozen tied weights, to which no pass adds, waits for nobody until all are over.
        Gradients that are offloaded, or that come from one micro-batch only, are reduced at once to
        free their memory.
        """
        last = timeline.last_gradient.get(layer, timeline.end)
        if self._offloaded_gradients or self._plan.batch.accumulation == 1:
            return last
        return timeline.next_send.get(last, last)

    def unshard(self, layers: Iterable[int]) -> Iterator[Instruction]:
        """All-gathers weight shards; frees the shards if weights are offloaded."""
        if self._shards_weights:
            for layer in layers:
                yield Instruction("unshard_weights", layer)
                if self._plan.is_offloaded("parameters"):
                    yield Instruction("free_shard", layer)

    def send_tied_weights(self, layers: Iterable[int]) -> Iterator[Instruction]:
        """Sends tied weights of layers that are now unsharded to the stages that use them."""
        available = set(layers)
        for layer, tied in self.tensors.tied_as_owner.items():
            if tied.owner_layer in available:
                yield Instruction("send_tied_weights", layer)

    def all_gather_params(self, layer: int) -> Iterator[Instruction]:
        """All-gathers a weight shard whose parts were updated by different replicas."""
        is_trained = layer in self._owned and self.tensors.sizes[layer].gradients
        if is_trained and updates_per_shard(self._plan) > 1:
            yield Instruction("all_gather_params", layer)

    def free(self, layer: int) -> Instruction:
        """Frees the device copy of a layer that is not in use; the offload tier has the same."""
        return Instruction("free_shard" if self._shards_weights else "free_weights", layer)

    def _reduce(self, layer: int) -> Iterator[Instruction]:
        """The communication that follows the last backward pass that adds to a layer's gradient."""
        for user_layer, tied in self.tensors.tied_as_owner.items():
            if tied.owner_layer == layer:
                yield Instruction("accumulate_tied_grads", user_layer)
        if self.tensors.reduces_gradients(layer):
            yield Instruction("reduce_grads", layer)

    def _insert_updates(self, layers: Sequence[int], timeline: "_PassTimeline") -> None:
        """Inserts each layer's update where its gradient is complete.

        An update runs in the background of the passes that follow. All-gathering its parts at once
        would wait for its end, so that happens when the next layer's update begins or the weights
        are freed, whichever is first.
        """
        for layer, next_layer in pairwise((*layers, None)):
            if layer is None:
                return
            start = timeline.last_gradient[layer]
            end = timeline.end if next_layer is None else timeline.last_gradient[next_layer]
            timeline.after[start].append(Instruction("update", layer))
            freed = timeline.last_free.get(layer, start)
            (timeline.before[freed] if start < freed <= end else timeline.after[end]).extend(
                self._after_update(layer)
            )

    def _after_update(self, layer: int) -> Iterator[Instruction]:
        """The instructions that follow an update during the backward pass."""
        yield from self.all_gather_params(layer)
        if self._shards_weights and layer not in self._resident:
            yield self.free(layer)


class _PassTimeline:
    """A stage's passes, the positions where each layer is used, and the insertions at each pass."""

    def __init__(self, passes: Sequence[Instruction], tensors: StageTensors) -> None:
        self._passes = passes
        self.before: dict[int, list[Instruction]] = defaultdict(list)
        self.after: dict[int, list[Instruction]] = defaultdict(list)
        self.first_use: dict[int, int] = {}
        """First pass of each layer."""
        self.last_use: dict[int, int] = {}
        """Last pass that needs the weights of each owner layer."""
        self.last_gradient: dict[int, int] = {}
        """Last pass that adds to the gradient of each owner layer."""
        self.last_free: dict[int, int] = {}
        """Last position where a layer's full weights are freed."""
        self.next_send: dict[int, int] = {}
        """For each backward pass, the position that sends its input gradient."""
        self.end = len(passes) - 1
        unsent: list[int] = []
        for index, (kind, layer, _) in enumerate(passes):
            if kind in _BACKWARD_KINDS:
                unsent.append(index)
            else:
                if kind == "send":
                    self.next_send.update(dict.fromkeys(unsent, index))
                unsent.clear()
            if layer is None:
                continue
            if kind == "free_weights":
                self.last_free[layer] = index
            elif kind in WEIGHT_PASSES or kind in GRADIENT_PASSES:
                self.first_use.setdefault(layer, index)
                for target in tensors.gradient_targets(layer):
                    # A weight-gradient pass uses the weights too: they are leaves of the autograd
                    # graph that it continues from.
                    self.last_use[target] = index
                    if kind in GRADIENT_PASSES:
                        self.last_gradient[target] = index

    @cached_property
    def ended(self) -> dict[int, int]:
        """Last pass that adds to each layer's gradient, or that uses the layer if none does."""
        return {**self.last_use, **self.last_gradient}

    def __iter__(self) -> Iterator[Instruction]:
        for index, instruction in enumerate(self._passes):
            yield from self.before[index]
            yield instruction
            yield from self.after[index]
