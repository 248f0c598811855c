"""Passes: what the forward and backward passes of one micro-batch read, make and free.

A zero-bubble order parts a backward pass. Its first part leaves everything for the second: what was
kept, the output's gradient, and the gradients inside the layer, of which there are no more than
what was kept. The second part frees all of that.
"""

from windlass.program.memory.stage_tensors import Holding
from windlass.program.memory.values import SUMS, Effect, Value

_Layers = frozenset[int] | set[int]


class Passes:
    """The effects of the passes of one stage.

    Args:
        holding: of the stage.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        plan = holding.plan
        self._parted = plan.parallel.schedule == "zero-bubble"
        self._converts = plan.gradient_bytes != plan.weight_bytes
        self._flat = plan.sharding.optimizer > 1

    def forward(self, layer: int, micro: int) -> Effect:
        """The first forward pass."""
        makes: tuple[Value, ...] = (Value("output", layer, micro),)
        if layer not in self._holding.again:
            makes += (Value("kept", layer, micro),)
        return self._pass(layer, micro, makes)

    def recompute(self, layer: int, micro: int) -> Effect:
        """The forward pass right before the backward pass."""
        return self._pass(layer, micro, (self._root(layer, micro), Value("kept", layer, micro)))

    def backward(self, layer: int, micro: int, made: _Layers) -> Effect:
        """A backward pass in one piece; `made` are the layers whose gradient is there already."""
        sums, makes = self._sums(layer, made)
        reads, frees = self._backward_reads(layer, micro), self._backward_frees(layer, micro)
        if layer > 0:
            makes = (*makes, Value("output gradient", layer - 1, micro))
        reads = (*self._holding.weights(layer), *reads, *sums)
        return Effect(reads, makes, frees, self._backward_working(layer, makes))

    def backward_input(self, layer: int, micro: int) -> Effect:
        """The part of a backward pass that the layer before waits for."""
        makes: tuple[Value, ...] = (Value("inner gradients", layer, micro),)
        if layer > 0:
            makes = (*makes, Value("output gradient", layer - 1, micro))
        reads = (*self._holding.weights(layer), *self._backward_reads(layer, micro))
        peak = self._holding.sizes[layer].backward_peak
        return Effect(reads, makes, (), max(0, peak - self._bytes(makes)))

    def backward_weight(self, layer: int, micro: int, made: _Layers) -> Effect:
        """The part that adds to the gradient."""
        sums, makes = self._sums(layer, made)
        inner = Value("inner gradients", layer, micro)
        reads = (inner, *self._backward_reads(layer, micro), *sums)
        working = max(self._at_end(layer, makes), self._bytes(makes)) - self._bytes(makes)
        return Effect(reads, makes, (inner, *self._backward_frees(layer, micro)), working)

    def starts_backward(self, layer: int) -> bool:
        """Whether the output that a forward pass made is still held for the layer's own backward.

        Not if that backward starts from a recomputed output, or runs on another stage.
        """
        return layer in self._holding.on and layer not in self._holding.again

    def _pass(self, layer: int, micro: int, makes: tuple[Value, ...]) -> Effect:
        holding = self._holding
        reads = (*holding.weights(layer), self._input(layer, micro))
        return Effect(
            reads=(*reads, *self._tokens_read(layer, micro)),
            makes=makes,
            working_bytes=max(0, holding.sizes[layer].forward_peak - self._bytes(makes)),
        )

    def _sums(self, layer: int, made: _Layers) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
        """Gradients that are there to be added to, and those that the pass makes."""
        sums = self._holding.sums(layer)
        there = tuple(value for value in sums if value.layer in made)
        return there, tuple(value for value in sums if value.layer not in made)

    def _backward_reads(self, layer: int, micro: int) -> tuple[Value, ...]:
        reads = [Value("kept", layer, micro), self._input(layer, micro)]
        reads += self._tokens_read(layer, micro)
        reads.append(self._root(layer, micro))
        if layer < self._holding.end:
            reads.append(Value("output gradient", layer, micro))
        return tuple(reads)

    def _backward_frees(self, layer: int, micro: int) -> tuple[Value, ...]:
        end = self._holding.end
        frees = [Value("kept", layer, micro), self._root(layer, micro)]
        if layer < end:
            frees.append(Value("output gradient", layer, micro))
        if layer > 0 and not self.starts_backward(layer - 1):
            frees.append(self._input(layer, micro))
        if layer == 0 or (layer == end and 0 not in self._holding.on):
            frees.append(Value("tokens", None, micro))
        return tuple(frees)

    def _input(self, layer: int, micro: int) -> Value:
        return Value("output", layer - 1, micro) if layer else Value("tokens", None, micro)

    def _root(self, layer: int, micro: int) -> Value:
        """What a layer's backward pass starts from."""
        again = self._parted and layer in self._holding.again
        return Value("output again" if again else "output", layer, micro)

    def _tokens_read(self, layer: int, micro: int) -> tuple[Value, ...]:
        """The last layer reads the tokens that it is to predict."""
        return (Value("tokens", None, micro),) if layer == self._holding.end and layer else ()

    def _backward_working(self, layer: int, makes: tuple[Value, ...]) -> int:
        """What a backward pass holds above what it makes."""
        made = self._bytes(makes)
        peak = self._holding.sizes[layer].backward_peak
        return max(peak, self._at_end(layer, makes), made) - made

    def _at_end(self, layer: int, makes: tuple[Value, ...]) -> int:
        """What lies there when all gradients of a pass are made.

        A fresh gradient becomes the sum itself if the sum was not there and has its precision;
        else it lies beside the sum until it is added. Where the sum is made in another precision,
        or is one flat piece, that is done weight by weight, and each fresh gradient goes as its sum
        comes.
        """
        sizes, made = self._holding.sizes[layer], self._bytes(makes)
        sums = tuple(value for value in makes if value.name in SUMS)
        at_end = sizes.fresh + made - (0 if sizes.rows_only else self._bytes(sums))
        flat = self._flat and any(value.name == "gradients" for value in sums)
        if flat or (sums and self._converts):
            at_end = max(at_end, made + sizes.largest)
        return at_end

    def _bytes(self, values: tuple[Value, ...]) -> int:
        return sum(map(self._holding.bytes_of, values))
