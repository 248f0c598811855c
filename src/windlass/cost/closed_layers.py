"""Layer by layer, what the closed form adds up: seconds and bytes as arrays over the chain.

What a pass takes and holds depends on how a layer is sliced and computed, and on the micro-batch
(`Setting`); what its weights, gradients and state take, and what replicas exchange of them, on how
replicas share them (`Block`). Both are read off the clock's own prices, once for each kind.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_states import StateNumbers, StatePrices
from windlass.cost.closed_ways import Block, Setting
from windlass.cost.links import Links, Ways
from windlass.cost.step import StepCost
from windlass.program.exchanged import Inside, Sent
from windlass.program.instruction import Instruction, Kind
from windlass.program.sizes import layer_sizes, rows_bytes
from windlass.program.ties import owners
from windlass.spec.graph import Graph, LayerKind, Precision
from windlass.spec.machine import Curve, Machine
from windlass.spec.plan import Batch, Cut, Home, Plan, Recompute, Sharding, Stage

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_PASSES: tuple[Kind, ...] = ("forward", "backward", "backward input", "backward weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassNumbers:
    """Of one setting: seconds of passes and bytes that they hold, by kind of layer.

    Behind those of all kinds stand layers that keep only what their large products give, by kind
    (`Chain.variants`).
    """

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

    def held(self) -> Floats:
        """The bytes in the order of `HELD`, a row for each."""
        return np.stack([getattr(self, name) for name in HELD])


HELD = (
    "output", "kept", "forward_peak", "backward_peak", "fresh", "largest", "rows_only", "gradients",
    "weights",
)  # fmt: skip
"""What a layer's passes hold, as `PassNumbers` names it."""


