"""Costs of layers' passes alone: what they take, hold and communicate if each ran on its own.

Computed for many tensor degrees and micro-batch sizes at once. `op_time`,
`program.memory.layer_sizes` and `program.communication_volume` compute the same for one plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import NamedTuple, get_args

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.op_time import (
    DeviceRates,
    LayerPass,
    OpContext,
    passes_seconds,
    quantity_values,
)
from windlass.program import InstructionKind, collective_bytes, pass_ops, weight_gradient_elements
from windlass.schema import (
    PRECISION_BYTES,
    Device,
    Graph,
    LayerCost,
    LayerKind,
    Op,
    Stack,
    TensorAxis,
    group_size,
)

AMONG: tuple[TensorAxis, ...] = get_args(TensorAxis)

PASSES: tuple[InstructionKind, ...] = ("forward", "backward", "backward_input", "backward_weight")

HELD = (
    "output", "saved", "forward_peak", "backward_peak", "pass_gradients", "largest_pass_gradient",
    "sparse_gradients", "weights", "gradients",
)  # fmt: skip
"""What a layer's passes hold, named as in `LayerSizes`."""


class PassArrays(NamedTuple):
    """Costs of passes alone, `[micro-batch size, pass, kind]`."""

    work: Floats
    host: Floats
    sent: Floats
    """Bytes that a device sends inside them, with a first axis over `AMONG`."""
    hops: Floats
    """Hops of these collectives, in the same shape."""
    held: Floats
    """Bytes of each of `HELD` in place of passes; without gradients."""


class KindVariant(NamedTuple):
    """Layers of one kind with one recompute mode."""

    name: str
    """Name of the kind."""
    selective: bool = False
    """Whether they recompute selectively, where they can."""


