"""Layer by layer, what the closed form adds up: seconds and bytes as arrays over the chain.

What a pass takes and holds depends on how a layer is sliced and computed, and on the micro-batch
(`Setting`); what its weights, gradients and state take, and what replicas exchange of them, on how
replicas share them (`Sharing`). Both are read off the clock's own prices, once for each kind.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.links import Links
from windlass.cost.step import StepCost
from windlass.program.instruction import Instruction, Kind
from windlass.program.sizes import StateSizes, layer_sizes, rows_bytes, state_sizes
from windlass.program.ties import owners
from windlass.spec.graph import Graph, LayerKind, Precision
from windlass.spec.machine import Machine
from windlass.spec.plan import Batch, Cut, Plan, Sharding, Stage

Floats = npt.NDArray[np.float64]

_PARTED = 2
"""Stages of a plan in which a tied layer and its owner may lie apart."""


class Setting(NamedTuple):
    """What the passes of a layer depend on, the length of a sequence apart."""

    tensor: int
    precision: Precision
    compiled: bool
    micro: int
    sums: bool
    """Whether a step has several micro-batches, so that their gradients are summed."""
    parted: bool
    """Whether there are several stages."""
    replicas: int = 1
    """Whose slices exchange at the same time, on the same links."""


class Sharing(NamedTuple):
    """What the state of a layer, and what replicas exchange of it, depend on."""

    tensor: int
    precision: Precision
    sums: bool
    replicas: int
    weights: int
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNumbers:
    """Of one setting, an element for each layer: seconds of its passes and bytes that they hold."""

    forward: Floats
    backward: Floats
    backward_input: Floats
    backward_weight: Floats
    sum_first: Floats
    """Adding the first micro-batch's gradients to what is there."""
    sum_later: Floats
    load_seconds: float
    output: Floats
    kept: Floats
    forward_peak: Floats
    backward_peak: Floats
    fresh: Floats
    largest: Floats
    rows_only: npt.NDArray[np.bool_]
    gradients: Floats
    weights: Floats
    token_bytes: float
    gradient_bytes: int
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNumbers:
    """Of one sharing, an element for each layer: bytes of its state and seconds that it costs."""

    weights: Floats
    """Held between uses."""
    optimizer: Floats
    gradients: Floats
    shard: Floats
    gather: Floats
    reduce: Floats
    update: Floats
    spread: Floats
    norm_bytes: Floats
    norm_launches: Floats


