"""Phases: which layers share device memory at a time, and which of their tensors are offloaded.

With weight streaming a stage's layers take turns in device memory. This module derives from a plan
what each stage keeps, offloads and defers; `lowering.lower_offload` turns that into instructions.
"""

from itertools import pairwise

from windlass.program.activation_checkpointing import is_recomputed
from windlass.program.device_mesh import chunks_of_stage, layers_of_stage
from windlass.program.tied_weights import tied_owner_layers
from windlass.schema import Graph, Plan


def phases_of_stage(plan: Plan, stage: int) -> tuple[tuple[int, int], ...]:
    """The groups of layers that take turns on a stage, those of its first model chunk first."""
    chunks = chunks_of_stage(plan, stage)
    return tuple(phase for chunk in chunks for phase in plan.stages[chunk].phases)


def layers_with_parameters(graph: Graph) -> tuple[int, ...]:
    """The layers that own parameters, ascending."""
    return tuple(index for index, kind in enumerate(graph.layer_kinds()) if kind.parameter_count)


def owned_layers(plan: Plan, graph: Graph, stage: int) -> tuple[int, ...]:
    """The layers of a stage that own parameters, ascending."""
    local = set(layers_of_stage(plan, stage))
    return tuple(layer for layer in layers_with_parameters(graph) if layer in local)


def trained_layers(plan: Plan, graph: Graph, stage: int) -> tuple[int, ...]:
    """The layers of a stage that own parameters which are updated, ascending."""
    kinds = tuple(graph.layer_kinds())
    return tuple(layer for layer in owned_layers(plan, graph, stage) if kinds[layer].trained_count)


def phase_needs(plan: Plan, graph: Graph, stage: int = 0) -> tuple[tuple[int, ...], ...]:
    """The stage's own layers whose weights each of its phases computes with, [phase][layer].

    These are the phase's own layers and the owners of tied weights, ascending. Weights that another
    stage sends are not included.
    """
    return _needs_from(plan, graph, stage, 0)


def backward_needs(plan: Plan, graph: Graph, stage: int = 0) -> tuple[tuple[int, ...], ...]:
    """The stage's own layers whose weights each phase's backward passes use, [phase][layer]."""
    return _needs_from(plan, graph, stage, graph.first_trained)


def _needs_from(
    plan: Plan, graph: Graph, stage: int, first_layer: int
) -> tuple[tuple[int, ...], ...]:
    """As `phase_needs`, of the layers from a first one on."""
    tied_owners, local = tied_owner_layers(graph), set(owned_layers(plan, graph, stage))
    phases = phases_of_stage(plan, stage)
    return tuple(
        tuple(
            sorted(
                local
                & {
                    used
                    for layer in range(max(begin, first_layer), end)
                    for used in (layer, *tied_owners[layer])
                }
            )
        )
        for begin, end in phases
    )


def resident_layers(plan: Plan, graph: Graph, stage: int = 0) -> tuple[int, ...]:
    """The layers of a stage whose weights are in device memory between steps, ascending."""
    layers = owned_layers(plan, graph, stage)
    if not plan.is_offloaded("parameters"):
        return layers
    first_phase_end = plan.stages[stage].phases[0][1]
    return tuple(layer for layer in layers if layer < first_phase_end)


def deferred_update_layers(plan: Plan, graph: Graph, stage: int = 0) -> tuple[int, ...]:
    """The layers whose update is deferred to the next step, ascending: all but resident ones."""
    if not plan.defers_updates:
        return ()
    resident = set(resident_layers(plan, graph, stage))
    return tuple(layer for layer in trained_layers(plan, graph, stage) if layer not in resident)


def gradients_reuse_weight_space(plan: Plan) -> bool:
    """Whether offloaded gradients overwrite the layer's offloaded bfloat16 weights.

    Those weights are copies of the float32 masters. Nobody reads them from the fetch for a layer's
    last backward pass until its update rewrites them from the masters: the update is the next
    instruction that uses the layer, in the next step or when deferred updates are flushed before an
    evaluation or a checkpoint. The update rewrites all weights of the layer even if some of them
    have no gradient; if none has, no gradient was stored.
    """
    return (
        plan.defers_updates
        and plan.has_master_weights
        and plan.offload.gradients == plan.offload.parameters
    )


def offloaded_gradient_layers(plan: Plan, graph: Graph, stage: int = 0) -> tuple[int, ...]:
    """The layers whose gradient leaves device memory during the backward pass, in that order.

    With gradient clipping the gradient is stored in the offload tier until the deferred update;
    without, the layer is updated at once.
    """
    if not plan.is_offloaded("gradients"):
        return ()
    layers = (
        deferred_update_layers(plan, graph, stage)
        if plan.defers_updates
        else trained_layers(plan, graph, stage)
    )
    return tuple(reversed(layers))


def offloaded_activation_layers(plan: Plan, graph: Graph, stage: int = 0) -> tuple[int, ...]:
    """The layers whose outputs are offloaded between forward and backward, ascending.

    Only outputs between two recomputed layers of a stage are: autograd's graph of any other layer
    holds the layer's input and output anyway, so that offloading a copy would free nothing. Nothing
    waits for a backward pass before the first trained layer. In phases, where all micro-batches
    wait, what comes from the previous stage is offloaded too.
    """
    if not plan.is_offloaded("activations"):
        return ()
    layers: list[int] = []
    for chunk in chunks_of_stage(plan, stage):
        span = plan.stages[chunk]
        first = max(span.first_layer, graph.first_trained)
        recomputed = [is_recomputed(plan, layer) for layer in range(first, span.end_layer)]
        if plan.is_offloaded("parameters") and first == span.first_layer > 0 and recomputed[0]:
            layers.append(first - 1)
        layers += [first + at for at, pair in enumerate(pairwise(recomputed)) if all(pair)]
    return tuple(layers)
