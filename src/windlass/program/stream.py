"""Streaming: the program of a plan whose classes have homes beyond the near tier, on one device.

Forward, phase by phase: all micro-batches run through one phase while the weights of the next come.
Backward, in reverse: while a phase computes, the weights of the one before it come, and each
layer's gradient leaves as soon as its last micro-batch has added to it. So weights move once in
each direction of a step, however many micro-batches it has.

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
from windlass.program.phases import (
    departing,
    needs,
    owning,
    put_off,
    recomputed,
    travelling,
)
from windlass.spec.graph import Graph
from windlass.spec.plan import Plan

_Instructions = tuple[Instruction, ...]


def stream(plan: Plan, graph: Graph) -> tuple[_Instructions, _Instructions]:
    """The instructions of one step, and those that settle what it puts off.

    Args:
        plan: legal, of one stage, with some class far.
        graph: that it cuts.
    """
    lowering = _Stream(plan, graph)
    return tuple(lowering.step()), tuple(lowering.settle())


class _Stream:
    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._plan = plan
        self._phases = plan.stages[0].phases
        self._micros = range(plan.batch.accumulation)
        self._needs = needs(plan, graph)
        self._owning = owning(graph)
        self._put_off = put_off(plan, graph)
        self._departing = frozenset(departing(plan, graph))
        self._travelling = frozenset(travelling(plan, graph))
        self._again = frozenset(
            layer for layer in range(graph.layers) if recomputed(plan, graph, layer)
        )

    def step(self) -> Iterator[Instruction]:
        """One step."""
        if len(self._phases) == 1:
            # Nothing goes away between the passes, so each micro-batch goes back at once.
            for micro in self._micros:
                yield from self._forward(0, micro)
                yield from self._backward(0, micro)
        else:
            yield from self._all_forward()
            yield from self._all_backward()
        if self._plan.clip:
            yield Instruction("norm")
        for layer in self._owning:
            if layer not in self._departing:
                yield Instruction("update", layer)
        yield Instruction("sync")

    def settle(self) -> Iterator[Instruction]:
        """What the step has put off, one layer after the other beside the first phase."""
        for layer in self._put_off:
            yield Instruction("update", layer)
            yield Instruction("release", layer)

    def _all_forward(self) -> Iterator[Instruction]:
        due = set(self._put_off)
        last = len(self._phases) - 1
        for phase in range(last + 1):
            if phase < last:
                for layer in self._only(phase + 1, phase):
                    yield Instruction("update" if layer in due else "fetch", layer)
                    due.discard(layer)
            if phase == last:
                return
            for micro in self._micros:
                yield from self._forward(phase, micro)
            yield from self._release(self._only(phase, phase + 1))

    def _all_backward(self) -> Iterator[Instruction]:
        for phase in reversed(range(len(self._phases))):
            if phase > 0:
                for layer in reversed(self._only(phase - 1, phase)):
                    yield Instruction("fetch", layer)
            for micro in self._micros:
                if phase == len(self._phases) - 1:
                    # Its weights are there, so that nothing has to be kept for it.
                    yield from self._forward(phase, micro)
                yield from self._backward(phase, micro)
            if phase > 0:
                yield from self._release(self._only(phase, phase - 1))

    def _only(self, phase: int, other: int) -> tuple[int, ...]:
        """The layers that one phase needs and the other does not."""
        return tuple(layer for layer in self._needs[phase] if layer not in self._needs[other])

    def _release(self, layers: Iterable[int]) -> Iterator[Instruction]:
        for layer in layers:
            yield Instruction("release", layer)

    def _forward(self, phase: int, micro: int) -> Iterator[Instruction]:
        if phase == 0:
            yield Instruction("load", None, micro)
        for layer in range(*self._phases[phase]):
            yield Instruction("forward", layer, micro)
            if layer - 1 in self._travelling:
                yield Instruction("keep", layer - 1, micro)

    def _backward(self, phase: int, micro: int) -> Iterator[Instruction]:
        for layer in reversed(range(*self._phases[phase])):
            if layer - 1 in self._travelling:
                yield Instruction("restore", layer - 1, micro)
            if layer in self._again:
                yield Instruction("recompute", layer, micro)
            yield Instruction("backward", layer, micro)
            if layer in self._departing and micro == self._micros[-1]:
                yield Instruction("store" if self._plan.deferred else "update", layer)
