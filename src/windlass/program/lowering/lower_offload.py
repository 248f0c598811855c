"""Streaming: the program of a stage whose weights have their home beyond the near tier.

Forward, phase by phase: all micro-batches run through one phase while the weights of the next come.
Backward, in reverse: while a phase computes, the weights of the one before it come, and each
layer's gradient leaves as soon as its last micro-batch has added to it. So weights move once in
each direction of a step, however many micro-batches it has. In a pipeline every stage does so: its
first phase takes each micro-batch from the stage before, its last one hands it on.

Where replicas share weights, each fetches its shard; a phase gathers its layers as it begins, so
that only one phase is whole at a time, beside the shards of the next.

A layer's micro-batches add to a gradient in the order that they do in memory, so that the sums are
the same bit for bit. Layers of two phases that share a weight do not take turns as in memory: the
later one's micro-batches all come first.

With clipping the norm is known only at the end. Layers that are away by then are updated at their
first fetch in the next step, or by `settle` if there is none.

Source: the order of passes is that of Pudipeddi et al. 2020, L2L, arXiv:2002.05645, with phases in
place of single layers.
"""

from collections.abc import Iterable, Iterator

from windlass.program.instruction import Instruction
from windlass.program.lowering.insert_collectives import Weave
from windlass.program.phases import departing, needs, owned, put_off, resident, travelling
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

_Instructions = tuple[Instruction, ...]


def stream(plan: Plan, graph: Graph, stage: int) -> tuple[_Instructions, _Instructions]:
    """The instructions of one step of a stage, and those that settle what it puts off.

    Args:
        plan: legal, with weights far.
        graph: that it cuts.
        stage: index of the stage.
    """
    lowering = _Stream(plan, graph, stage)
    return tuple(lowering.step()), tuple(lowering.settle())


class _Stream:
    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self._plan = plan
        self._phases = plan.stages[stage].phases
        self._last = len(self._phases) - 1
        self._starts = plan.stages[stage].first
        self._ends = plan.stages[stage].last
        self._turns = self._ends == graph.layers
        """Whether the stage ends the chain: then its last phase turns at once."""
        self._micros = range(plan.batch.accumulation)
        self._needs = needs(plan, graph, stage)
        self._owned = owned(plan, graph, stage)
        self._resident = resident(plan, graph, stage)
        self._put_off = put_off(plan, graph, stage)
        self._departing = frozenset(departing(plan, graph, stage))
        self._travelling = frozenset(travelling(plan, stage))
        self._weave = Weave(plan, graph, stage)
        self._again = self._weave.holding.again
        self._shares = plan.sharding.parameters > 1

    def step(self) -> Iterator[Instruction]:
        """One step."""
        yield from self._weave.woven((*self._all_forward(), *self._all_backward()))
        if self._plan.clip:
            yield Instruction("grad_norm")
        for layer in self._owned:
            if layer not in self._departing:
                yield Instruction("update", layer)
                yield from self._weave.spread(layer)
        yield Instruction("sync")

    def settle(self) -> Iterator[Instruction]:
        """What the step has put off, one layer after the other beside the first phase."""
        for layer in self._put_off:
            yield Instruction("update", layer)
            yield from self._weave.spread(layer)
            yield self._weave.forget(layer)

    def _all_forward(self) -> Iterator[Instruction]:
        used = set[int]()
        for phase in range(self._last + 1):
            if phase < self._last:
                for layer in self._only(phase + 1, phase):
                    due = layer in self._put_off and layer not in used
                    yield Instruction("update" if due else "prefetch_weights", layer)
            yield from self._begin(phase, used)
            if phase == self._last and self._turns:
                return
            for micro in self._micros:
                yield from self._forward(phase, micro)
            if phase < self._last:
                yield from self._release(self._only(phase, phase + 1))

    def _begin(self, phase: int, used: set[int]) -> Iterator[Instruction]:
        """Makes a phase's weights whole; those that are used first are brought up to date and lent.

        An update goes on beside the phase before: only now is it time to put its parts together.
        """
        layers = self._only(phase, phase - 1) if phase else self._needs[0]
        new = [layer for layer in layers if layer not in used]
        for layer in new:
            if layer in self._put_off:
                yield from self._weave.spread(layer)
        yield from self._weave.gather(layers)
        yield from self._weave.lend(new)
        used.update(layers)

    def _all_backward(self) -> Iterator[Instruction]:
        for phase in reversed(range(self._last + 1)):
            if phase > 0:
                for layer in reversed(self._only(phase - 1, phase)):
                    yield Instruction("prefetch_weights", layer)
            if phase < self._last:
                yield from self._weave.gather(reversed(self._only(phase, phase + 1)))
            for micro in self._micros:
                if phase == self._last and self._turns:
                    # Its weights are there, so that nothing has to be kept for it.
                    yield from self._forward(phase, micro)
                yield from self._backward(phase, micro)
            if phase > 0:
                yield from self._release(self._leaving(phase))

    def _leaving(self, phase: int) -> tuple[int, ...]:
        """The layers that are released after a phase's backward passes.

        Where weights are shared, those that come again; the others were released at their last use.
        """
        layers = self._only(phase, phase - 1)
        if not self._shares:
            return layers
        lower = {layer for needed in self._needs[:phase] for layer in needed}
        return tuple(layer for layer in layers if layer in lower)

    def _only(self, phase: int, other: int) -> tuple[int, ...]:
        """The layers that one phase needs and the other does not."""
        return tuple(layer for layer in self._needs[phase] if layer not in self._needs[other])

    def _release(self, layers: Iterable[int]) -> Iterator[Instruction]:
        for layer in layers:
            yield Instruction("free_weights", layer)

    def _forward(self, phase: int, micro: int) -> Iterator[Instruction]:
        first, last = self._phases[phase]
        if first == 0 or (self._turns and self._starts > 0 and phase == self._last):
            yield Instruction("load_batch", None, micro)
        if first == self._starts and first > 0:
            yield Instruction("receive", first - 1, micro)
        for layer in range(first, last):
            yield Instruction("forward", layer, micro)
            if layer - 1 in self._travelling:
                yield Instruction("offload_activation", layer - 1, micro)
        if last == self._ends and not self._turns:
            yield Instruction("send", last - 1, micro)

    def _backward(self, phase: int, micro: int) -> Iterator[Instruction]:
        first, last = self._phases[phase]
        if last == self._ends and not self._turns:
            yield Instruction("receive", last - 1, micro)
        for layer in reversed(range(first, last)):
            if layer - 1 in self._travelling:
                yield Instruction("reload_activation", layer - 1, micro)
            if layer in self._again:
                yield Instruction("recompute", layer, micro)
            yield Instruction("backward", layer, micro)
        if first == self._starts and first > 0:
            yield Instruction("send", first - 1, micro)
