"""Effects: what each instruction reads, makes and frees, by name, class and bytes.

One place says it; the verifier proves programs with it and the cost model adds up memory with it.
The near tier while an instruction runs holds all values alive before it, what it makes, and its
`working` bytes; what it frees is gone when it ends.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from windlass.program.instruction import Instruction, Kind
from windlass.program.lower import recomputed
from windlass.program.ties import owners
from windlass.spec.graph import Graph, LayerCost, LayerKind, Op, Quantity
from windlass.spec.plan import Plan
from windlass.spec.prediction import MemoryClass

Name = Literal[
    "weights",
    "optimizer",
    "gradients",  # summed over micro-batches; tied weights' where they live
    "tokens",  # inputs and targets of one micro-batch
    "output",  # of a layer: the next layer's input, and what its own backward starts from
    "kept",  # for backward, apart from the input
    "output gradient",  # of a layer: what the next layer's backward passes down
]

CLASSES: dict[Name, MemoryClass] = {
    "weights": "weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "tokens": "activations",
    "output": "activations",
    "kept": "activations",
    "output gradient": "activations",
}

_TOKEN_BYTES = 8
"""Token numbers are int64, as torch's embedding and cross-entropy take them."""


class Value(NamedTuple):
    """Something that lies in memory between instructions."""

    name: Name
    layer: int | None = None
    micro: int | None = None

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer}"
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        return f"{self.name}{layer}{micro}"


class Effect(NamedTuple):
    """What one instruction does to memory."""

    reads: tuple[Value, ...] = ()
    makes: tuple[Value, ...] = ()
    frees: tuple[Value, ...] = ()
    working_bytes: int = 0
    """Held only while it runs, above what it makes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of one layer's values for one micro-batch of the plan."""

    weights: int
    optimizer: int
    gradients: int
    output: int
    kept: int
    forward_peak: int
    """Most that the forward pass allocates, its output and what it keeps included."""
    backward_peak: int
    """Most that the backward pass allocates above what was kept for it, fresh gradients included.
    """
    fresh: int
    """Gradients that one backward pass makes, tied weights included."""
    largest: int
    """The largest of them."""
    rows_only: bool
    """They are rows of the weights, so that none of them becomes the sum itself."""