class Chain:
    """Prices of a chain of layers on a machine, kept once found.

    Args:
        base: says sequence, moments, clipping and labels; the rest of it does not matter.
        graph: of the chain.
        machine: that it runs on.
    """

    def __init__(self, base: Plan, graph: Graph, machine: Machine) -> None:
        self.base, self.graph, self.machine = base, graph, machine
        names = [kind.name for kind in graph.layer_kinds()]
        self._names = tuple(dict.fromkeys(names))
        self._of = np.array([self._names.index(name) for name in names])
        self._first = tuple(names.index(name) for name in self._names)
        self.layers = len(names)
        self.tied = tuple(
            (layer, owner)
            for layer, owned in enumerate(owners(graph))
            for owner in owned
            if owner != layer
        )
        """Layers that borrow weights, each with the layer that owns them."""
        self._alone: Callable[[Setting], PassNumbers] = cache(self._alone_)
        self.passes: Callable[[Setting], PassNumbers] = cache(self._passes)
        self.states: Callable[[Sharing], StateNumbers] = cache(self._states)
        self.rows: Callable[[Setting, int], Floats] = cache(self._rows)
        self.lent_elements: Callable[[int], float] = cache(self._lent_elements)
        self._links: Callable[[int, int, int], Links] = cache(self._links_of)
        self._costs: Callable[[Sharing], StepCost] = cache(self._costs_of)

    def plan_of(self, setting: Setting) -> Plan:
        """A plan of that setting, on one replica."""
        stages = _PARTED if setting.parted else 1
        ends = (0, self.layers) if stages == 1 else (0, self.layers - 1, self.layers)
        return self.base.model_copy(
            update={
                "order": "1f1b",
                "interleave": 1,
                "precision": setting.precision,
                "compile": setting.compiled,
                "cut": Cut.model_construct(
                    pipeline=stages, tensor=setting.tensor, replicas=setting.replicas
                ),
                "sharding": Sharding.model_construct(weights=1, optimizer=1),
                "batch": Batch.model_construct(
                    sequence=self.base.batch.sequence,
                    micro=setting.micro,
                    accumulation=2 if setting.sums else 1,
                ),
                "stages": tuple(
                    Stage.model_construct(phases=((first, last),), recompute="none")
                    for first, last in pairwise(ends)
                ),
            }
        )

    def sharing_plan(self, sharing: Sharing) -> Plan:
        """A plan of that sharing, in one stage."""
        tensor, precision, sums, replicas, weights, optimizer = sharing
        setting = Setting(tensor, precision, False, 1, sums, False, replicas)
        return self.plan_of(setting).model_copy(
            update={
                "sharding": Sharding.model_construct(weights=weights, optimizer=optimizer),
            }
        )

    def _rows(self, setting: Setting, micros: int) -> Floats:
        """What looked-up rows of earlier micro-batches take, for each layer."""
        plan, kinds = self.plan_of(setting), self.kinds(setting.tensor)
        batch = plan.batch.model_copy(update={"accumulation": micros})
        plan = plan.model_copy(update={"batch": batch})
        return self._spread(lambda _, kind: rows_bytes(plan, kinds[kind]))

    def message_seconds(self, setting: Setting, pipeline: int, nbytes: float) -> float:
        """Seconds of a message between stages; none where there are no others."""
        if not self.machine.links or pipeline == 1:
            return 0.0
        return self._links(setting.tensor, pipeline, setting.replicas).message_seconds(nbytes)

    def _links_of(self, tensor: int, pipeline: int, replicas: int) -> Links:
        plan = self.plan_of(Setting(tensor, "float32", False, 1, True, True, replicas))
        cut = plan.cut.model_copy(update={"pipeline": pipeline})
        plan = plan.model_copy(update={"cut": cut})
        return Links(plan, self.graph, self.machine)

    def take_over_seconds(self, setting: Setting, elements: float) -> float:
        """Seconds of adding the gradient of lent weights to the owner's."""
        costs = StepCost(self.plan_of(setting), self.graph, self.machine)
        return costs.take_over_seconds(elements)

    def norm_rates(self, sharing: Sharing, nbytes: Floats) -> Floats:
        """Bytes/s of the norm over so many bytes each."""
        costs = self._costs(sharing)
        return np.array([costs.norm_rate(max(1.0, each)) for each in nbytes])

    def _lent_elements(self, tensor: int) -> float:
        """Elements that the first tied layer borrows."""
        name = self._names[self._of[self.tied[0][0]]]
        tied = (p.count for p in self.kinds(tensor)[name].parameters if p.tied_to is not None)
        return float(sum(tied))

    def kinds(self, tensor: int) -> Mapping[str, LayerKind]:
        """The kinds of layer, whole or as one of t slices."""
        return self.graph.cut(tensor).kinds

    def _spread(self, of_kind: Callable[[int, str], float]) -> Floats:
        """A number of each kind, found at its first layer, for all layers."""
        found = [of_kind(at, name) for at, name in zip(self._first, self._names, strict=True)]
        return np.asarray(np.array(found, dtype=np.float64)[self._of])

    def _passes(self, setting: Setting) -> PassNumbers:
        """Passes with what slices exchange in them, which depends on how many replicas do so."""
        alone = self._alone(setting._replace(replicas=1))
        if setting.tensor == 1:
            return alone
        links = Links(self.plan_of(setting), self.graph, self.machine)

        def exchanged(kind: Kind) -> Floats:
            return self._spread(lambda layer, _: links.seconds(Instruction(kind, layer, 0)))

        return replace(
            alone,
            forward=alone.forward + exchanged("forward"),
            backward=alone.backward + exchanged("backward"),
            backward_input=alone.backward_input + exchanged("backward input"),
            backward_weight=alone.backward_weight + exchanged("backward weight"),
        )

    def _alone_(self, setting: Setting) -> PassNumbers:
        plan, kinds = self.plan_of(setting), self.kinds(setting.tensor)
        costs = StepCost(plan, self.graph, self.machine)

        def seconds(kind: Kind, micro: int = 0) -> Floats:
            def of_kind(layer: int, _: str) -> float:
                return costs.of(Instruction(kind, layer, micro)).total

            return self._spread(of_kind)

        def parted(layer: int, _: str) -> float:
            instruction = Instruction("backward weight", layer, 0)
            return costs.of(instruction).total - costs.sum_seconds(layer, first=True)

        sums = (
            self._spread(lambda layer, _: costs.sum_seconds(layer, first=True)),
            self._spread(lambda layer, _: costs.sum_seconds(layer, first=False)),
        )
        sizes = {name: layer_sizes(plan, kinds[name]) for name in self._names}

        def nbytes(name: str) -> Floats:
            return self._spread(lambda _, kind: getattr(sizes[kind], name))

        return PassNumbers(
            forward=seconds("forward"),
            backward=seconds("backward") - sums[0],
            backward_input=seconds("backward input"),
            backward_weight=self._spread(parted),
            sum_first=sums[0],
            sum_later=sums[1],
            load_seconds=costs.of(Instruction("load", None, 0)).total,
            **{name: nbytes(name) for name in _PASS_BYTES},
            rows_only=nbytes("rows_only").astype(bool),
            token_bytes=2 * setting.micro * plan.batch.sequence * 8.0,
            gradient_bytes=plan.gradient_bytes,
            weight_bytes=plan.weight_bytes,
        )

    def _costs_of(self, sharing: Sharing) -> StepCost:
        return StepCost(self.sharing_plan(sharing), self.graph, self.machine)

    def _states(self, sharing: Sharing) -> StateNumbers:
        plan, kinds = self.sharing_plan(sharing), self.kinds(sharing.tensor)
        links = Links(plan, self.graph, self.machine) if self.machine.links else None
        costs = self._costs(sharing)
        sizes = {name: state_sizes(plan, kinds[name]) for name in self._names}

        def nbytes(of: Callable[[StateSizes], float]) -> Floats:
            return self._spread(lambda _, kind: of(sizes[kind]))

        def exchange(kind: Kind) -> Floats:
            if links is None:
                return np.zeros(self.layers)
            owned = nbytes(lambda s: s.weights > 0)
            return owned * self._spread(lambda layer, _: links.seconds(Instruction(kind, layer)))

        reduces = sharing.replicas > 1 or sharing.tensor > 1
        return StateNumbers(
            weights=nbytes(lambda s: s.held),
            optimizer=nbytes(lambda s: s.optimizer),
            gradients=nbytes(lambda s: s.gradients),
            shard=nbytes(lambda s: s.shard),
            gather=exchange("gather") if sharing.weights > 1 else np.zeros(self.layers),
            reduce=exchange("reduce") if reduces else np.zeros(self.layers),
            update=self._spread(lambda layer, _: costs.of(Instruction("update", layer)).total),
            spread=exchange("spread")
            if sharing.optimizer > sharing.weights
            else np.zeros(self.layers),
            norm_bytes=nbytes(lambda s: s.shard),
            norm_launches=self._spread(lambda _, kind: costs.norm_launches(kinds[kind])),
        )


_PASS_BYTES = (
    "output", "kept", "forward_peak", "backward_peak", "fresh", "largest", "gradients", "weights",
)  # fmt: skip
