"""Lowering: a plan and a graph become one list of instructions for each device.

A message is named by the layer whose output crosses the boundary. So a stage that sends a layer of
its own sends that layer's output onward, and one that sends the layer before its first sends the
gradient of that output back; receiving is the mirror image.

Shared weights are gathered once for each chunk of layers, before its first pass, and are whole
until the last pass that needs them: they move once a step, however many micro-batches it has.
"""

from collections.abc import Iterator

from windlass.program.device_mesh import chunks_of_stage, mesh_coord
from windlass.program.instruction import Instruction, Program
from windlass.program.lowering.insert_collectives import Weave
from windlass.program.lowering.lower_offload import stream
from windlass.program.phases import needs, owned, travelling
from windlass.program.pipeline_schedules import Pass, passes
from windlass.program.validate_plan import require_lowerable
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

_Instructions = tuple[Instruction, ...]


def lower(plan: Plan, graph: Graph) -> tuple[Program, ...]:
    """The programs of one step, one for each device, in the order of `layout.place_of`.

    Raises:
        Faults: the plan asks for what this version does not yet lower, or does not cover the graph.
    """
    require_lowerable(plan, graph)
    label = plan.label
    stages = [_stage(plan, graph, stage) for stage in range(plan.parallel.pipeline)]
    places = (mesh_coord(device, plan.parallel) for device in range(plan.parallel.devices))
    # Not validated again: tens of thousands of instructions were just built from typed values.
    return tuple(
        Program.model_construct(
            plan=label,
            device=device,
            instructions=stages[place.stage][0],
            flush_deferred_updates=stages[place.stage][1],
        )
        for device, place in enumerate(places)
    )


def _stage(plan: Plan, graph: Graph, stage: int) -> tuple[_Instructions, _Instructions]:
    if plan.is_offloaded("parameters"):
        return stream(plan, graph, stage)
    ordered = _Ordered(plan, graph, stage)
    return tuple(ordered.step()), ()


class _Ordered:
    """One stage whose weights stay near: its passes in the plan's order."""

    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self._plan, self._stage = plan, stage
        self._end = graph.layers
        self._bounds = [
            (plan.stages[chunk].first, plan.stages[chunk].last) for chunk in chunks_of_stage(plan, stage)
        ]
        self._needs = needs(plan, graph, stage)
        self._weave = Weave(plan, graph, stage)
        self._owned = owned(plan, graph, stage)
        self._again = self._weave.holding.again
        self._travelling = frozenset(travelling(plan, stage))

    def step(self) -> Iterator[Instruction]:
        """One step."""
        yield from self._weave.woven(tuple(self._passes()))
        if self._plan.clip:
            yield Instruction("grad_norm")
        for layer in self._owned if self._plan.offloads else self._weave.holding.layers:
            yield Instruction("update", layer)
            yield from self._weave.spread(layer)
        yield Instruction("sync")

    def _passes(self) -> Iterator[Instruction]:
        if self._plan.sharding.parameters == 1:
            yield from self._weave.lend(self._owned)
        whole: set[int] = set()
        for turn in passes(self._plan, self._stage):
            due = [layer for layer in self._needs[turn.chunk] if layer not in whole]
            whole.update(due)
            if due and self._plan.sharding.parameters > 1:
                yield from self._weave.gather(due)
                yield from self._weave.lend(due)
            yield from self._pass(turn)

    def _pass(self, turn: Pass) -> Iterator[Instruction]:
        first, last = self._bounds[turn.chunk]
        if turn.kind == "forward":
            yield from self._forward(first, last, turn.micro)
        elif turn.kind == "backward_weight":
            for layer in reversed(range(first, last)):
                yield Instruction("backward_weight", layer, turn.micro)
        else:
            yield from self._backward(first, last, turn)

    def _forward(self, first: int, last: int, micro: int) -> Iterator[Instruction]:
        if first == 0 or last == self._end:  # tokens feed the embedding and the loss
            yield Instruction("load_batch", None, micro)
        if first > 0:
            yield Instruction("receive", first - 1, micro)
        for layer in range(first, last):
            yield Instruction("forward", layer, micro)
            if layer - 1 in self._travelling:
                yield Instruction("offload_activation", layer - 1, micro)
        if last < self._end:
            yield Instruction("send", last - 1, micro)

    def _backward(self, first: int, last: int, turn: Pass) -> Iterator[Instruction]:
        if last < self._end:
            yield Instruction("receive", last - 1, turn.micro)
        for layer in reversed(range(first, last)):
            if layer - 1 in self._travelling:
                yield Instruction("reload_activation", layer - 1, turn.micro)
            if layer in self._again:
                yield Instruction("recompute", layer, turn.micro)
            yield Instruction(turn.kind, layer, turn.micro)
        if first > 0:
            yield Instruction("send", first - 1, turn.micro)
