"""Effects: what each instruction reads, makes and frees, by name, class and bytes.

One place says it; the verifier proves programs with it and the cost model adds up memory with it.
The near tier while an instruction runs holds all values alive before it, what it makes, and its
`working` bytes; what it frees is gone when it ends. What has gone home takes no near memory.
"""

from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import Literal, NamedTuple

from windlass.program.instruction import Instruction, Kind
from windlass.program.phases import departing, put_off, recomputed, resident
from windlass.program.sizes import layer_sizes
from windlass.program.ties import owners
from windlass.spec.graph import Graph
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
    "staging",  # what optimizer state passes through on its way from and to its home
    "gradients at home",
    "output at home",
]

CLASSES: dict[Name, MemoryClass] = {
    "weights": "weights",
    "optimizer": "optimizer",
    "gradients": "gradients",
    "tokens": "activations",
    "output": "activations",
    "kept": "activations",
    "output gradient": "activations",
    "staging": "working",
    "gradients at home": "gradients",
    "output at home": "activations",
}

STAGING_BYTES = 52 * 2**20
"""The near memory that optimizer state passes through, part by part, where its home is far. It is
there as long as the run, and no layer is too large for it."""

_AWAY = ("gradients at home", "output at home")

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
        by_kind = {name: layer_sizes(plan, kind) for name, kind in graph.kinds.items()}
        self._kinds = tuple(span.kind for span in graph.chain for _ in range(span.count))
        self._sizes = tuple(by_kind[kind] for kind in self._kinds)
        self._owners = owners(graph)
        self._again = tuple(recomputed(plan, graph, layer) for layer in self.layers)
        self._near = frozenset(resident(plan, graph) if plan.far("weights") else self.layers)
        self._near_state = not plan.far("optimizer")
        self.put_off = frozenset(put_off(plan, graph))
        """Layers whose update waits for the next step; their gradients lie at home meanwhile."""
        self.departing = departing(plan, graph)
        """Layers whose gradients leave during the backward pass, in that order."""
        self._left_before = {after: before for before, after in pairwise(self.departing)}
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
        """What is there before a step and after it: weights and optimizer state, if near.

        Where updates are put off, also the gradients that wait at home for them.
        """
        values: list[Value] = [] if self._near_state else [Value("staging")]
        for layer in self.layers:
            if not self._sizes[layer].weights:
                continue
            if layer in self._near:
                values.append(Value("weights", layer))
            if self._near_state:
                values.append(Value("optimizer", layer))
            if layer in self.put_off:
                values.append(Value("gradients at home", layer))
        return tuple(values)

    def bytes_of(self, value: Value) -> int:
        """How large a value is."""
        if value.name == "tokens":
            return self._tokens
        if value.name == "staging":
            return STAGING_BYTES
        if value.name in _AWAY:
            return 0
        sizes = self._sizes[value.layer or 0]
        if value.name == "weights":
            return sizes.weights
        if value.name == "optimizer":
            return sizes.optimizer
        if value.name == "gradients":
            return sizes.gradients + sizes.rows
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
            return self._norm()
        if kind == "sync":
            return self._leave(() if self.put_off else self.departing[-1:])
        if kind == "load":
            return Effect(makes=(Value("tokens", None, micro),))
        if layer is None:
            raise ValueError(f"{kind} needs a layer")
        if kind in ("send", "receive"):
            return self._message(kind, layer, micro)
        if layer not in self.layers:
            raise ValueError(f"layer {layer} is not on this stage")
        if kind == "reduce":
            return Effect(reads=self._gradients((layer,)))
        if micro is None:
            return self._move(kind, layer)
        return self._compute(kind, layer, micro, made)

    def signature(self, instruction: Instruction, made: frozenset[int] | set[int]) -> Hashable:
        """What the bytes of an effect depend on: equal layers between equal neighbours have one.

        Args:
            instruction: one of this stage.
            made: layers whose gradient is there already.
        """
        kind, layer, micro = instruction
        if layer is None:
            return kind
        if micro is None and (self.departing or self.put_off):
            return kind, layer
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
        self, kind: Kind, layer: int, micro: int, made: frozenset[int] | set[int]
    ) -> Effect:
        if kind == "forward":
            return self._forward(layer, micro)
        if kind == "recompute":
            return self._recompute(layer, micro)
        if kind == "backward":
            return self._backward(layer, micro, made)
        near, away = Value("output", layer, micro), Value("output at home", layer, micro)
        if kind == "keep":
            return Effect((near,), (away,), (near,))
        if kind == "restore":
            return Effect((away,), (near,), (away,))
        raise ValueError(f"{kind} of one micro-batch has no meaning here")

    def _move(self, kind: Kind, layer: int) -> Effect:
        """What moves or changes a layer's weights, gradient and optimizer state."""
        weights = Value("weights", layer)
        if kind == "update":
            return self._update(layer)
        if kind == "fetch":
            return Effect(makes=(weights,))
        if kind == "release":
            return Effect((weights,), (), (weights,))
        if kind == "store":
            left = self._leave(self._before(layer))
            reads = (Value("gradients", layer), *left.reads)
            return Effect(reads, (Value("gradients at home", layer),), left.frees)
        raise ValueError(f"{kind} of a layer has no meaning here")

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
        gradient, weights = Value("gradients", layer), Value("weights", layer)
        if layer in self.put_off:
            away = Value("gradients at home", layer)
            return Effect((away,), (weights,), (away,))
        if layer in self.departing:
            left = self._leave(self._before(layer))
            return Effect((gradient, weights, *left.reads), (), left.frees)
        state = (Value("optimizer", layer),) if self._near_state else ()
        return Effect((gradient, weights, *state), (), (gradient,))

    def _norm(self) -> Effect:
        """Of gradients that are away, the squares were summed as they left."""
        near = self._gradients(layer for layer in self.layers if layer not in self.put_off)
        left = self._leave(self.departing[-1:])
        away = (Value("gradients at home", layer) for layer in self.layers if layer in self.put_off)
        return Effect((*near, *away, *left.reads), (), left.frees)

    def _leave(self, layers: Iterable[int]) -> Effect:
        """A gradient that leaves beside what follows has gone once the next one is to leave."""
        gone = self._gradients(layers)
        return Effect(gone, (), gone)

    def _before(self, layer: int) -> tuple[int, ...]:
        """The layer whose gradient leaves before this one's, if there is one."""
        return (self._left_before[layer],) if layer in self._left_before else ()

    def _message(self, kind: Kind, layer: int, micro: int | None) -> Effect:
        own = layer in self.layers
        onward = own if kind == "send" else not own
        value = Value("output" if onward else "output gradient", layer, micro)
        if kind == "receive":
            return Effect(makes=(value,))
        held = onward and self._starts_backward(layer)
        return Effect(reads=(value,), frees=() if held else (value,))