class Effects:
    """The effects of the instructions of one stage of a plan.

    Args:
        plan: the plan.
        graph: the graph that it cuts.
        stage: index of the stage.
    """

    def __init__(self, plan: Plan, graph: Graph, stage: int = 0) -> None:
        self._first = plan.stages[stage].first
        self._last = plan.stages[stage].last
        self._end = graph.layers - 1
        self._sums_apart = plan.gradient_bytes != plan.weight_bytes
        by_kind = {name: _sizes(plan, kind) for name, kind in graph.kinds.items()}
        self._kinds = tuple(span.kind for span in graph.chain for _ in range(span.count))
        self._sizes = tuple(by_kind[kind] for kind in self._kinds)
        self._owners = owners(graph)
        self._again = tuple(recomputed(plan, graph, layer) for layer in self.layers)
        self._tokens = 2 * plan.batch.micro * plan.batch.sequence * _TOKEN_BYTES

    @property
    def layers(self) -> range:
        """The stage's layers."""
        return range(self._first, self._last)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The stage's layers whose forward runs again before their backward."""
        return tuple(layer for layer in self.layers if self._again[layer - self._first])

    @property
    def takes_tokens(self) -> bool:
        """Whether the stage holds the embedding or the loss."""
        return self._first == 0 or self._last > self._end

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The layers whose outputs cross to or from another stage."""
        before = (self._first - 1,) if self._first > 0 else ()
        return (*before, self._last - 1) if self._last <= self._end else before

    @property
    def resident(self) -> tuple[Value, ...]:
        """What is there before a step and after it: weights and optimizer state."""
        return tuple(
            Value(name, layer)
            for layer in self.layers
            for name in ("weights", "optimizer")
            if self._sizes[layer].weights
        )

    def bytes_of(self, value: Value) -> int:
        """How large a value is."""
        if value.name == "tokens":
            return self._tokens
        sizes = self._sizes[value.layer or 0]
        if value.name == "weights":
            return sizes.weights
        if value.name == "optimizer":
            return sizes.optimizer
        if value.name == "gradients":
            return sizes.gradients
        return sizes.kept if value.name == "kept" else sizes.output

    def of(self, instruction: Instruction, made: frozenset[int] | set[int]) -> Effect:
        """What an instruction does.

        Args:
            instruction: one of this stage.
            made: layers whose gradient is there already; the first backward makes it.

        Raises:
            ValueError: an instruction that this version gives no meaning on this stage.
        """
        kind, layer, micro = instruction
        if kind == "norm":
            return Effect(reads=self._gradients(self.layers))
        if kind == "sync":
            return Effect()
        if kind == "load":
            return Effect(makes=(Value("tokens", None, micro),))
        if layer is None:
            raise ValueError(f"{kind} needs a layer")
        if kind in ("send", "receive"):
            return self._message(kind, layer, micro)
        if layer not in self.layers:
            raise ValueError(f"layer {layer} is not on this stage")
        if kind == "update":
            return self._update(layer)
        if kind == "reduce":
            return Effect(reads=self._gradients((layer,)))
        return self._compute(kind, layer, micro, made)

    def signature(self, instruction: Instruction, made: frozenset[int] | set[int]) -> Hashable:
        """What the bytes of an effect depend on: equal layers between equal neighbours have one.

        Args:
            instruction: one of this stage.
            made: layers whose gradient is there already.
        """
        kind, layer, _ = instruction
        if layer is None:
            return kind
        before = (self._kinds[layer - 1], self._starts_backward(layer - 1)) if layer else None
        edge = layer == 0 or layer == self._end
        again = layer in self.layers and self._again[layer - self._first]
        summed: tuple[bool, ...] = ()
        if kind == "backward":
            summed = tuple(target in made for target in self.targets(layer))
        return kind, self._kinds[layer], before, edge, again, layer in self.layers, summed

    def targets(self, layer: int) -> tuple[int, ...]:
        """The layers at which the gradients of a layer's weights are summed: its own and tied."""
        return (layer, *(owner for owner in self._owners[layer] if owner != layer))

    def _input(self, layer: int, micro: int) -> Value:
        return Value("output", layer - 1, micro) if layer else Value("tokens", None, micro)

    def _weights(self, layer: int) -> tuple[Value, ...]:
        return tuple(Value("weights", at) for at in self.targets(layer) if self._sizes[at].weights)

    def _gradients(self, layers: Iterable[int]) -> tuple[Value, ...]:
        return tuple(Value("gradients", at) for at in layers if self._sizes[at].gradients)

    def _targets_read(self, layer: int, micro: int) -> tuple[Value, ...]:
        """The last layer reads the tokens that it is to predict."""
        return (Value("tokens", None, micro),) if layer == self._end and layer else ()

    def _compute(
        self, kind: Kind, layer: int, micro: int | None, made: frozenset[int] | set[int]
    ) -> Effect:
        if micro is None:
            raise ValueError(f"{kind} needs a micro-batch")
        if kind == "forward":
            return self._forward(layer, micro)
        if kind == "recompute":
            return self._recompute(layer, micro)
        if kind == "backward":
            return self._backward(layer, micro, made)
        raise ValueError(f"{kind} is not yet run by this version")

    def _forward(self, layer: int, micro: int) -> Effect:
        sizes = self._sizes[layer]
        again = self._again[layer - self._first]
        makes: tuple[Value, ...] = (Value("output", layer, micro),)
        if not again:
            makes += (Value("kept", layer, micro),)
        return self._pass(layer, micro, makes, sizes.forward_peak)

    def _recompute(self, layer: int, micro: int) -> Effect:
        makes = (Value("output", layer, micro), Value("kept", layer, micro))
        return self._pass(layer, micro, makes, self._sizes[layer].forward_peak)

    def _pass(self, layer: int, micro: int, makes: tuple[Value, ...], peak: int) -> Effect:
        reads = (*self._weights(layer), self._input(layer, micro))
        return Effect(
            reads=(*reads, *self._targets_read(layer, micro)),
            makes=makes,
            working_bytes=max(0, peak - sum(map(self.bytes_of, makes))),
        )

    def _backward(self, layer: int, micro: int, made: frozenset[int] | set[int]) -> Effect:
        sums = self._gradients(self.targets(layer))
        makes = tuple(value for value in sums if value.layer not in made)
        reads = [*self._weights(layer), Value("kept", layer, micro), self._input(layer, micro)]
        reads += self._targets_read(layer, micro)
        reads += (value for value in sums if value.layer in made)
        frees = [Value("kept", layer, micro), Value("output", layer, micro)]
        if layer < self._end:
            frees.append(Value("output gradient", layer, micro))
        reads += frees[1:]
        if layer > 0:
            makes = (*makes, Value("output gradient", layer - 1, micro))
        if layer > 0 and not self._starts_backward(layer - 1):
            frees.append(self._input(layer, micro))
        if layer == 0 or (layer == self._end and self._first > 0):
            frees.append(Value("tokens", None, micro))
        return Effect(tuple(reads), makes, tuple(frees), self._backward_working(layer, makes))

    def _starts_backward(self, layer: int) -> bool:
        """Whether the output that a forward pass made is still held for the layer's own backward.

        Not if that backward starts from a recomputed output, or runs on another stage.
        """
        return layer in self.layers and not self._again[layer - self._first]

    def _backward_working(self, layer: int, makes: tuple[Value, ...]) -> int:
        """What a backward pass holds above what it makes.

        A fresh gradient becomes the sum itself if the sum was not there and has its precision;
        else it lies beside the sum until it is added. Where the sum is made in another precision,
        that is done weight by weight, and each fresh gradient goes as its sum comes.
        """
        sizes = self._sizes[layer]
        made = sum(map(self.bytes_of, makes))
        sums = sum(self.bytes_of(value) for value in makes if value.name == "gradients")
        at_end = sizes.fresh + made - (0 if sizes.rows_only else sums)
        if sums and self._sums_apart:
            at_end = max(at_end, made + sizes.largest)
        return max(sizes.backward_peak, at_end, made) - made

    def _update(self, layer: int) -> Effect:
        if not self._sizes[layer].weights:
            return Effect()
        reads = (Value("gradients", layer), Value("weights", layer), Value("optimizer", layer))
        return Effect(reads, (), reads[:1])

    def _message(self, kind: Kind, layer: int, micro: int | None) -> Effect:
        own = layer in self.layers
        onward = own if kind == "send" else not own
        value = Value("output" if onward else "output gradient", layer, micro)
        if kind == "receive":
            return Effect(makes=(value,))
        held = onward and self._starts_backward(layer)
        return Effect(reads=(value,), frees=() if held else (value,))


