"""Effects: what each instruction reads, makes and frees, by name, class and bytes.

One place says it; the verifier proves programs with it and the cost model adds up memory with it.
The near tier while an instruction runs holds all values alive before it, what it makes, and its
`working` bytes; what it frees is gone when it ends. What has gone home takes no near memory.
"""

from collections.abc import Hashable
from itertools import pairwise

from windlass.program.instruction import GRADIENT_PASSES, Instruction, InstructionKind
from windlass.program.memory.pass_effects import PassEffects
from windlass.program.memory.stage_tensors import StageTensors
from windlass.program.memory.values import Effect, TensorId
from windlass.program.phases import offloaded_gradient_layers, deferred_update_layers, resident_layers
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

_LOANS = ("send_tied_weights", "recv_tied_weights", "send_tied_grads", "accumulate_tied_grads")


class InstructionEffects:
    """The effects of the instructions of one stage of a plan.

    Args:
        plan: the plan.
        graph: the graph that it cuts.
        stage: index of the stage.
    """

    def __init__(self, plan: Plan, graph: Graph, stage: int = 0) -> None:
        self.holding = StageTensors(plan, graph, stage)
        self._passes = PassEffects(self.holding)
        self._near = frozenset(resident_layers(plan, graph, stage))
        self._near_state = not plan.is_offloaded("optimizer")
        self._far_weights = plan.is_offloaded("parameters")
        self._shares_weights = plan.sharding.parameters > 1
        self._shares_state = plan.sharding.optimizer > 1
        self.deferred_updates = frozenset(deferred_update_layers(plan, graph, stage))
        """Layers whose update waits for the next step; their gradients lie at home meanwhile."""
        self.offloaded_gradients = offloaded_gradient_layers(plan, graph, stage)
        """Layers whose gradients leave during the backward pass, in that order."""
        self._left_before = {after: before for before, after in pairwise(self.offloaded_gradients)}

    @property
    def recomputed_layers(self) -> tuple[int, ...]:
        """The stage's layers whose forward runs again before their backward."""
        return tuple(at for at in self.holding.layers if at in self.holding.recomputed_layers)

    @property
    def resident_tensors(self) -> tuple[TensorId, ...]:
        """What is there before a step and after it: weights and optimizer state, if near.

        Where updates are put off, also the gradients that wait at home for them; where outputs go
        home, room for one that is on its way.
        """
        values: list[TensorId] = [] if self._near_state else [TensorId("staging")]
        if self.holding.plan.is_offloaded("activations"):
            values.append(TensorId("passing"))
        for layer in self.holding.layers:
            if not self.holding.sizes[layer].weights:
                continue
            if layer in self._near:
                values.append(self.holding.weights_between_passes(layer))
            if self._near_state:
                values.append(TensorId("optimizer", layer))
            if layer in self.deferred_updates:
                values.append(TensorId("gradients at home", layer))
        return tuple(values)

    def bytes_of(self, value: TensorId) -> int:
        """How large a value is."""
        return self.holding.bytes_of(value)

    def gradient_targets(self, layer: int) -> tuple[int, ...]:
        """The layers at which the gradients of a layer's weights are summed: its own and tied."""
        return self.holding.gradient_targets(layer)

    def effect_of(self, instruction: Instruction, made: frozenset[int] | set[int]) -> Effect:
        """What an instruction does.

        Args:
            instruction: one of this stage.
            made: layers whose gradient is there already; the first backward makes it.

        Raises:
            ValueError: an instruction that this version gives no meaning on this stage.
        """
        kind, layer, micro = instruction
        if kind == "grad_norm":
            return self._norm()
        if kind == "sync":
            return self._leave(() if self.deferred_updates else self.offloaded_gradients[-1:])
        if kind == "load_batch":
            return Effect(makes=(TensorId("tokens", None, micro),))
        if layer is None:
            raise ValueError(f"{kind} needs a layer")
        if kind in ("send", "receive"):
            return self._message(kind, layer, micro)
        if kind in _LOANS:
            return self._loan(kind, layer)
        if layer not in self.holding.layer_set:
            raise ValueError(f"layer {layer} is not on this stage")
        if micro is None:
            return self._change(kind, layer)
        return self._compute(kind, layer, micro, made)

    def signature(self, instruction: Instruction, made: frozenset[int] | set[int]) -> Hashable:
        """What the bytes of an effect depend on: equal layers between equal neighbours have one.

        Args:
            instruction: one of this stage.
            made: layers whose gradient is there already.
        """
        kind, layer, micro = instruction
        if layer is None:
            return kind
        if kind in _LOANS or (micro is None and (self.offloaded_gradients or self.deferred_updates)):
            return kind, layer
        kinds, on = self.holding.kinds, self.holding.layer_set
        before = (kinds[layer - 1], self._passes.starts_backward(layer - 1)) if layer else None
        edge = layer in (0, self.holding.last_layer)
        again = layer in self.holding.recomputed_layers
        summed: tuple[bool, ...] = ()
        if kind in GRADIENT_PASSES:
            summed = tuple(target in made for target in self.gradient_targets(layer))
        selective = layer in self.holding.selective
        return kind, kinds[layer], before, edge, again, selective, layer in on, summed

    def _compute(
        self, kind: InstructionKind, layer: int, micro: int, made: frozenset[int] | set[int]
    ) -> Effect:
        near, away = TensorId("output", layer, micro), TensorId("output at home", layer, micro)
        if kind == "forward":
            return self._passes.forward(layer, micro)
        if kind == "recompute":
            return self._passes.recompute(layer, micro)
        if kind == "backward":
            return self._passes.backward(layer, micro, made)
        if kind == "backward_input":
            return self._passes.backward_input(layer, micro)
        if kind == "backward_weight":
            return self._passes.backward_weight(layer, micro, made)
        if kind == "offload_activation":
            return Effect((near,), (away,), (near,))
        if kind == "reload_activation":
            return Effect((away,), (near,), (away,))
        raise ValueError(f"{kind} of one micro-batch has no meaning here")

    def _change(self, kind: InstructionKind, layer: int) -> Effect:
        """What moves or changes a layer's weights, gradient and optimizer state."""
        if kind == "update":
            return self._update(layer)
        if kind == "offload_grads":
            left = self._leave(self._before(layer))
            reads = (self.holding.final_gradient(layer), *left.reads)
            return Effect(reads, (TensorId("gradients at home", layer),), left.frees)
        if kind == "reduce_grads":
            return self._reduce(layer)
        return self._move(kind, layer)

    def _move(self, kind: InstructionKind, layer: int) -> Effect:
        held, weights = self.holding.weights_between_passes(layer), TensorId("weights", layer)
        if kind == "prefetch_weights":
            return Effect(makes=(held,))
        if kind == "free_weights":
            return Effect((weights,), (), (weights,))
        if kind == "free_shard" and self._shares_weights:
            return Effect((held,), (), (held,))
        if kind == "unshard_weights" and self._shares_weights:
            return Effect((held,), (weights,))
        if kind == "all_gather_params":
            return Effect((held,))
        raise ValueError(f"{kind} of a layer has no meaning here")

    def _reduce(self, layer: int) -> Effect:
        """Scattering takes its shards from one flat piece, so that nothing is copied before."""
        sizes, whole = self.holding.sizes[layer], TensorId("gradients", layer)
        if not sizes.gradients:
            return Effect()
        if not self._shares_state:
            return Effect((whole,))
        return Effect((whole,), (TensorId("gradient shard", layer),), (whole,))

    def _update(self, layer: int) -> Effect:
        """Where weights are shared and live far away, the updated shard comes as the state does."""
        if not self.holding.sizes[layer].weights:
            return Effect()
        gradient, held = self.holding.final_gradient(layer), self.holding.weights_between_passes(layer)
        if layer in self.deferred_updates:
            away = TensorId("gradients at home", layer)
            return Effect((away,), (held,), (away,))
        comes = self._far_weights and self._shares_weights
        reads, makes = ((gradient,), (held,)) if comes else ((gradient, held), ())
        if layer in self.offloaded_gradients:
            left = self._leave(self._before(layer))
            return Effect((*reads, *left.reads), makes, left.frees)
        state = (TensorId("optimizer", layer),) if self._near_state else ()
        return Effect((*reads, *state), makes, (gradient,))

    def _norm(self) -> Effect:
        """Of gradients that are away, the squares were summed as they left."""
        layers = self.holding.layers
        near = self.holding.final_gradients(tuple(at for at in layers if at not in self.deferred_updates))
        left = self._leave(self.offloaded_gradients[-1:])
        away = (TensorId("gradients at home", layer) for layer in layers if layer in self.deferred_updates)
        return Effect((*near, *away, *left.reads), (), left.frees)

    def _leave(self, layers: tuple[int, ...]) -> Effect:
        """A gradient that leaves beside what follows has gone once the next one is to leave."""
        gone = self.holding.final_gradients(layers)
        return Effect(gone, (), gone)

    def _before(self, layer: int) -> tuple[int, ...]:
        """The layer whose gradient leaves before this one's, if there is one."""
        return (self._left_before[layer],) if layer in self._left_before else ()

    def _message(self, kind: InstructionKind, layer: int, micro: int | None) -> Effect:
        if layer not in self.holding.boundaries:
            raise ValueError(f"the output of layer {layer} crosses no boundary of this stage")
        own = layer in self.holding.layer_set
        onward = own if kind == "send" else not own
        value = TensorId("output" if onward else "output gradient", layer, micro)
        if kind == "receive":
            return Effect(makes=(value,))
        held = onward and self._passes.starts_backward(layer)
        return Effect(reads=(value,), frees=() if held else (value,))

    def _loan(self, kind: InstructionKind, layer: int) -> Effect:
        tensors = self.holding
        loan = (
            tensors.tied_as_owner
            if kind in ("send_tied_weights", "accumulate_tied_grads")
            else tensors.tied_as_user
        ).get(layer)
        if loan is None:
            raise ValueError(f"{kind} of layer {layer} has no meaning on this stage")
        weights, sums = TensorId("borrowed weights", loan.owner_layer), TensorId("gradients", loan.owner_layer)
        if kind == "send_tied_weights":
            return Effect((TensorId("weights", loan.owner_layer),))
        if kind == "recv_tied_weights":
            return Effect(makes=(weights,))
        if kind == "accumulate_tied_grads":
            came = loan.elements * tensors.plan.gradient_itemsize
            return Effect((sums,), (), (), came)
        both = (weights, TensorId("borrowed gradients", loan.owner_layer))
        return Effect(both, (), both)
