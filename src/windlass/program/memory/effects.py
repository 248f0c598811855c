"""Instruction effects: the tensors that each instruction reads, makes and frees.

The verifier proves programs with these effects, and the cost model adds up memory with them. Device
memory while an instruction runs holds all tensors alive before it, those that it makes, and its
`working_bytes`; what it frees is freed when it ends. Offloaded tensors take no device memory.
"""

from collections.abc import Hashable, Set as AbstractSet
from itertools import pairwise

from windlass.program.instruction import GRADIENT_PASSES, Instruction, InstructionKind
from windlass.program.memory.pass_effects import PassEffects
from windlass.program.memory.stage_tensors import StageTensors
from windlass.program.memory.values import Effect, TensorId
from windlass.program.phases import (
    deferred_update_layers,
    offloaded_gradient_layers,
    owned_layers,
    resident_layers,
)
from windlass.schema import Graph, LayerKind, Plan, optimizer_law

_TIED_KINDS = (
    "send_tied_weights",
    "recv_tied_weights",
    "send_tied_grads",
    "accumulate_tied_grads",
)

_OUTPUT_TRANSFERS = ("offload_activation", "reload_activation")
"""What moves outputs between tiers, also those that came from another stage."""


class InstructionEffects:
    """The effects of the instructions of one stage of a plan."""

    def __init__(self, plan: Plan, graph: Graph, stage: int = 0) -> None:
        self.tensors = StageTensors(plan, graph, stage)
        self._passes = PassEffects(self.tensors)
        self._workspaces = [_update_workspace(plan, kind) for kind in graph.layer_kinds()]
        """Temporary memory of each layer's update."""
        self._resident = frozenset(resident_layers(plan, graph, stage))
        self._has_device_state = not plan.is_offloaded("optimizer")
        self._offloads_weights = plan.is_offloaded("parameters")
        self._shards_weights = plan.sharding.parameters > 1
        self._shards_state = plan.sharding.optimizer > 1
        self.deferred_updates = frozenset(deferred_update_layers(plan, graph, stage))
        """Layers whose update is deferred to the next step; their gradients are offloaded."""
        self.offloaded_gradients = offloaded_gradient_layers(plan, graph, stage)
        """Layers whose gradients leave device memory during the backward pass, in that order."""
        self._offloaded_before = {
            after: before for before, after in pairwise(self.offloaded_gradients)
        }
        self._scattered_gradients = self._layers_with_scattered_gradients(plan, graph, stage)
        self._scattered_before = {
            after: before for before, after in pairwise(self._scattered_gradients)
        }

    def _layers_with_scattered_gradients(
        self, plan: Plan, graph: Graph, stage: int
    ) -> tuple[int, ...]:
        """The layers whose gradients are reduce-scattered behind the backward pass, in that order.

        Gradients that leave device memory are waited for at once.
        """
        if not self._shards_state:
            return ()
        return tuple(
            layer
            for layer in reversed(owned_layers(plan, graph, stage))
            if layer not in self.offloaded_gradients
            and self.tensors.sizes[layer].gradients
            and self.tensors.reduces_gradients(layer)
        )

    @property
    def recomputed_layers(self) -> tuple[int, ...]:
        """The stage's layers that run their full forward again before their backward."""
        tensors = self.tensors
        return tuple(layer for layer in tensors.layers if layer in tensors.recomputed_layers)

    @property
    def resident_tensors(self) -> tuple[TensorId, ...]:
        """The tensors alive before and after a step: weights and optimizer state on the device.

        With deferred updates these include their offloaded gradients; with offloaded activations a
        transfer buffer.
        """
        tensors: list[TensorId] = [] if self._has_device_state else [TensorId("staging buffer")]
        if self.tensors.plan.is_offloaded("activations"):
            tensors.append(TensorId("activation transfer buffer"))
        for layer in self.tensors.layers:
            if not self.tensors.sizes[layer].weights:
                continue
            if layer in self._resident:
                tensors.append(self.tensors.weights_between_passes(layer))
            if self._has_device_state:
                tensors.append(TensorId("optimizer state", layer))
            if layer in self.deferred_updates:
                tensors.append(TensorId("offloaded gradients", layer))
        return tuple(tensors)

    def bytes_of(self, tensor: TensorId) -> int:
        """Device memory that a tensor takes; 0 if it is offloaded."""
        return self.tensors.bytes_of(tensor)

    def gradient_targets(self, layer: int) -> tuple[int, ...]:
        """The layers whose gradients a layer's backward adds to: itself and its tied owners."""
        return self.tensors.gradient_targets(layer)

    def effect_of(self, instruction: Instruction, sums: AbstractSet[TensorId]) -> Effect:
        """The effect of an instruction.

        Args:
            sums: gradients that exist already; the first backward pass makes them.

        Raises:
            ValueError: the instruction has no meaning on this stage.
        """
        kind, layer, micro_batch = instruction
        if kind == "grad_norm":
            return self._with_rows(self._grad_norm())
        if kind == "sync":
            return self._with_rows(
                self._finish_offload(() if self.deferred_updates else self.offloaded_gradients[-1:])
            )
        if kind == "load_batch":
            return Effect(makes=(TensorId("tokens", None, micro_batch),))
        if layer is None:
            raise ValueError(f"{kind} needs a layer")
        if kind in ("send", "receive"):
            return self._message(kind, layer, micro_batch)
        if kind in _TIED_KINDS:
            return self._tied_message(kind, layer)
        if layer not in self.tensors.layer_set and kind not in _OUTPUT_TRANSFERS:
            raise ValueError(f"layer {layer} is not on this stage")
        if micro_batch is None:
            return self._with_rows(self._layer_effect(kind, layer))
        return self._micro_batch_effect(kind, layer, micro_batch, sums)

    def signature(self, instruction: Instruction, sums: AbstractSet[TensorId]) -> Hashable:
        """What an effect's bytes depend on; equal layers between equal neighbours share one."""
        kind, layer, micro_batch = instruction
        if layer is None:
            return kind
        is_offload = micro_batch is None and (self.offloaded_gradients or self.deferred_updates)
        frees_another = layer in self._scattered_gradients and kind in ("reduce_grads", "update")
        if kind in _TIED_KINDS or is_offload or frees_another:
            return kind, layer
        tensors = self.tensors
        before = None
        if layer:
            before = (tensors.kinds[layer - 1], self._passes.starts_backward(layer - 1))
        is_end = layer in (0, tensors.last_layer)
        sums_exist: tuple[bool, ...] = ()
        if kind in GRADIENT_PASSES:
            sums_exist = tuple(each in sums for each in tensors.pass_gradient_sums(layer))
        return (
            kind,
            tensors.kinds[layer],
            before,
            is_end,
            tensors.graph.gradient_reach(layer),
            layer in tensors.recomputed_layers,
            layer in tensors.selective,
            layer in tensors.layer_set,
            sums_exist,
        )

    def _micro_batch_effect(
        self,
        kind: InstructionKind,
        layer: int,
        micro_batch: int,
        sums: AbstractSet[TensorId],
    ) -> Effect:
        output = TensorId("output", layer, micro_batch)
        offloaded = TensorId("offloaded output", layer, micro_batch)
        if kind == "forward":
            return self._passes.forward(layer, micro_batch)
        if kind == "recompute":
            return self._passes.recompute(layer, micro_batch)
        if kind == "backward":
            return self._passes.backward(layer, micro_batch, sums)
        if kind == "backward_input":
            return self._passes.backward_input(layer, micro_batch)
        if kind == "backward_weight":
            return self._passes.backward_weight(layer, micro_batch, sums)
        if kind == "offload_activation":
            return Effect((output,), (offloaded,), (output,))
        if kind == "reload_activation":
            return Effect((offloaded,), (output,), (offloaded,))
        raise ValueError(f"{kind} of one micro-batch has no meaning here")

    def _with_rows(self, effect: Effect) -> Effect:
        """The effect with rows of a table that are freed with its gradient."""
        rows = tuple(
            each
            for tensor in effect.frees
            if tensor.name == "gradients" and tensor.layer is not None
            for each in self.tensors.gradient_rows(tensor.layer)
        )
        return effect._replace(reads=(*effect.reads, *rows), frees=(*effect.frees, *rows))

    def _layer_effect(self, kind: InstructionKind, layer: int) -> Effect:
        """The effect of moving or changing a layer's weights, gradient and optimizer state."""
        if kind == "update":
            return self._update(layer)
        if kind == "offload_grads":
            finished = self._finish_offload(self._offloaded_just_before(layer))
            reads = (self.tensors.final_gradient(layer), *finished.reads)
            return Effect(reads, (TensorId("offloaded gradients", layer),), finished.frees)
        if kind == "reduce_grads":
            return self._reduce_grads(layer)
        return self._weights_effect(kind, layer)

    def _weights_effect(self, kind: InstructionKind, layer: int) -> Effect:
        stored, weights = self.tensors.weights_between_passes(layer), TensorId("weights", layer)
        if kind == "prefetch_weights":
            return Effect(makes=(stored,))
        if kind == "free_weights":
            return Effect((weights,), (), (weights,))
        if kind == "free_shard" and self._shards_weights:
            return Effect((stored,), (), (stored,))
        if kind == "unshard_weights" and self._shards_weights:
            return Effect((stored,), (weights,))
        if kind == "all_gather_params":
            return Effect((stored,))
        raise ValueError(f"{kind} of a layer has no meaning here")

    def _reduce_grads(self, layer: int) -> Effect:
        """The start of a reduction, which first waits for the one before.

        Reduce-scatter reads its shards from one flat tensor, so that no copy is made before. That
        tensor is freed when the next reduction starts; if it is the last, by what needs its shard.
        """
        sizes, full = self.tensors.sizes[layer], TensorId("gradients", layer)
        if not sizes.gradients:
            return Effect()
        if not self._shards_state:
            return Effect((full,))
        shard = (TensorId("gradient shard", layer),)
        if layer in self.offloaded_gradients:
            return Effect((full,), shard, (full,))
        before = self._scattered_before.get(layer)
        finished = () if before is None else (TensorId("gradients", before),)
        return Effect((full, *finished), shard, finished)

    def _last_scattered(self) -> tuple[TensorId, ...]:
        """The full gradient that is reduce-scattered last."""
        return tuple(TensorId("gradients", layer) for layer in self._scattered_gradients[-1:])

    def _update(self, layer: int) -> Effect:
        """The update; it makes the updated shard where weights are sharded and offloaded."""
        if not self.tensors.sizes[layer].gradients:
            return Effect()
        gradient = self.tensors.final_gradient(layer)
        stored = self.tensors.weights_between_passes(layer)
        if layer in self.deferred_updates:
            offloaded = TensorId("offloaded gradients", layer)
            return Effect((offloaded,), (stored,), (offloaded,))
        makes_shard = self._offloads_weights and self._shards_weights
        reads, makes = ((gradient,), (stored,)) if makes_shard else ((gradient, stored), ())
        if layer in self.offloaded_gradients:
            finished = self._finish_offload(self._offloaded_just_before(layer))
            return Effect((*reads, *finished.reads), makes, finished.frees)
        state = (TensorId("optimizer state", layer),) if self._has_device_state else ()
        is_last = not self.tensors.plan.clip and layer in self._scattered_gradients[-1:]
        scattered = self._last_scattered() if is_last else ()
        frees = (gradient, *scattered)
        return Effect((*reads, *state, *scattered), makes, frees, self._workspaces[layer])

    def _grad_norm(self) -> Effect:
        """The norm reads gradients; the squares of offloaded ones were summed as they left."""
        layers, deferred = self.tensors.layers, self.deferred_updates
        on_device = self.tensors.final_gradients(
            tuple(layer for layer in layers if layer not in deferred)
        )
        finished = self._finish_offload(self.offloaded_gradients[-1:])
        offloaded = (
            TensorId("offloaded gradients", layer) for layer in layers if layer in deferred
        )
        scattered = self._last_scattered()
        reads = (*on_device, *offloaded, *finished.reads, *scattered)
        return Effect(reads, (), (*finished.frees, *scattered))

    def _finish_offload(self, layers: tuple[int, ...]) -> Effect:
        """Frees gradients offloaded in the background: done once the next one is offloaded."""
        gradients = self.tensors.final_gradients(layers)
        return Effect(gradients, (), gradients)

    def _offloaded_just_before(self, layer: int) -> tuple[int, ...]:
        """The layer whose gradient is offloaded before this one's, if there is one."""
        return (self._offloaded_before[layer],) if layer in self._offloaded_before else ()

    def _message(self, kind: InstructionKind, layer: int, micro_batch: int | None) -> Effect:
        if layer not in self.tensors.boundaries:
            raise ValueError(f"the output of layer {layer} crosses no boundary of this stage")
        is_local = layer in self.tensors.layer_set
        is_activation = is_local if kind == "send" else not is_local
        tensor = TensorId("output" if is_activation else "output gradient", layer, micro_batch)
        if kind == "receive":
            return Effect(makes=(tensor,))
        is_kept = is_activation and self._passes.starts_backward(layer)
        return Effect(reads=(tensor,), frees=() if is_kept else (tensor,))

    def _tied_message(self, kind: InstructionKind, layer: int) -> Effect:
        tensors = self.tensors
        from_owner = kind in ("send_tied_weights", "accumulate_tied_grads")
        tied = (tensors.tied_as_owner if from_owner else tensors.tied_as_user).get(layer)
        if tied is None:
            raise ValueError(f"{kind} of layer {layer} has no meaning on this stage")
        weights = TensorId("tied weights", tied.owner_layer)
        if kind == "send_tied_weights":
            return Effect((TensorId("weights", tied.owner_layer),))
        if kind == "recv_tied_weights":
            return Effect(makes=(weights,))
        if kind == "accumulate_tied_grads":
            received = tied.gradient_elements * tensors.plan.gradient_itemsize
            if not received:
                return Effect()
            return Effect((TensorId("gradients", tied.owner_layer),), (), (), received)
        sent: tuple[TensorId, ...] = (weights,)
        if tied.gradient_elements:
            sent += (TensorId("tied gradients", tied.owner_layer),)
        return Effect(sent, (), sent)


def _update_workspace(plan: Plan, kind: LayerKind) -> int:
    """Temporary memory of the update of a layer's whole matrices, that of the largest.

    Beside what an update of one matrix takes, gradients in bfloat16 are converted, and ranks that
    hold parts of a matrix gather it.
    """
    law, itemsize = optimizer_law(plan.optimizer), max(4, plan.parameter_itemsize)
    copies = (plan.gradient_itemsize < itemsize) + (
        plan.sharding.optimizer * int(plan.parallel.tensor) > 1
    )
    return max(
        (
            law.workspace_bytes(matrix.shape[0], matrix.shape[1], itemsize)
            + copies * itemsize * matrix.count
            for matrix in (kind.matrices if law.scope == "matrix" else ())
        ),
        default=0,
    )
