"""Step: seconds of each instruction of a plan, found once for each kind of layer."""

from functools import cached_property

from windlass.cost.links import Links
from windlass.cost.op import DeviceRates, Seconds, Setting, pass_seconds
from windlass.program.instruction import BACKWARDS, Instruction
from windlass.program.layout import layers_of, place_of, stages_by_layer
from windlass.program.recompute import selected
from windlass.program.shards import padded
from windlass.program.slices import ops_of
from windlass.program.ties import loans, owners
from windlass.spec.graph import Graph, LayerKind, Parameter
from windlass.spec.machine import Machine
from windlass.spec.plan import Moments, Plan

_TOKEN_BYTES = 8
_SUM_BYTES = 4
"""Gradients are summed in float32."""
_MOMENT_BYTES = 8
_MOMENT_OPS: dict[Moments, int] = {"float32": 0, "bfloat16": 6, "int8": 29}
"""Element-wise ops of `machines.moments` that decode and encode a part, each over one float32 read
and one written: what they take where nobody measured."""
_PART = 2**17
"""Elements of such a part."""
_MASTER_BYTES = 4
_NORM_CALLS = 7
"""A weight's gradient is laid flat, split, handed to the norm and its norm to the sum, counted in
ops of eager code."""
_CONVERSIONS = 14
"""In bfloat16 a weight is also split into its parts, and gradient and weight are converted."""


