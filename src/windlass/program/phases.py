"""Phases: which layers are in the near tier together, and what of them waits elsewhere meanwhile.

This is what a plan with far homes settles for one device; `stream` makes a program of it.
"""

from windlass.program.ties import owners
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan


def recomputed(plan: Plan, graph: Graph, layer: int) -> bool:
    """Whether a layer keeps only its input and runs its forward again before its backward.

    Never the head, whose backward follows its forward at once, nor the embedding, which keeps
    nothing that its tokens do not already hold. Where weights go away between the passes every
    layer does that has to come back, for what it kept would hold on to its weights; and no layer of
    the last phase does, whose backward follows at once.
    """
    stage = next(stage for stage in plan.stages if stage.first <= layer < stage.last)
    if plan.far("weights"):
        return layer < stage.phases[-1][0]
    return stage.recompute == "layer" and 0 < layer < graph.layers - 1


def owning(graph: Graph) -> tuple[int, ...]:
    """The layers that own parameters, ascending."""
    return tuple(at for at, kind in enumerate(graph.layer_kinds()) if kind.parameter_count)


def needs(plan: Plan, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each phase the layers whose weights it computes with: its own and tied ones, ascending.

    The plan has one stage.
    """
    borrowed, owned = owners(graph), set(owning(graph))
    return tuple(
        tuple(sorted(owned & {at for layer in range(*phase) for at in (layer, *borrowed[layer])}))
        for phase in plan.stages[0].phases
    )


def resident(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """The layers of the first stage whose weights are near between steps, ascending."""
    first = plan.stages[0]
    until = first.phases[0][1] if plan.far("weights") else first.last
    return tuple(at for at in owning(graph) if at < until)


def put_off(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """The layers whose update waits for the next step, ascending: all that go away in between."""
    if not plan.deferred:
        return ()
    near = set(resident(plan, graph))
    return tuple(at for at in owning(graph) if at not in near)


def shares_room(plan: Plan) -> bool:
    """Whether gradients that wait at home lie where the layer's weights lay.

    In bfloat16 those are copies. From the fetch for a layer's last backward pass until its update
    makes them anew from the masters nobody reads them: the update is the next that asks for the
    layer, be it in the next step or in settling, before an evaluation or a checkpoint. Where some
    weight of the layer has no gradient the update makes all of them anew all the same; where none
    has, nothing was stored.
    """
    return plan.deferred and plan.masters_apart and plan.home.gradients == plan.home.weights


def departing(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """The layers whose gradient leaves the near tier during the backward pass, in that order.

    With clipping it goes home and waits there; without, the layer is updated at once.
    """
    if not plan.far("gradients"):
        return ()
    return tuple(reversed(put_off(plan, graph) if plan.deferred else owning(graph)))


def travelling(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """The layers whose outputs go home from forward to backward, ascending.

    Those between two layers that run again: any other layer's own record of its forward pass holds
    its input and its output, and a copy elsewhere would free nothing.
    """
    if not plan.far("activations"):
        return ()
    again = [recomputed(plan, graph, layer) for layer in range(graph.layers)]
    return tuple(at for at in range(graph.layers - 1) if again[at] and again[at + 1])
