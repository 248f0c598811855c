"""Passes: what the forward and backward passes of one micro-batch read, make and free.

A zero-bubble order parts a backward pass. Its first part leaves everything for the second: what was
kept, the output's gradient, and the gradients inside the layer, of which there are no more than
what was kept. The second part frees all of that.
"""

from windlass.program.memory.stage_tensors import StageTensors
from windlass.program.memory.values import GRADIENT_SUMS, Effect, TensorId

_Layers = frozenset[int] | set[int]


class PassEffects:
    """The effects of the passes of one stage.

    Args:
        holding: of the stage.
    """

    def __init__(self, holding: StageTensors) -> None:
        self._holding = holding
        plan = holding.plan
        self._parted = plan.parallel.schedule == "zero-bubble"
        self._converts = plan.gradient_itemsize != plan.parameter_itemsize
        self._flat = plan.sharding.optimizer > 1

    def forward(self, layer: int, micro: int) -> Effect:
        """The first forward pass."""
        makes: tuple[TensorId, ...] = (TensorId("output", layer, micro),)
        if layer not in self._holding.recomputed_layers:
            makes += (TensorId("kept", layer, micro),)
        return self._pass(layer, micro, makes)

    def recompute(self, layer: int, micro: int) -> Effect:
        """The forward pass right before the backward pass."""
        return self._pass(layer, micro, (self._root(layer, micro), TensorId("kept", layer, micro)))

    def backward(self, layer: int, micro: int, made: _Layers) -> Effect:
        """A backward pass in one piece; `made` are the layers whose gradient is there already."""
        sums, makes = self._sums(layer, made)
        reads, frees = self._backward_reads(layer, micro), self._backward_frees(layer, micro)
        if layer > 0:
            makes = (*makes, TensorId("output gradient", layer - 1, micro))
        reads = (*self._holding.pass_weights(layer), *reads, *sums)
        return Effect(reads, makes, frees, self._backward_working(layer, makes))

    def backward_input(self, layer: int, micro: int) -> Effect:
        """The part of a backward pass that the layer before waits for."""
        makes: tuple[TensorId, ...] = (TensorId("inner gradients", layer, micro),)
        if layer > 0:
            makes = (*makes, TensorId("output gradient", layer - 1, micro))
        reads = (*self._holding.pass_weights(layer), *self._backward_reads(layer, micro))
        peak = self._holding.sizes[layer].backward_peak
        return Effect(reads, makes, (), max(0, peak - self._bytes(makes)))

    def backward_weight(self, layer: int, micro: int, made: _Layers) -> Effect:
        """The part that adds to the gradient."""
        sums, makes = self._sums(layer, made)
        inner = TensorId("inner gradients", layer, micro)
        reads = (inner, *self._backward_reads(layer, micro), *sums)
        working = max(self._at_end(layer, makes), self._bytes(makes)) - self._bytes(makes)
        return Effect(reads, makes, (inner, *self._backward_frees(layer, micro)), working)

    def starts_backward(self, layer: int) -> bool:
        """Whether the output that a forward pass made is still held for the layer's own backward.

        Not if that backward starts from a recomputed output, or runs on another stage.
        """
        return layer in self._holding.layer_set and layer not in self._holding.recomputed_layers

    def _pass(self, layer: int, micro: int, makes: tuple[TensorId, ...]) -> Effect:
        holding = self._holding
        reads = (*holding.pass_weights(layer), self._input(layer, micro))
        return Effect(
            reads=(*reads, *self._tokens_read(layer, micro)),
            makes=makes,
            working_bytes=max(0, holding.sizes[layer].forward_peak - self._bytes(makes)),
        )

    def _sums(self, layer: int, made: _Layers) -> tuple[tuple[TensorId, ...], tuple[TensorId, ...]]:
        """Gradients that are there to be added to, and those that the pass makes."""
        sums = self._holding.pass_gradient_sums(layer)
        there = tuple(value for value in sums if value.layer in made)
        return there, tuple(value for value in sums if value.layer not in made)

    def _backward_reads(self, layer: int, micro: int) -> tuple[TensorId, ...]:
        reads = [TensorId("kept", layer, micro), self._input(layer, micro)]
        reads += self._tokens_read(layer, micro)
        reads.append(self._root(layer, micro))
        if layer < self._holding.last_layer:
            reads.append(TensorId("output gradient", layer, micro))
        return tuple(reads)

    def _backward_frees(self, layer: int, micro: int) -> tuple[TensorId, ...]:
        end = self._holding.last_layer
        frees = [TensorId("kept", layer, micro), self._root(layer, micro)]
        if layer < end:
            frees.append(TensorId("output gradient", layer, micro))
        if layer > 0 and not self.starts_backward(layer - 1):
            frees.append(self._input(layer, micro))
        if layer == 0 or (layer == end and 0 not in self._holding.layer_set):
            frees.append(TensorId("tokens", None, micro))
        return tuple(frees)

    def _input(self, layer: int, micro: int) -> TensorId:
        return TensorId("output", layer - 1, micro) if layer else TensorId("tokens", None, micro)

    def _root(self, layer: int, micro: int) -> TensorId:
        """What a layer's backward pass starts from."""
        again = self._parted and layer in self._holding.recomputed_layers
        return TensorId("output again" if again else "output", layer, micro)

    def _tokens_read(self, layer: int, micro: int) -> tuple[TensorId, ...]:
        """The last layer reads the tokens that it is to predict."""
        return (TensorId("tokens", None, micro),) if layer == self._holding.last_layer and layer else ()

    def _backward_working(self, layer: int, makes: tuple[TensorId, ...]) -> int:
        """What a backward pass holds above what it makes."""
        made = self._bytes(makes)
        peak = self._holding.sizes[layer].backward_peak
        return max(peak, self._at_end(layer, makes), made) - made

    def _at_end(self, layer: int, makes: tuple[TensorId, ...]) -> int:
        """What lies there when all gradients of a pass are made.

        A fresh gradient becomes the sum itself if the sum was not there and has its precision;
        else it lies beside the sum until it is added. Where the sum is made in another precision,
        or is one flat piece, that is done weight by weight, and each fresh gradient goes as its sum
        comes.
        """
        sizes, made = self._holding.sizes[layer], self._bytes(makes)
        sums = tuple(value for value in makes if value.name in GRADIENT_SUMS)
        at_end = sizes.pass_gradients + made - (0 if sizes.sparse_gradients else self._bytes(sums))
        flat = self._flat and any(value.name == "gradients" for value in sums)
        if flat or (sums and self._converts):
            at_end = max(at_end, made + sizes.largest_pass_gradient)
        return at_end

    def _bytes(self, values: tuple[TensorId, ...]) -> int:
        return sum(map(self._holding.bytes_of, values))