class Chain:
    """Prices of a chain of layers on a machine, kept once found.

    Args:
        base: says sequence, moments, clipping and labels; the rest of it does not matter.
        graph: of the chain.
        machine: that it runs on.
    """

    def __init__(self, base: Plan, graph: Graph, machine: Machine) -> None:
        self.base, self.graph, self.machine = base, graph, machine
        self._ways: Ways = {}
        names = [kind.name for kind in graph.layer_kinds()]
        self._names = tuple(dict.fromkeys(names))
        self.sorts = np.array([self._names.index(name) for name in names])
        """Of each layer its kind, as a number."""
        firsts = [_Variant(names.index(name), name) for name in self._names]
        ends = self._names[self.sorts[0]], self._names[self.sorts[-1]]
        again = [
            each._replace(selective=True)
            for each in firsts
            if graph.kinds[each.name].selective and each.name not in ends
        ]
        self._variants = (*firsts, *again)
        places = {each.name: at for at, each in enumerate(self._variants)}
        self.variants = np.array([places[name] for name in self._names])
        """Of each kind the number of those of its layers that keep only what their large products
        give; its own number where there are none."""
        self.layers = len(names)
        self._near, self._away = Home(), Home(optimizer=machine.device.tiers[-1].name)
        self.tied = tuple(
            (layer, owner)
            for layer, owned in enumerate(owners(graph))
            for owner in owned
            if owner != layer
        )
        """Layers that borrow weights, each with the layer that owns them."""
        self.passes: Callable[[Setting], PassNumbers] = cache(self._passes)
        self.held: Callable[[Setting], Floats] = cache(self._held)
        self.states: Callable[[Block], StateNumbers] = cache(
            StatePrices(self._shared_plan, graph, machine, self._ways).of
        )
        self.rows: Callable[[int, int, int], Floats] = cache(self._rows)
        self.lent_elements: Callable[[int], float] = cache(self._lent_elements)
        self._summed: Callable[[Setting], PassNumbers] = cache(self._summed_)
        self._worked: Callable[[Setting], PassNumbers] = cache(self._worked_)
        self._sent: Callable[[Setting], _Exchanges] = cache(self._sent_)
        self._links: Callable[[int, int, int], Links] = cache(self._links_)
        self._costs: Callable[..., StepCost] = cache(self._costs_)
        self._way: Callable[[int, int, int], tuple[float, float]] = cache(self._way_)
        self.take_over_seconds: Callable[[int, Precision, bool], float] = cache(self._take_over)
        self._norm_rate: Callable[[Block], float] = cache(self._norm_rate_)

    def kinds_as(self, modes: Sequence[Recompute]) -> Ints:
        """The kind of each layer, computed again in its way."""
        selective = np.array(modes) == "selective"
        return np.where(selective, self.variants[self.sorts], self.sorts)

    def _shared_plan(self, setting: Setting, weights: int, optimizer: int) -> Plan:
        return self.plan_of(setting, weights=weights, optimizer=optimizer)

    def plan_of(
        self,
        setting: Setting,
        *,
        weights: int = 1,
        optimizer: int = 1,
        recompute: Recompute = "none",
    ) -> Plan:
        """A plan of that setting."""
        ends = (0, self.layers - 1, self.layers) if setting.parted else (0, self.layers)
        return self.base.model_copy(
            update={
                "order": "1f1b",
                "interleave": 1,
                "precision": setting.precision,
                "compile": setting.compiled,
                "home": self._away if setting.moves else self._near,
                "cut": _cut(len(ends) - 1, setting.tensor, setting.replicas),
                "sharding": Sharding.model_construct(_BOTH, weights=weights, optimizer=optimizer),
                "batch": Batch.model_construct(
                    _BATCH,
                    sequence=self.base.batch.sequence,
                    micro=setting.micro,
                    accumulation=2 if setting.sums else 1,
                ),
                "stages": tuple(
                    Stage.model_construct(_STAGE, phases=(pair,), recompute=recompute)
                    for pair in pairwise(ends)
                ),
            }
        )

    def message_ways(self, settings: Sequence[Setting], pipeline: int) -> tuple[Floats, Floats]:
        """Seconds of a byte to another stage, and of a message apart from its bytes, of each."""
        if not self.machine.links or pipeline == 1:
            return np.zeros(len(settings)), np.zeros(len(settings))
        ways = [self._way(each.tensor, pipeline, each.replicas) for each in settings]
        each_byte, each_message = np.array(ways).T
        return each_byte, each_message

    def _way_(self, tensor: int, pipeline: int, replicas: int) -> tuple[float, float]:
        way = self._links(tensor, pipeline, replicas).message_way
        return way.byte_seconds, way.round_seconds

    def _take_over(self, tensor: int, precision: Precision, sums: bool) -> float:
        """Seconds of adding the gradient of lent weights to the owner's."""
        setting = Setting(tensor, precision, False, 1, sums, False)
        return self._costs(setting).take_over_seconds(self.lent_elements(tensor))

    def norm_rates(self, blocks: Sequence[Block], nbytes: Floats) -> Floats:
        """Bytes/s of the norm over so many bytes each, a row for each pair of all blocks."""
        found = rates(self.machine.device.traffic, np.maximum(nbytes, 1.0))
        fixed = [self._norm_rate(block) for block in blocks]
        each = np.repeat(fixed, [len(block.pairs) for block in blocks])[:, None]
        return np.where(np.isnan(each), found, each)

    def _norm_rate_(self, block: Block) -> float:
        """That of any number of bytes; not a number where it depends on it."""
        costs = self._costs(block.setting)
        fixed = {costs.norm_rate(each) for each in (1.0, 1e6, 1e12)}
        return fixed.pop() if len(fixed) == 1 else float("nan")

    def kinds(self, tensor: int) -> Mapping[str, LayerKind]:
        """The kinds of layer, whole or as one of t slices."""
        return self.graph.cut(tensor).kinds

    def _rows(self, tensor: int, micro: int, micros: int) -> Floats:
        """What looked-up rows of earlier micro-batches take, by kind of layer."""
        plan = self.plan_of(Setting(tensor, "float32", False, micro, True, False))
        batch = plan.batch.model_copy(update={"accumulation": micros})
        plan, kinds = plan.model_copy(update={"batch": batch}), self.kinds(tensor)
        return np.array([float(rows_bytes(plan, kinds[each.name])) for each in self._variants])

    def _lent_elements(self, tensor: int) -> float:
        """Elements that the first tied layer borrows."""
        name = self._names[self.sorts[self.tied[0][0]]]
        tied = (p.count for p in self.kinds(tensor)[name].parameters if p.tied_to is not None)
        return float(sum(tied))

    def _links_(self, tensor: int, pipeline: int, replicas: int) -> Links:
        plan = self.base.model_copy(update={"cut": _cut(pipeline, tensor, replicas)})
        return Links(plan, self.graph, self.machine, ways=self._ways)

    def _costs_(self, setting: Setting, selective: bool = False) -> StepCost:
        plan = self.plan_of(setting, recompute="selective" if selective else "none")
        return StepCost(plan, self.graph, self.machine)

    def _selects(self, setting: Setting) -> bool:
        """Whether layers can keep only what their large products give."""
        kinds = self.kinds(setting.tensor)
        again = self._variants[len(self._names) :]
        return not setting.compiled and all(kinds[each.name].selective for each in again)

    def _spread(self, of_kind: Callable[["_Variant"], float]) -> Floats:
        """A number of each variant, found at the first layer of its kind."""
        return np.array([of_kind(each) for each in self._variants], dtype=np.float64)

    def _passes(self, setting: Setting) -> PassNumbers:
        """Passes with what slices exchange in them, which depends on how many replicas do so."""
        alone = self._summed(_alone(setting))
        if setting.tensor == 1:
            return alone
        links = self._links(setting.tensor, 1, setting.replicas)
        sent = self._sent(_alone(setting)._replace(sums=False, parted=False))

        def exchanged(kind: Kind) -> Floats:
            return self._spread(lambda each: sum(map(links.slice_seconds, sent[kind, each])))

        return replace(
            alone,
            forward=alone.forward + exchanged("forward"),
            backward=alone.backward + exchanged("backward"),
            backward_input=alone.backward_input + exchanged("backward input"),
            backward_weight=alone.backward_weight + exchanged("backward weight"),
        )

    def _held(self, setting: Setting) -> Floats:
        """What passes hold: a row for each name of `HELD`, by kind of layer as `PassNumbers`."""
        return self._summed(setting).held()

    def _sent_(self, setting: Setting) -> "_Exchanges":
        """Collectives inside the passes of each variant, and what a slice sends for them."""
        sent, again = (
            Sent(self.plan_of(setting, recompute=mode), self.graph) for mode in self._modes(setting)
        )
        return {
            (kind, each): (again if each.selective else sent).inside(
                Instruction(kind, each.layer, 0)
            )
            for kind in _PASSES
            for each in self._variants
        }

    def _modes(self, setting: Setting) -> tuple[Recompute, Recompute]:
        """How layers are computed again that are not, and those that keep what products give."""
        return "none", "selective" if self._selects(setting) else "none"

    def _summed_(self, setting: Setting) -> PassNumbers:
        """Passes alone, with how gradients are summed in them."""
        costs = self._costs(setting)
        plan, kinds = self.plan_of(setting), self.kinds(setting.tensor)
        return replace(
            self._worked(setting._replace(sums=False, parted=False)),
            sum_first=self._spread(lambda each: costs.sum_seconds(each.layer, first=True)),
            sum_later=self._spread(lambda each: costs.sum_seconds(each.layer, first=False)),
            gradients=self._spread(
                lambda each: kinds[each.name].parameter_count * plan.gradient_bytes
            ),
            gradient_bytes=plan.gradient_bytes,
        )

    def _worked_(self, setting: Setting) -> PassNumbers:
        """Passes alone, but for what sums take."""
        plan, kinds, costs = self.plan_of(setting), self.kinds(setting.tensor), self._costs(setting)
        selects = self._selects(setting)
        again = self._costs(setting, selective=True) if selects else costs
        sizes = {
            each: layer_sizes(plan, kinds[each.name], selective=each.selective and selects)
            for each in self._variants
        }

        def seconds(kind: Kind) -> Floats:
            def of_kind(each: _Variant) -> float:
                priced = again if each.selective else costs
                summed = costs.sum_seconds(each.layer, first=True) if kind in _ADDING else 0.0
                return priced.of(Instruction(kind, each.layer, 0)).total - summed

            return self._spread(of_kind)

        def nbytes(name: str) -> Floats:
            return self._spread(lambda each: getattr(sizes[each], name))

        none = np.zeros(len(self._variants))
        return PassNumbers(
            forward=seconds("forward"),
            backward=seconds("backward"),
            backward_input=seconds("backward input"),
            backward_weight=seconds("backward weight"),
            sum_first=none,
            sum_later=none,
            load_seconds=costs.of(Instruction("load", None, 0)).total,
            output=nbytes("output"),
            kept=nbytes("kept"),
            forward_peak=nbytes("forward_peak"),
            backward_peak=nbytes("backward_peak"),
            fresh=nbytes("fresh"),
            largest=nbytes("largest"),
            rows_only=nbytes("rows_only").astype(bool),
            gradients=none,
            weights=nbytes("weights"),
            token_bytes=2 * setting.micro * plan.batch.sequence * 8.0,
            gradient_bytes=plan.gradient_bytes,
            weight_bytes=plan.weight_bytes,
        )


class _Variant(NamedTuple):
    """Layers of one kind that are computed again in one way, found at the first of them."""

    layer: int
    name: str
    selective: bool = False


_Exchanges = Mapping[tuple[Kind, _Variant], tuple[Inside, ...]]
_ADDING: tuple[Kind, ...] = ("backward", "backward weight")
_BOTH, _STAGE = {"weights", "optimizer"}, {"phases", "recompute"}
_BATCH, _CUT = {"sequence", "micro", "accumulation"}, {"pipeline", "tensor", "replicas"}
"""All fields are named: finding out which are not takes longer than all else."""


def rates(curve: Curve, sizes: Floats) -> Floats:
    """`Curve.at` of many sizes."""
    points = np.log(np.array(curve.points))
    return np.asarray(np.exp(np.interp(np.log(sizes), points[:, 0], points[:, 1])))


def _cut(pipeline: int, tensor: int, replicas: int) -> Cut:
    return Cut.model_construct(_CUT, pipeline=pipeline, tensor=tensor, replicas=replicas)


def _alone(setting: Setting) -> Setting:
    return setting._replace(replicas=1)
