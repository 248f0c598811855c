"""Lowering: turns a plan and a graph into one list of instructions for each device.

A message is named after the layer whose output crosses the stage boundary. A stage that sends one
of its own layers sends that layer's output to the next stage; a stage that sends the layer before
its first sends the gradient of that output back. Receives mirror this.

Sharded weights are unsharded once for each model chunk, before its first pass, and stay so until
the last pass that needs them: they are communicated once a step, however many micro-batches it has.
"""

from collections.abc import Iterator

from windlass.program.device_mesh import chunks_of_stage, mesh_coord
from windlass.program.instruction import Instruction, Program
from windlass.program.lowering.insert_collectives import CollectiveInserter
from windlass.program.lowering.lower_offload import lower_offloaded_stage
from windlass.program.phases import (
    offloaded_activation_layers,
    owned_layers,
    phase_needs,
    trained_layers,
)
from windlass.program.pipeline_schedules import PipelinePass, stage_passes
from windlass.program.validate_plan import require_lowerable
from windlass.schema import Graph, Plan


def lower(plan: Plan, graph: Graph) -> tuple[Program, ...]:
    """The programs of one step, one for each device, in the order of their global ranks.

    Raises:
        InputErrors: this version cannot lower the plan, or the plan does not cover the graph.
    """
    stages = lower_stages(plan, graph)
    coords = (mesh_coord(device, plan.parallel) for device in range(plan.parallel.devices))
    return tuple(
        stages[coord.stage].model_copy(update={"device": device})
        for device, coord in enumerate(coords)
    )


def lower_stages(plan: Plan, graph: Graph) -> tuple[Program, ...]:
    """The program of the first device of each stage, which its other devices run too.

    Raises:
        InputErrors: this version cannot lower the plan, or the plan does not cover the graph.
    """
    require_lowerable(plan, graph)
    label = plan.label
    return tuple(_lower_stage(plan, graph, stage, label) for stage in range(plan.parallel.pipeline))


def lower_stage(plan: Plan, graph: Graph, stage: int) -> Program:
    """The program of the first device of one stage, which its other devices run too.

    Raises:
        InputErrors: this version cannot lower the plan, or the plan does not cover the graph.
    """
    require_lowerable(plan, graph)
    return _lower_stage(plan, graph, stage, plan.label)


def _lower_stage(plan: Plan, graph: Graph, stage: int, label: str) -> Program:
    """A stage's program, without validation: its instructions are made from typed values."""
    flushed: tuple[Instruction, ...] = ()
    if plan.is_offloaded("parameters"):
        instructions, flushed = lower_offloaded_stage(plan, graph, stage)
    else:
        instructions = tuple(_ResidentStage(plan, graph, stage).step())
    return Program.model_construct(
        plan=label,
        device=stage * plan.parallel.tensor * plan.parallel.replicas,
        instructions=instructions,
        flush_deferred_updates=flushed,
    )


class _ResidentStage:
    """Lowers a stage whose weights stay in device memory: its passes in the schedule's order."""

    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self._plan, self._stage = plan, stage
        self._end = graph.layers
        self._chunks = [
            (plan.stages[chunk].first_layer, plan.stages[chunk].end_layer)
            for chunk in chunks_of_stage(plan, stage)
        ]
        self._needs = phase_needs(plan, graph, stage)
        self._inserter = CollectiveInserter(plan, graph, stage)
        self._owned = owned_layers(plan, graph, stage)
        self._trained = trained_layers(plan, graph, stage)
        self._recomputed = self._inserter.tensors.recomputed_layers
        self._offloaded_outputs = frozenset(offloaded_activation_layers(plan, graph, stage))
        self._first_trained = graph.first_trained

    def step(self) -> Iterator[Instruction]:
        """The instructions of one step."""
        yield from self._inserter.insert(tuple(self._passes()))
        if self._plan.clip:
            yield Instruction("grad_norm")
        for layer in self._trained if self._plan.offloads else self._inserter.tensors.layers:
            yield Instruction("update", layer)
            yield from self._inserter.all_gather_params(layer)
        yield Instruction("sync")

    def _passes(self) -> Iterator[Instruction]:
        if self._plan.sharding.parameters == 1:
            yield from self._inserter.send_tied_weights(self._owned)
        unsharded: set[int] = set()
        for item in stage_passes(self._plan, self._stage):
            missing = [layer for layer in self._needs[item.chunk] if layer not in unsharded]
            unsharded.update(missing)
            if missing and self._plan.sharding.parameters > 1:
                yield from self._inserter.unshard(missing)
                yield from self._inserter.send_tied_weights(missing)
            yield from self._lower_pass(item)

    def _lower_pass(self, item: PipelinePass) -> Iterator[Instruction]:
        first, end = self._chunks[item.chunk]
        if item.kind == "forward":
            yield from self._forward(first, end, item.micro_batch)
        elif end <= self._first_trained:
            return  # no backward pass comes so far down
        elif item.kind == "backward_weight":
            for layer in reversed(range(max(first, self._first_trained), end)):
                yield Instruction("backward_weight", layer, item.micro_batch)
        else:
            yield from self._backward(first, end, item)

    def _forward(self, first: int, end: int, micro_batch: int) -> Iterator[Instruction]:
        if first == 0 or end == self._end:  # the embedding and the loss take tokens
            yield Instruction("load_batch", None, micro_batch)
        if first > 0:
            yield Instruction("receive", first - 1, micro_batch)
        for layer in range(first, end):
            yield Instruction("forward", layer, micro_batch)
            if layer - 1 in self._offloaded_outputs:
                yield Instruction("offload_activation", layer - 1, micro_batch)
        if end < self._end:
            yield Instruction("send", end - 1, micro_batch)

    def _backward(self, first: int, end: int, item: PipelinePass) -> Iterator[Instruction]:
        if end < self._end:
            yield Instruction("receive", end - 1, item.micro_batch)
        for layer in reversed(range(max(first, self._first_trained), end)):
            if layer - 1 in self._offloaded_outputs:
                yield Instruction("reload_activation", layer - 1, item.micro_batch)
            if layer in self._recomputed:
                yield Instruction("recompute", layer, item.micro_batch)
            yield Instruction(item.kind, layer, item.micro_batch)
        if first > self._first_trained:
            yield Instruction("send", first - 1, item.micro_batch)