def _sizes(plan: Plan, kind: LayerKind) -> _Sizes:
    cost = kind.cost(plan.precision, compiled=plan.compile)
    micro, sequence = plan.batch.micro, plan.batch.sequence
    owned = kind.parameter_count
    kept = round(cost.kept_bytes.at(micro, sequence))
    fresh = kind.fresh_elements(micro, sequence)
    return _Sizes(
        weights=owned * plan.weight_bytes,
        optimizer=owned * plan.optimizer_bytes,
        gradients=owned * plan.gradient_bytes,
        output=round(cost.output_bytes.at(micro, sequence)),
        kept=kept,
        forward_peak=round(
            max((op.live_bytes.at(micro, sequence) for op in cost.forward), default=0)
        ),
        backward_peak=max(0, _backward_peak(plan, kind, cost) - kept),
        fresh=sum(fresh) * plan.weight_bytes,
        largest=max(fresh, default=0) * plan.weight_bytes,
        rows_only=kind.looks_up,
    )


def _backward_peak(plan: Plan, kind: LayerKind, cost: LayerCost) -> int:
    """The fullest moment of a backward pass: what is alive, and the gradients made so far.

    A product whose result does not depend on micro-batch and sequence makes a weight's gradient,
    and makes it only then: at the logits' fullest moment the head has none yet. Gradients that come
    from no product (norms, the embedding) are counted from the start.
    """
    made = [_product_elements(op) for op in cost.backward]
    fresh = kind.fresh_elements(plan.batch.micro, plan.batch.sequence)
    so_far = max(0, sum(fresh) - sum(made))
    peak = 0.0
    for op, elements in zip(cost.backward, made, strict=True):
        so_far += elements
        live = op.live_bytes.at(plan.batch.micro, plan.batch.sequence)
        peak = max(peak, live + so_far * plan.weight_bytes)
    return round(peak)


def _product_elements(op: Op) -> int:
    """Elements of a product's result if it has a fixed size; 0 of any other op."""
    if op.shape is None:
        return 0
    sides = (op.shape.batch, op.shape.m, op.shape.n)
    if any(side != Quantity(side.one) for side in sides):
        return 0
    return round(op.shape.batch.one * op.shape.m.one * op.shape.n.one)
