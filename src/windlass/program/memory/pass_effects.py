"""Pass effects: what the forward and backward passes of one micro-batch read, make and free.

A zero-bubble schedule splits a backward pass. `backward_input` leaves everything for
`backward_weight`: the saved activations, the output's gradient, and the gradients inside the layer,
which take no more memory than the saved activations. `backward_weight` frees all of that.
"""

from collections.abc import Set as AbstractSet

from windlass.program.memory.stage_tensors import StageTensors
from windlass.program.memory.values import GRADIENT_SUMS, Effect, TensorId


class PassEffects:
    """The effects of the passes of one stage."""

    def __init__(self, tensors: StageTensors) -> None:
        self._tensors = tensors
        plan = tensors.plan
        self._splits_backward = plan.parallel.schedule == "zero-bubble"
        self._converts_gradients = plan.gradient_itemsize != plan.parameter_itemsize
        self._has_flat_gradients = plan.sharding.optimizer > 1

    def forward(self, layer: int, micro_batch: int) -> Effect:
        """The first forward pass."""
        makes: tuple[TensorId, ...] = (TensorId("output", layer, micro_batch),)
        if layer < self._tensors.first_trained:
            effect = self._forward_effect(layer, micro_batch, makes)
            return effect._replace(frees=self._forward_frees(layer, micro_batch))
        if layer not in self._tensors.recomputed_layers:
            makes += (TensorId("saved activations", layer, micro_batch),)
        return self._forward_effect(layer, micro_batch, makes)

    def _forward_frees(self, layer: int, micro_batch: int) -> tuple[TensorId, ...]:
        """What a layer before the first trained one frees, since no backward pass needs it."""
        if layer > 0:
            return (self._input(layer, micro_batch),)
        keeps_targets = self._tensors.last_layer in self._tensors.layer_set
        return () if keeps_targets else (TensorId("tokens", None, micro_batch),)

    def recompute(self, layer: int, micro_batch: int) -> Effect:
        """The forward pass right before the backward pass."""
        saved = TensorId("saved activations", layer, micro_batch)
        makes = (self._backward_root(layer, micro_batch), saved)
        return self._forward_effect(layer, micro_batch, makes)

    def backward(self, layer: int, micro_batch: int, sums: AbstractSet[TensorId]) -> Effect:
        """A full backward pass; `sums` are the gradients that exist already."""
        added, makes = self._split_sums(layer, sums)
        reads = self._backward_reads(layer, micro_batch)
        frees = self._backward_frees(layer, micro_batch)
        if layer > self._tensors.first_trained:
            makes = (*makes, TensorId("output gradient", layer - 1, micro_batch))
        reads = (*self._tensors.pass_weights(layer), *reads, *added)
        return Effect(reads, makes, frees, self._backward_working(layer, makes))

    def backward_input(self, layer: int, micro_batch: int) -> Effect:
        """The input-gradient part of a backward pass, which the layer before waits for."""
        makes: tuple[TensorId, ...] = (TensorId("inner gradients", layer, micro_batch),)
        if layer > self._tensors.first_trained:
            makes = (*makes, TensorId("output gradient", layer - 1, micro_batch))
        reads = (*self._tensors.pass_weights(layer), *self._backward_reads(layer, micro_batch))
        peak = self._tensors.sizes[layer].backward_peak
        return Effect(reads, makes, (), max(0, peak - self._bytes(makes)))

    def backward_weight(self, layer: int, micro_batch: int, sums: AbstractSet[TensorId]) -> Effect:
        """The weight-gradient part of a backward pass, which adds to the gradient."""
        added, makes = self._split_sums(layer, sums)
        inner = TensorId("inner gradients", layer, micro_batch)
        reads = (inner, *self._backward_reads(layer, micro_batch), *added)
        made = self._bytes(makes)
        working = max(self._bytes_at_end(layer, makes), made) - made
        return Effect(reads, makes, (inner, *self._backward_frees(layer, micro_batch)), working)

    def starts_backward(self, layer: int) -> bool:
        """Whether the output of a layer's first forward pass is the root of its own backward.

        Not if the layer is recomputed, if its backward runs on another stage, or if it has none.
        """
        tensors = self._tensors
        has_backward = layer in tensors.layer_set and layer >= tensors.first_trained
        return has_backward and layer not in tensors.recomputed_layers

    def _forward_effect(self, layer: int, micro_batch: int, makes: tuple[TensorId, ...]) -> Effect:
        tensors = self._tensors
        reads = (*tensors.pass_weights(layer), self._input(layer, micro_batch))
        return Effect(
            reads=(*reads, *self._target_tokens(layer, micro_batch)),
            makes=makes,
            working_bytes=max(0, tensors.sizes[layer].forward_peak - self._bytes(makes)),
        )

    def _split_sums(
        self, layer: int, sums: AbstractSet[TensorId]
    ) -> tuple[tuple[TensorId, ...], tuple[TensorId, ...]]:
        """Gradients that exist and are added to, and those that the pass makes."""
        own = self._tensors.pass_gradient_sums(layer)
        existing = tuple(tensor for tensor in own if tensor in sums)
        return existing, tuple(tensor for tensor in own if tensor not in sums)

    def _backward_reads(self, layer: int, micro_batch: int) -> tuple[TensorId, ...]:
        reads = [
            TensorId("saved activations", layer, micro_batch),
            self._input(layer, micro_batch),
        ]
        reads += self._target_tokens(layer, micro_batch)
        reads.append(self._backward_root(layer, micro_batch))
        if layer < self._tensors.last_layer:
            reads.append(TensorId("output gradient", layer, micro_batch))
        return tuple(reads)

    def _backward_frees(self, layer: int, micro_batch: int) -> tuple[TensorId, ...]:
        last = self._tensors.last_layer
        frees = [
            TensorId("saved activations", layer, micro_batch),
            self._backward_root(layer, micro_batch),
        ]
        if layer < last:
            frees.append(TensorId("output gradient", layer, micro_batch))
        if layer > 0 and not self.starts_backward(layer - 1):
            frees.append(self._input(layer, micro_batch))
        needs_inputs = 0 in self._tensors.layer_set and not self._tensors.first_trained
        if layer == 0 or (layer == last and not needs_inputs):
            frees.append(TensorId("tokens", None, micro_batch))
        return tuple(frees)

    def _input(self, layer: int, micro_batch: int) -> TensorId:
        if layer:
            return TensorId("output", layer - 1, micro_batch)
        return TensorId("tokens", None, micro_batch)

    def _backward_root(self, layer: int, micro_batch: int) -> TensorId:
        """The output that a layer's backward pass starts from."""
        is_second = self._splits_backward and layer in self._tensors.recomputed_layers
        return TensorId("recomputed output" if is_second else "output", layer, micro_batch)

    def _target_tokens(self, layer: int, micro_batch: int) -> tuple[TensorId, ...]:
        """The tokens that the last layer reads as targets of its loss."""
        if layer == self._tensors.last_layer and layer:
            return (TensorId("tokens", None, micro_batch),)
        return ()

    def _backward_working(self, layer: int, makes: tuple[TensorId, ...]) -> int:
        """Temporary memory of a backward pass, above what it makes."""
        made = self._bytes(makes)
        peak = self._tensors.sizes[layer].backward_peak
        return max(peak, self._bytes_at_end(layer, makes), made) - made

    def _bytes_at_end(self, layer: int, makes: tuple[TensorId, ...]) -> int:
        """Memory in use when all gradients of a pass are made.

        A new gradient becomes the sum itself if the sum did not exist and has its precision; else
        it exists beside the sum until it is added. Where the sum is made in another precision, or
        is one flat tensor, that happens weight by weight, and each new gradient is freed as its sum
        is made.
        """
        sizes, made = self._tensors.sizes[layer], self._bytes(makes)
        sums = tuple(tensor for tensor in makes if tensor.name in GRADIENT_SUMS)
        becomes_sum = 0 if sizes.sparse_gradients else self._bytes(sums)
        at_end = sizes.pass_gradients + made - becomes_sum
        makes_flat = self._has_flat_gradients and any(t.name == "gradients" for t in sums)
        if makes_flat or (sums and self._converts_gradients):
            at_end = max(at_end, made + sizes.largest_pass_gradient)
        return at_end

    def _bytes(self, tensors: tuple[TensorId, ...]) -> int:
        return sum(map(self._tensors.bytes_of, tensors))