class StepCost:
    """Seconds of the instructions of one plan on one machine.

    Args:
        plan: the plan.
        graph: that it cuts.
        machine: that it runs on.

    Raises:
        KeyError: the machine states no rate for the plan's precision.
    """

    def __init__(self, plan: Plan, graph: Graph, machine: Machine) -> None:
        batch = plan.batch
        setting = Setting(batch.micro, batch.sequence, plan.precision, plan.compile)
        self._plan, self._graph, self._machine = plan, graph, machine
        self._device = machine.device.computing(moves=plan.streamed)
        self._rates = DeviceRates(self._device, setting)
        self._kinds = tuple(graph.cut(plan.cut.tensor).layer_kinds())
        self._selective = selected(plan)
        self._known: dict[tuple[object, ...], Seconds] = {}
        self._exchanged: dict[tuple[str, int | None], float] = {}
        self._links = Links(plan, graph, machine)

    @cached_property
    def _shared(self) -> dict[int, int]:
        return _shared_elements(self._plan, self._graph, self._kinds)

    @cached_property
    def _lent(self) -> dict[int, int]:
        return {loan.layer: loan.elements for loan in loans(self._plan, self._graph)}

    def of(self, instruction: Instruction, device: int = 0) -> Seconds:
        """Seconds of one instruction, by what they go into."""
        kind, layer, micro = instruction
        if layer is None:
            key: tuple[object, ...] = (kind, device)
        else:
            shared = self._shared.get(layer, 0)
            lent = layer if kind == "take over" else None
            selective = layer in self._selective
            key = (kind, self._kinds[layer].name, shared, micro == 0, lent, selective)
        known = self._known.get(key)
        if known is None:
            known = self._found(instruction, device)
            self._known[key] = known
        return known

    def exchange_seconds(self, instruction: Instruction) -> float:
        """Seconds that messages and collectives of an instruction take on their links, else 0."""
        kind, layer, _ = instruction
        known = self._exchanged.get((kind, layer))
        if known is None:
            known = self._exchanged[kind, layer] = self._links.seconds(instruction)
        return known

    def beside_seconds(self, instruction: Instruction) -> float:
        """Seconds of `exchange_seconds` that go on beside what the device does next."""
        return self._links.beside_seconds(instruction)

    @property
    def sums_beside(self) -> bool:
        """Whether replicas sum gradients beside computing."""
        return self._links.sums_beside

    def _found(self, instruction: Instruction, device: int) -> Seconds:
        kind, layer, micro = instruction
        if kind == "load":
            return self._load()
        if kind == "norm":
            return self._norm(device)
        if layer is None:
            return Seconds()
        if kind == "update":
            return self._update(self._kinds[layer])
        if kind == "take over":
            return self._take_over(layer)
        cost = self._kinds[layer].cost(
            self._plan.precision,
            compiled=self._plan.compile,
            selective=layer in self._selective,
        )
        ops = ops_of(kind, self._kinds[layer], cost, first=layer == 0)
        if kind in ("forward", "recompute"):
            return pass_seconds(ops, cost, self._rates, backward=False)
        if kind not in (*BACKWARDS, "backward input"):
            return Seconds()
        passed = pass_seconds(ops, cost, self._rates, backward=True)
        summed = self._sum(layer, first=micro == 0) if kind in BACKWARDS else Seconds()
        return passed.plus(summed)

    def _load(self) -> Seconds:
        """Inputs and targets of one micro-batch are copied once."""
        tokens = self._plan.batch.micro * self._plan.batch.sequence
        moved = 2 * 2 * tokens * _TOKEN_BYTES
        rate = self._device.traffic.at(moved)
        return Seconds(load=moved / rate + self._device.pass_seconds)

    def _norm(self, device: int) -> Seconds:
        stage = place_of(device, self._plan.cut).stage
        owned = [self._kinds[at] for at in layers_of(self._plan, stage)]
        elements = sum(self._updated(kind) for kind in owned)
        nbytes = self._plan.gradient_bytes * elements
        if not nbytes:
            return Seconds()
        launches = sum(map(self.norm_launches, owned))
        return Seconds(norm=nbytes / self.norm_rate(nbytes), launch=launches)

    def norm_launches(self, kind: LayerKind) -> float:
        """Seconds of starting what the norm takes of one layer's weights."""
        return _NORM_CALLS * self._device.launch_seconds * len(kind.parameters)

    def norm_rate(self, nbytes: float) -> float:
        """Bytes/s of the norm over so many bytes of gradients, more than none."""
        rate = self._device.norm_rate or self._device.traffic.at(nbytes)
        if self._plan.gradient_bytes != _SUM_BYTES:
            rate = self._device.mixed_norm_rate or rate
        return rate

    def sum_seconds(self, layer: int, *, first: bool) -> float:
        """Seconds of adding a layer's fresh gradients to what is there.

        Args:
            layer: index into the chain.
            first: whether they are the first micro-batch's.
        """
        return self._sum(layer, first=first).total

    def _update(self, kind: LayerKind) -> Seconds:
        """AdamW reads master, two moments and the gradient; it writes all but the gradient.

        In bfloat16 it also writes the weights that layers compute with. Moments that are decoded
        are in the cache when it reads them. Where gradients are clipped, torch's fused AdamW
        writes back what it has divided: that is the gradient itself, or a copy in the cache where
        it has been converted.
        """
        decodes = self._plan.moments != "float32"
        state = _MASTER_BYTES + (0 if decodes else _MOMENT_BYTES)
        working = 0 if self._plan.weight_bytes == _MASTER_BYTES else self._plan.weight_bytes
        divided = _SUM_BYTES if self._plan.clip and self._plan.gradient_bytes == _SUM_BYTES else 0
        moved = 2 * state + self._plan.gradient_bytes + divided + working
        owned = self._updated(kind)
        device = self._device
        counts = [p.count for p in kind.parameters if p.tied_to is None]
        calls = sum(-(-count // _PART) if decodes else 1 for count in counts)
        launches = calls * (device.update_call_seconds or device.launch_seconds)
        if working:
            launches += _CONVERSIONS * len(counts) * device.launch_seconds
        rate = (device.mixed_update_rate if working else None) or device.update_rate
        seconds = owned * moved / rate
        if decodes:
            recoding = self._recoding(counts if self._plan.sharding.optimizer == 1 else [owned])
            seconds, launches = seconds + recoding.update, launches + recoding.launch
        return Seconds(update=seconds, launch=launches)

    def _recoding(self, counts: list[int]) -> Seconds:
        """Moments are decoded and encoded part by part: `parts x a + elements x e`.

        Of a measured rate r and cost a of a part, `e = 1/r - a/131072`: the rate is that of whole
        parts. A layer's many small weights, each a part, can take as long as its few large ones.

        Args:
            counts: elements that the device updates of each weight.
        """
        device, elements = self._device, sum(counts)
        parts = sum(-(-count // _PART) for count in counts)
        for rate in device.moment_rates:
            if rate.moments == self._plan.moments:
                each = max(0.0, 1 / rate.elements - rate.part_seconds / _PART)
                return Seconds(update=elements * each, launch=parts * rate.part_seconds)
        ops, moved = _MOMENT_OPS[self._plan.moments], 2 * 4 * _PART
        each = 2 * 4 * ops / device.traffic.at(moved)
        return Seconds(update=elements * each, launch=parts * ops * device.launch_seconds)

    def _updated(self, kind: LayerKind) -> int:
        """Elements of a layer that one device updates: its share, where replicas share them."""
        return padded(kind.parameter_count, self._plan) // self._plan.sharding.optimizer

    def _take_over(self, layer: int) -> Seconds:
        return Seconds(traffic=self.take_over_seconds(self._lent[layer]))

    def take_over_seconds(self, elements: float) -> float:
        """Seconds of adding what came to what is there: two reads and a write."""
        moved = 3 * elements * self._plan.gradient_bytes
        return moved / self._device.traffic.at(moved)

    def _sum(self, layer: int, *, first: bool) -> Seconds:
        """Adding a layer's fresh gradients to what is there; the first is taken over as it is.

        In bfloat16 with accumulation the first is copied into float32.
        """
        summed = 0.0
        device, plan = self._device, self._plan
        if self._kinds[layer].looks_up:
            return self._sum_rows(layer, first=first)
        converts = plan.gradient_bytes != plan.weight_bytes
        added = self._shared.get(layer, 0) if first else _elements(self._kinds[layer].parameters)
        if added:
            each = plan.weight_bytes + 2 * plan.gradient_bytes
            summed += added * each / device.traffic.at(added * each)
        if first and converts:
            for parameter in self._kinds[layer].parameters:
                moved = parameter.count * (plan.weight_bytes + _SUM_BYTES)
                summed += moved / device.traffic.at(moved)
        return Seconds(traffic=summed)

    def _sum_rows(self, layer: int, *, first: bool) -> Seconds:
        """Adding rows to a gradient; where there is none yet, one of zeros is made first."""
        device, plan, kind = self._device, self._plan, self._kinds[layer]
        rows = sum(kind.fresh_elements(plan.batch.micro, plan.batch.sequence))
        moved = rows * (plan.weight_bytes + 2 * plan.gradient_bytes)
        made = 0.0
        if first:
            unshared = kind.parameter_count - self._shared.get(layer, 0)
            made = unshared * plan.gradient_bytes
        seconds = sum(nbytes / device.traffic.at(nbytes) for nbytes in (moved, made) if nbytes)
        return Seconds(traffic=seconds)


def _elements(parameters: tuple[Parameter, ...]) -> int:
    return sum(parameter.count for parameter in parameters)


def _shared_elements(plan: Plan, graph: Graph, kinds: tuple[LayerKind, ...]) -> dict[int, int]:
    """Elements of each layer that a later one of its stage uses: their gradient is there first."""
    shared: dict[int, int] = {}
    stages = stages_by_layer(plan)
    for layer, owned_by in enumerate(owners(graph)):
        tied = _elements(tuple(p for p in kinds[layer].parameters if p.tied_to is not None))
        for owner in {at for at in owned_by if at != layer and stages[at] == stages[layer]}:
            shared[owner] = shared.get(owner, 0) + tied
    return shared
