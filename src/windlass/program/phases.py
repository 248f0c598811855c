"""Phases: which layers are in the near tier together, and what of them waits elsewhere meanwhile.

This is what a plan with far homes settles for each stage; `stream` makes a program of it.
"""

from windlass.program.activation_checkpointing import recomputed
from windlass.program.device_mesh import chunks_of_stage, layers_of_stage
from windlass.program.tied_weights import owners
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan


def owning(graph: Graph) -> tuple[int, ...]:
    """The layers that own parameters, ascending."""
    return tuple(at for at, kind in enumerate(graph.layer_kinds()) if kind.parameter_count)


def owned(plan: Plan, graph: Graph, stage: int) -> tuple[int, ...]:
    """The layers of a stage that own parameters, ascending."""
    here = set(layers_of_stage(plan, stage))
    return tuple(at for at in owning(graph) if at in here)


def needs(plan: Plan, graph: Graph, stage: int = 0) -> tuple[tuple[int, ...], ...]:
    """For each phase of a stage the layers of the stage whose weights it computes with, ascending.

    Its own and tied ones; weights that another stage lends are none of them.
    """
    borrowed, here = owners(graph), set(owned(plan, graph, stage))
    return tuple(
        tuple(sorted(here & {at for layer in range(*phase) for at in (layer, *borrowed[layer])}))
        for chunk in chunks_of_stage(plan, stage)
        for phase in plan.stages[chunk].phases
    )


def resident(plan: Plan, graph: Graph, stage: int = 0) -> tuple[int, ...]:
    """The layers of a stage whose weights are near between steps, ascending."""
    layers = owned(plan, graph, stage)
    if not plan.is_offloaded("parameters"):
        return layers
    until = plan.stages[stage].phases[0][1]
    return tuple(at for at in layers if at < until)


def put_off(plan: Plan, graph: Graph, stage: int = 0) -> tuple[int, ...]:
    """The layers whose update waits for the next step, ascending: all that go away in between."""
    if not plan.defers_updates:
        return ()
    near = set(resident(plan, graph, stage))
    return tuple(at for at in owned(plan, graph, stage) if at not in near)


def shares_room(plan: Plan) -> bool:
    """Whether gradients that wait at home lie where the layer's weights lay.

    In bfloat16 those are copies. From the fetch for a layer's last backward pass until its update
    makes them anew from the masters nobody reads them: the update is the next that asks for the
    layer, be it in the next step or in settling, before an evaluation or a checkpoint. Where some
    weight of the layer has no gradient the update makes all of them anew all the same; where none
    has, nothing was stored.
    """
    return (
        plan.defers_updates
        and plan.has_master_weights
        and plan.offload.gradients == plan.offload.parameters
    )


def departing(plan: Plan, graph: Graph, stage: int = 0) -> tuple[int, ...]:
    """The layers whose gradient leaves the near tier during the backward pass, in that order.

    With clipping it goes home and waits there; without, the layer is updated at once.
    """
    if not plan.is_offloaded("gradients"):
        return ()
    layers = put_off(plan, graph, stage) if plan.defers_updates else owned(plan, graph, stage)
    return tuple(reversed(layers))


def travelling(plan: Plan, stage: int = 0) -> tuple[int, ...]:
    """The layers whose outputs go home from forward to backward, ascending.

    Those between two layers of a stage that run again: any other layer's own record of its forward
    pass holds its input and its output, and a copy elsewhere would free nothing.
    """
    if not plan.is_offloaded("activations"):
        return ()
    return tuple(
        at
        for chunk in chunks_of_stage(plan, stage)
        for at in range(plan.stages[chunk].first, plan.stages[chunk].last - 1)
        if recomputed(plan, at) and recomputed(plan, at + 1)
    )