class ChainOps:
    """The operations of a graph's layers.

    Args:
        graph: the graph.
        sequence: tokens of a sequence.
    """

    def __init__(self, graph: Graph, sequence: int) -> None:
        self._graph, self._sequence = graph, sequence
        layers = [kind.name for kind in graph.layer_kinds()]
        self.names = tuple(dict.fromkeys(layers))
        """Layer kinds in the order of the layers."""
        kinds = (graph.kinds, *graph.tensor_shards.values())
        self.selective = tuple(
            at
            for at, name in enumerate(self.names)
            if name not in (layers[0], layers[-1])
            and any(each[name].selective_costs for each in kinds)
        )
        """Indices of the kinds that can recompute selectively."""
        again = (KindVariant(self.names[at], selective=True) for at in self.selective)
        self.variants = (*map(KindVariant, self.names), *again)
        """All kinds, then their selectively recomputed variants."""
        self.kinds: Callable[[int], Mapping[str, LayerKind]] = cache(self._kinds)
        self.fresh: Callable[[int, str, tuple[int, ...]], Ints] = cache(self._fresh)
        """Elements of each gradient (columns) that a pass of each of some micro-batches gives; a
        single row where that does not depend on it. Of a number of slices and a kind."""

        self.rows: Callable[[int, int], Floats] = cache(self._rows)
        """Bytes of float32 of the rows that so many sequences look up, by kind of layer; of a
        number of slices. As `program.sizes.rows_bytes`."""

    def _kinds(self, tensor: int) -> Mapping[str, LayerKind]:
        """The layer kinds, whole or as one of t tensor-parallel shards."""
        return self._graph.shard(tensor).kinds

    def alone(
        self,
        device: Device,
        mode: OpContext,
        tensor: int,
        micros: Sequence[int],
        stack: Stack | None = None,
    ) -> PassArrays:
        """Costs of passes alone at one tensor degree, for each micro-batch size.

        Args:
            device: the device that computes them.
            mode: how operations run.
            tensor: tensor-parallel degree.
            micros: micro-batch sizes in sequences.
            stack: software that drives it.

        Raises:
            KeyError: the device states no rate for the precision, or the graph has no such cost.
        """
        passes = list(self._passes(mode, tensor))
        rates, sizes = DeviceRates(device, mode, stack), np.array(micros)
        work, host = (
            each.T.reshape(len(micros), len(PASSES), len(self.variants))
            for each in passes_seconds(passes, rates, sizes, tensor=int(tensor))
        )
        held = [self._bytes(tensor, variant, mode, sizes) for variant in self.variants]
        by_name = np.reshape(held, (len(held), len(HELD), len(micros))).transpose(2, 1, 0)
        return PassArrays(work, host, *self._sent(passes, mode, tensor, sizes), by_name)

    def _rows(self, tensor: int, sequences: int) -> Floats:
        layers = (self.kinds(tensor)[variant.name] for variant in self.variants)
        return np.array(
            [
                4.0 * sum(each.pass_gradient_elements(sequences, self._sequence))
                if each.is_embedding
                else 0.0
                for each in layers
            ]
        )

    def _passes(self, mode: OpContext, tensor: int) -> Iterator[LayerPass]:
        for kind, variant in product(PASSES, self.variants):
            layer, cost = self._cost(tensor, variant, mode)
            ops = pass_ops(kind, layer, cost, first=variant.name == self.names[0])
            yield LayerPass(ops, cost, backward=kind != "forward")

    def _cost(
        self, tensor: int, variant: KindVariant, mode: OpContext
    ) -> tuple[LayerKind, LayerCost]:
        """A layer and its cost; the plain cost if there is no selective one."""
        layer = self.kinds(tensor)[variant.name]
        selective = variant.selective and bool(layer.selective_costs) and not mode.compiled
        return layer, layer.cost(mode.precision, compiled=mode.compiled, selective=selective)

    def _sent(
        self, passes: Sequence[LayerPass], mode: OpContext, tensor: int, micros: Ints
    ) -> tuple[Floats, Floats]:
        """Bytes and hops of collectives inside passes, in the shape of `PassArrays`."""
        shape = (len(AMONG), len(micros), len(PASSES), len(self.variants))
        sent, hops = np.zeros(shape), np.zeros(shape)
        for (run, kind), each in zip(np.ndindex(*shape[2:]), passes, strict=True):
            exchanges = [op.collective for op in each.ops if op.collective is not None]
            if tensor == 1 or not exchanges:
                continue
            buffers = quantity_values([each.nbytes for each in exchanges], micros, mode.sequence)
            for (how, _, among), buffer in zip(exchanges, np.rint(buffers), strict=True):
                ranks, at = group_size(tensor, among), AMONG.index(among)
                nbytes = collective_bytes(how, buffer.astype(np.int64), np.array(ranks))
                sent[at, :, run, kind] += nbytes
                rounds = (2 if how == "all_reduce" else 1) * (ranks - 1)
                hops[at, :, run, kind] += rounds * (nbytes > 0)
        return sent, hops

    def _bytes(self, tensor: int, variant: KindVariant, mode: OpContext, micros: Ints) -> Floats:
        """Bytes of each of `HELD`, `[name, micro-batch size]`; without gradients."""
        layer, cost = self._cost(tensor, variant, mode)
        ops = (*cost.forward, *cost.backward)
        asked = (cost.output_bytes, cost.saved_bytes, *(op.live_bytes for op in ops))
        found = np.rint(quantity_values(asked, micros, mode.sequence))
        output, kept, forward, backward = np.split(found, [1, 2, 2 + len(cost.forward)])
        fresh = self.fresh(tensor, variant.name, tuple(micros.tolist()))
        wide = PRECISION_BYTES[mode.precision]
        made = wide * _made_so_far(cost.backward, fresh.sum(axis=1))
        peak = np.max(backward + made, axis=0, initial=0.0)
        numbers = (
            output[0],
            kept[0],
            np.max(forward, axis=0, initial=0.0),
            np.maximum(0.0, peak - kept[0]),
            wide * fresh.sum(axis=1),
            wide * fresh.max(axis=1, initial=0),
            layer.is_embedding,
            wide * layer.parameter_count,
            0.0,
        )
        return np.stack(np.broadcast_arrays(*numbers))

    def _fresh(self, tensor: int, name: str, micros: tuple[int, ...]) -> Ints:
        layer = self.kinds(tensor)[name]
        asked = micros if layer.is_embedding else micros[:1]
        found = [layer.pass_gradient_elements(micro, self._sequence) for micro in asked]
        return np.array(found, dtype=np.int64).reshape(len(asked), -1)


def _made_so_far(backward: Sequence[Op], fresh: Ints) -> Ints:
    """Elements of gradients that exist at each operation, `[op, micro-batch size]`."""
    made = np.array([weight_gradient_elements(op) for op in backward], dtype=np.int64)
    return np.asarray(np.maximum(0, fresh - made.sum()) + np.cumsum(made)[:, None])
