"""Weave: what a stage does with weights and gradients, set among its passes as early as is exact.

Passes say when a layer is used. From that follows the rest: borrowed weights come before their
first use; shared weights become a shard again after their last; a gradient is handed over, taken
over, reduced, and leaves or is used, after the last backward pass that adds to it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from windlass.program.instruction import GRADIENT_PASSES, WEIGHT_PASSES, Instruction
from windlass.program.memory.stage_tensors import Holding
from windlass.program.phases import departing, owned, resident
from windlass.program.zero_sharding import parts
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan

_BACK = (*GRADIENT_PASSES, "recompute", "reload_activation")
"""What a backward pass of a stage consists of, up to what it sends."""


class Weave:
    """Sets exchanges and updates of one stage among its passes.

    Args:
        plan: legal.
        graph: that it cuts.
        stage: index of the stage.
    """

    def __init__(self, plan: Plan, graph: Graph, stage: int) -> None:
        self._plan = plan
        self.holding = Holding(plan, graph, stage)
        self._owned = owned(plan, graph, stage)
        self._departing = frozenset(departing(plan, graph, stage))
        self._resident = frozenset(resident(plan, graph, stage))
        self._shares = plan.sharding.parameters > 1

    def woven(self, passes: Sequence[Instruction]) -> Iterator[Instruction]:
        """The passes with all that hangs on them."""
        cloth = _Cloth(passes, self.holding)
        for layer, loan in self.holding.borrows.items():
            cloth.before[cloth.first[layer]].append(Instruction("recv_tied_weights", layer))
            cloth.after[cloth.added[loan.owner_layer]].append(Instruction("send_tied_grads", layer))
        layers = sorted(self._owned, key=cloth.added.__getitem__)
        for layer in layers:
            if self._shares:
                cloth.after[cloth.read[layer]].append(Instruction("free_weights", layer))
            cloth.after[self._summing(layer, cloth)] += self._summed(layer)
        leaving = [layer for layer in layers if layer in self._departing]
        if self._plan.defers_updates:
            for layer in leaving:
                cloth.after[cloth.added[layer]].append(Instruction("offload_grads", layer))
        else:
            self._update(leaving, cloth)
        return iter(cloth)

    def _summing(self, layer: int, cloth: "_Cloth") -> int:
        """After which pass a gradient is summed over others.

        The stage before waits for the gradient of this one's input, and all those before it too:
        that goes first. Not where gradients that leave, or are there for one micro-batch only,
        make room at once.
        """
        added = cloth.added[layer]
        if self._departing or self._plan.batch.accumulation == 1:
            return added
        return cloth.sent.get(added, added)

    def gather(self, layers: Iterable[int]) -> Iterator[Instruction]:
        """Makes weights whole that are shared; those that have a home leave no shard behind."""
        if self._shares:
            for layer in layers:
                yield Instruction("unshard_weights", layer)
                if self._plan.is_offloaded("parameters"):
                    yield Instruction("free_shard", layer)

    def lend(self, layers: Iterable[int]) -> Iterator[Instruction]:
        """Lends weights that are whole now to the stages that borrow them."""
        here = set(layers)
        for layer, loan in self.holding.lends.items():
            if loan.owner_layer in here:
                yield Instruction("send_tied_weights", layer)

    def spread(self, layer: int) -> Iterator[Instruction]:
        """Puts what the device has updated together with what the others have."""
        if layer in self._owned and parts(self._plan) > 1:
            yield Instruction("all_gather_params", layer)

    def forget(self, layer: int) -> Instruction:
        """Frees what is near of a layer that is not in use; its home holds the same."""
        return Instruction("free_shard" if self._shares else "free_weights", layer)

    def _summed(self, layer: int) -> Iterator[Instruction]:
        """What follows the last backward pass that adds to a layer's gradient."""
        for name, loan in self.holding.lends.items():
            if loan.owner_layer == layer:
                yield Instruction("accumulate_tied_grads", name)
        if self.holding.reduces(layer):
            yield Instruction("reduce_grads", layer)

    def _update(self, layers: Sequence[int], cloth: "_Cloth") -> None:
        """Sets updates where each gradient is whole.

        An update goes on beside the passes that follow. To put its parts together at once would
        wait for its end, so that comes when the next layer's update begins, or the weights go.
        """
        for layer, following in pairwise((*layers, None)):
            if layer is None:
                return
            here = cloth.added[layer]
            then = cloth.end if following is None else cloth.added[following]
            cloth.after[here].append(Instruction("update", layer))
            goes = cloth.released.get(layer, here)
            (cloth.before[goes] if here < goes <= then else cloth.after[then]).extend(
                self._agree(layer)
            )

    def _agree(self, layer: int) -> Iterator[Instruction]:
        """What follows an update during the backward pass."""
        yield from self.spread(layer)
        if self._shares and layer not in self._resident:
            yield self.forget(layer)


class _Cloth:
    """Passes, when each layer is used in them, and what is set before and after each."""

    def __init__(self, passes: Sequence[Instruction], holding: Holding) -> None:
        self._passes = passes
        self.before: dict[int, list[Instruction]] = defaultdict(list)
        self.after: dict[int, list[Instruction]] = defaultdict(list)
        self.first: dict[int, int] = {}
        """Where a layer is used first."""
        self.read: dict[int, int] = {}
        """Where a pass needs an owner's weights last."""
        self.added: dict[int, int] = {}
        """Where something is added to an owner's gradient last."""
        self.released: dict[int, int] = {}
        """Where a layer's whole weights are freed last."""
        self.sent: dict[int, int] = {}
        """Where the gradient leaves for the stage before that a backward pass is on the way to."""
        self.end = len(passes) - 1
        onward: list[int] = []
        for index, (kind, layer, _) in enumerate(passes):
            if kind in _BACK:
                onward.append(index)
            else:
                if kind == "send":
                    self.sent.update(dict.fromkeys(onward, index))
                onward.clear()
            if layer is None:
                continue
            if kind == "free_weights":
                self.released[layer] = index
            elif kind in WEIGHT_PASSES or kind in GRADIENT_PASSES:
                self.first.setdefault(layer, index)
                for target in holding.targets(layer):
                    # Also the weights' part of a backward pass: autograd's graph, from which it
                    # goes on, ends in them.
                    self.read[target] = index
                    if kind in GRADIENT_PASSES:
                        self.added[target] = index

    def __iter__(self) -> Iterator[Instruction]:
        for index, instruction in enumerate(self._passes):
            yield from self.before[index]
            yield instruction
            yield from self.after[index]
