"""Lowering: a plan and a graph become one list of instructions for each device.

A message is named by the layer whose output crosses the boundary. So a stage that sends a layer of
its own sends that layer's output onward, and one that sends the layer before its first sends the
gradient of that output back; receiving is the mirror image.
"""

from collections.abc import Iterator

from windlass.program.instruction import Instruction, Program
from windlass.program.layout import place_of
from windlass.program.legal import require_lowerable
from windlass.program.phases import recomputed
from windlass.program.schedule import ORDERS
from windlass.program.stream import stream
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan


def lower(plan: Plan, graph: Graph) -> tuple[Program, ...]:
    """The programs of one step, one for each device, in the order of `layout.place_of`.

    Raises:
        Faults: the plan asks for what this version does not yet lower, or does not cover the graph.
    """
    require_lowerable(plan, graph)
    label = plan.label
    if plan.streamed:
        step, settle = stream(plan, graph)
        return (Program.model_construct(plan=label, device=0, instructions=step, settle=settle),)
    stages = [tuple(_stage(plan, graph, stage)) for stage in range(plan.cut.pipeline)]
    # Not validated again: tens of thousands of instructions were just built from typed values.
    return tuple(
        Program.model_construct(
            plan=label, device=device, instructions=stages[place_of(device, plan.cut).stage]
        )
        for device in range(plan.cut.devices)
    )


def _stage(plan: Plan, graph: Graph, index: int) -> Iterator[Instruction]:
    stage, micros = plan.stages[index], plan.batch.accumulation
    again = {layer for layer in range(stage.first, stage.last) if recomputed(plan, graph, layer)}
    for step in ORDERS[plan.order](plan.cut.pipeline, index, micros):
        if step.kind == "forward":
            yield from _forward(graph, stage.first, stage.last, step.micro)
        else:
            reduces = plan.cut.replicas > 1 and step.micro == micros - 1
            yield from _backward(graph, (stage.first, stage.last), step.micro, again, reduces)
    if plan.clip:
        yield Instruction("norm")
    for layer in range(stage.first, stage.last):
        yield Instruction("update", layer)
    yield Instruction("sync")


def _forward(graph: Graph, first: int, last: int, micro: int) -> Iterator[Instruction]:
    if first == 0 or last == graph.layers:  # tokens feed the embedding and the loss
        yield Instruction("load", None, micro)
    if first > 0:
        yield Instruction("receive", first - 1, micro)
    for layer in range(first, last):
        yield Instruction("forward", layer, micro)
    if last < graph.layers:
        yield Instruction("send", last - 1, micro)


def _backward(
    graph: Graph, bounds: tuple[int, int], micro: int, again: set[int], reduces: bool
) -> Iterator[Instruction]:
    first, last = bounds
    if last < graph.layers:
        yield Instruction("receive", last - 1, micro)
    for layer in reversed(range(first, last)):
        if layer in again:
            yield Instruction("recompute", layer, micro)
        yield Instruction("backward", layer, micro)
        if reduces:
            yield Instruction("reduce", layer)
    if first > 0:
        yield Instruction("send", first - 1, micro)
