"""Lower bounds on memory and time of plans in phases, without their programs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from windlass.cost import InstructionCosts
from windlass.program import (
    Instruction,
    InstructionKind,
    LayerSizes,
    PeerMap,
    is_recomputed,
    selective_layers,
)
from windlass.schema import GradientReach, Graph, Machine, Plan, Stage


def min_stage_bytes(
    plan: Plan, sizes: Sequence[LayerSizes], owners: Sequence[int] = (), *, first_trained: int = 0
) -> int:
    """Least device memory of the fullest stage, without the process itself.

    Args:
        plan: a plan in phases.
        sizes: sizes of its layers.
        owners: layers that own weights of the last one.
        first_trained: the layer where the backward pass ends.
    """
    return max(_stage_bytes(plan, stage, sizes, owners, first_trained) for stage in plan.stages)


def max_layer_bytes(plan: Plan, sizes: Sequence[LayerSizes]) -> int:
    """Least device memory for the largest layer, in any phases; as in `min_stage_bytes`."""
    return max(_phase_bytes(plan, (layer,)) for layer in set(sizes))


def waiting_activation_bytes(
    plan: Plan, sizes: Sequence[LayerSizes], *, first_trained: int = 0
) -> int:
    """Bytes of activations that wait on the fullest stage between forward and backward.

    All micro-batches run through all phases but the last before any of them goes backward, and
    through the last one too if another stage follows. Each has left what the previous stage has
    sent, the outputs between recomputed layers unless these are offloaded, and all that the last
    phase keeps. Layers before the first trained one leave nothing.
    """
    return plan.batch.accumulation * max(
        _waiting_bytes(plan, stage, sizes, first_trained) for stage in plan.stages
    )


def _waiting_bytes(
    plan: Plan, stage: Stage, sizes: Sequence[LayerSizes], first_trained: int
) -> int:
    """Bytes that one micro-batch leaves on a stage."""
    begin_backward = max(stage.first_layer, first_trained)
    begin, end = stage.phases[-1]
    left = (
        sizes[stage.first_layer - 1].output
        if begin_backward == stage.first_layer > 0 and begin > stage.first_layer
        else 0
    )
    if not plan.is_offloaded("activations"):
        left += sum(
            layer.output for layer in sizes[begin_backward : max(begin_backward, begin - 1)]
        )
    if end < len(sizes):
        left += sum(sizes[at].saved for at in range(begin, end) if not is_recomputed(plan, at))
    return left


def _stage_bytes(
    plan: Plan,
    stage: Stage,
    sizes: Sequence[LayerSizes],
    owners: Sequence[int],
    first_trained: int,
) -> int:
    """The most that any phase holds while its last micro-batch but one runs backward.

    Then all its weights are there and its gradients are created, beside what never leaves: the
    first phase's weights with their gradients where the last layer, whose backward comes first, has
    added to them, and what the previous stage has sent for each micro-batch. The gradient of what
    enters the phase waits for each micro-batch that has run.
    """
    (first, end), count = stage.phases[0], plan.batch.accumulation
    staying = sum(each.weight_shard for each in sizes[first:end])
    if count > 1 and stage.end_layer == len(sizes):
        tied = [sizes[owner] for owner in owners if first <= owner < end]
        staying += sum(each.gradients + each.sparse_rows for each in tied)
    if first > first_trained:
        staying += sizes[first - 1].output * count

    def beside(begin: int, end: int) -> int:
        if begin == first or end <= first_trained:
            return 0
        gradients = sizes[begin - 1].output if begin > first_trained else 0
        return staying + max(0, count - 2) * gradients

    return max(
        _phase_bytes(plan, sizes[begin:end]) + beside(begin, end) for begin, end in stage.phases
    )


def _phase_bytes(plan: Plan, layers: Sequence[LayerSizes]) -> int:
    """Bytes of layers that are on the device together, while one of them runs backward."""
    there = sum(each.weights for each in layers)
    if plan.batch.accumulation > 1:
        there += sum(each.gradients + each.sparse_rows for each in layers)
    return there + max(each.saved + each.backward_peak for each in layers)


class _PhaseSeconds(NamedTuple):
    """Seconds of one phase's passes, of all micro-batches."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class LayerPassTimes:
    """Seconds of each layer's passes of one micro-batch, with their tensor-parallel collectives."""

    forward: tuple[float, ...]
    again: tuple[float, ...]
    first: tuple[float, ...]
    """Backward passes of the first micro-batch, which creates the gradients."""
    backward: tuple[float, ...]
    """Backward passes of each further micro-batch, which adds to them."""

    @classmethod
    def of(cls, plan: Plan, graph: Graph, machine: Machine) -> "LayerPassTimes":
        """The passes of a plan; they do not depend on its phases."""
        costs, peers = InstructionCosts(plan, graph, machine), PeerMap(plan, graph)
        kinds = tuple(graph.layer_kinds())
        known: dict[tuple[InstructionKind, int, str, GradientReach], float] = {}

        def seconds(kind: InstructionKind, micro: int) -> Iterator[float]:
            for layer in range(graph.layers):
                each = Instruction(kind, layer, micro)
                key = kind, micro, kinds[layer].name, graph.gradient_reach(layer)
                if key not in known:
                    exchange = (
                        costs.communication_seconds(each) if peers.is_collective(each) else 0.0
                    )
                    known[key] = costs.terms(each).total + exchange
                yield known[key]

        return cls(
            forward=tuple(seconds("forward", 1)),
            again=tuple(seconds("recompute", 1)),
            first=tuple(seconds("backward", 0)),
            backward=tuple(seconds("backward", 1)),
        )


class PassTimes:
    """Times of layers, priced once for all plans that differ in sharding, phases or recompute."""

    def __init__(self, graph: Graph, machine: Machine) -> None:
        self._graph, self._machine = graph, machine
        self._known: dict[tuple[object, ...], LayerPassTimes] = {}

    def of(self, plan: Plan) -> LayerPassTimes:
        """The passes of a plan in phases."""
        key = (
            plan.parallel, plan.precision, plan.compile, plan.loss, plan.attention,
            plan.batch, selective_layers(plan),
        )  # fmt: skip
        if key not in self._known:
            self._known[key] = LayerPassTimes.of(plan, self._graph, self._machine)
        return self._known[key]


def min_step_seconds(plan: Plan, times: LayerPassTimes) -> float:
    """Least seconds of a step: one way through all stages, or the passes of its slowest stage.

    The way: a stage sends nothing on before all micro-batches have passed all of its phases but the
    last, and nothing back before they have passed all but the first backward. So only the last
    stage's neighbours ever work beside it; the more phases, the less a pipeline gains.
    """
    works = [_stage_passes(plan, stage, times) for stage in plan.stages]
    onward = sum(sum(each.forward for each in phases[:-1]) for phases in works[:-1])
    back = sum(sum(each.backward for each in phases[1:]) for phases in works[1:])
    turning = sum(each.forward for each in works[-1])
    way = onward + turning + back + (sum(each.backward for each in works[0]))
    return max(way, *(sum(map(sum, phases)) for phases in works))


def _stage_passes(plan: Plan, stage: Stage, times: LayerPassTimes) -> list[_PhaseSeconds]:
    found = []
    for begin, end in stage.phases:
        layers = range(begin, end)
        again = sum(times.again[at] for at in layers if is_recomputed(plan, at))
        count = plan.batch.accumulation
        further = (count - 1) * sum(times.backward[begin:end])
        backward = sum(times.first[begin:end]) + further + count * again
        found.append(_PhaseSeconds(count * sum(times.forward[begin:end]), backward))
    return found
