"""Costs of passes of many layer configurations at once, by layer kind.

Gradient accumulation and tensor-parallel collectives are added to what a pass takes alone; the
latter depend on how many replicas communicate at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.config_keys import LayerConfig, priced_plan
from windlass.cost.batched.layer_ops import AMONG, HELD, PASSES, ChainOps, PassArrays
from windlass.cost.communication_time import tensor_parallel_ring
from windlass.cost.op_time import (
    DeviceRates,
    OpContext,
    batch_load_bytes,
    exposed_seconds,
    grad_accumulation_bytes,
    rates_at,
    tied_grad_add_bytes,
)
from windlass.cost.ring_bandwidth import RingCosts
from windlass.program import tied_elements_within_stage
from windlass.schema import Device, Graph, Machine, Plan, Precision

_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Seconds and bytes of passes, `[config, kind]`.

    Selectively recomputed variants follow all kinds (`LayerCosts.variants`).
    """

    forward: Floats
    backward: Floats
    backward_input: Floats
    backward_weight: Floats
    sum_first: Floats
    """Adding the first micro-batch's gradients."""
    sum_later: Floats
    held: Floats
    """Bytes of each of `HELD`, `[config, name, kind]`."""
    load_seconds: Floats
    lent: Floats
    """Elements of tied weights, `[config]`."""
    taking: Floats
    """Seconds to add their gradient to the owner's, `[config]`."""
    widths: Floats
    """Bytes of a micro-batch's tokens, of a gradient element, and of a weight, `[config, 3]`."""


class _Like(NamedTuple):
    """What configurations that are priced together have in common."""

    precision: Precision
    compiled: bool
    sums: bool
    parted: bool
    moves: bool


class PassCostModel:
    """Costs of the passes of a graph's layers.

    Args:
        base: states the sequence length.
        graph: the graph.
        machine: the machine that they run on.
        tied: layers with tied weights, each with the layer that owns them.
        rings: costs of rings on its links.
    """

    def __init__(
        self,
        base: Plan,
        graph: Graph,
        machine: Machine,
        tied: Sequence[tuple[int, int]],
        rings: RingCosts,
    ) -> None:
        self._base, self._graph, self._machine, self._tied = base, graph, machine, tied
        self._sequence = base.batch.sequence
        self.ops = ChainOps(graph, self._sequence)
        self._rings = rings
        self._alone = cache(self._alone_of)
        self._shared = cache(self._shared_of)

    def of(self, settings: Sequence[LayerConfig]) -> PassCosts:
        """Costs of some configurations.

        Raises:
            KeyError: the machine states no rate or link, or the graph no cost, that one needs.
        """
        alike: dict[_Like, list[int]] = {}
        for at, each in enumerate(settings):
            like = _Like(
                each.precision, each.compiled, each.accumulates, each.pipelined, each.offloads
            )
            alike.setdefault(like, []).append(at)
        found = [self._of(like, [settings[at] for at in places]) for like, places in alike.items()]
        if len(found) == 1:
            return found[0]
        order = np.argsort(np.concatenate(list(alike.values())))
        return PassCosts(
            **{
                field.name: np.concatenate([getattr(each, field.name) for each in found])[order]
                for field in fields(PassCosts)
            }
        )

    def _of(self, like: _Like, settings: Sequence[LayerConfig]) -> PassCosts:
        plan = priced_plan(self._base, like.precision, accumulates=like.sums)
        device = self._machine.device.effective(offloads=like.moves)
        tensors = tuple(dict.fromkeys(each.tensor for each in settings))
        micros = tuple(sorted({each.micro for each in settings}))
        places = {each: at for at, each in enumerate(tensors)}
        tensor = np.array([places[each.tensor] for each in settings])
        micro = np.searchsorted(micros, [each.micro for each in settings])
        replicas = np.array([each.replicas for each in settings])
        each = (
            self._alone(like.precision, like.compiled, like.moves, slices, micros)
            for slices in tensors
        )
        alone = PassArrays(*map(np.stack, zip(*each, strict=True)))
        exchanged = self._exchanged(alone, tensors, replicas, (tensor, micro))
        rates = DeviceRates(
            device,
            OpContext(self._sequence, like.precision, like.compiled),
            self._machine.stack,
            in_turn=self._machine.execution_model == "bulk-synchronous",
        )
        seconds = exposed_seconds(
            rates, alone.work[tensor, micro], alone.host[tensor, micro], exchanged
        )
        summed = self._summed(like, tensors, micros)[tensor, micro]
        kinds = [self.ops.kinds(each) for each in tensors]
        held = alone.held[tensor, micro]
        owned = np.array([[of[v.name].parameter_count for v in self.ops.variants] for of in kinds])
        held[:, HELD.index("gradients")] = (owned * plan.gradient_itemsize)[tensor]
        lent = np.array([float(self.lent_elements(each)) for each in tensors])[tensor]
        tokens = np.array(micros, dtype=np.float64)[micro] * self._sequence
        gradient = np.full(len(tokens), plan.gradient_itemsize)
        weight = np.full(len(tokens), plan.parameter_itemsize)
        return PassCosts(
            **{name.replace(" ", "_"): seconds[:, at] for at, name in enumerate(PASSES)},
            sum_first=summed[:, 0],
            sum_later=summed[:, 1],
            held=held,
            load_seconds=_copying(device, batch_load_bytes(tokens)) + device.pass_seconds,
            lent=lent,
            taking=_copying(device, tied_grad_add_bytes(lent, plan.gradient_itemsize)),
            widths=np.stack([2.0 * _TOKEN_BYTES * tokens, gradient, weight], axis=1),
        )

    def _alone_of(
        self,
        precision: Precision,
        compiled: bool,
        moves: bool,
        tensor: int,
        micros: tuple[int, ...],
    ) -> PassArrays:
        device = self._machine.device.effective(offloads=moves)
        return self.ops.alone(
            device,
            OpContext(self._sequence, precision, compiled),
            tensor,
            micros,
            self._machine.stack,
        )

    def lent_elements(self, tensor: int) -> int:
        """Elements of tied weights, whole or as one of t tensor-parallel shards."""
        if not self._tied:
            return 0
        kinds = tuple(self._graph.shard(tensor).layer_kinds())
        return sum(p.count for p in kinds[self._tied[0][0]].parameters if p.tied_to is not None)

    def _exchanged(
        self, alone: PassArrays, tensors: Sequence[int], replicas: Ints, place: tuple[Ints, Ints]
    ) -> Floats:
        """Seconds of tensor-parallel collectives in passes, `[config, pass, kind]`.

        Args:
            alone: what passes communicate, by tensor degree.
            tensors: the tensor degrees.
            replicas: data-parallel degree, `[config]`.
            place: index of the tensor degree and of the micro-batch size, `[config]`.
        """
        tensor, micro = place
        found = np.zeros_like(alone.work[place])
        exchanging = replicas * np.array([int(each) for each in tensors])[tensor]
        for at, among in enumerate(AMONG):
            sent, hops = (each[tensor, at, micro] for each in (alone.sent, alone.hops))
            if sent.any():
                ranks, apart = np.array([tensor_parallel_ring(each, among) for each in tensors])[
                    tensor
                ].T
                ways = self._rings.costs(ranks, apart, exchanging)
                each_byte, each_hop = (way[:, None, None] for way in ways)
                found += sent * each_byte + hops * each_hop
        return found

    def _summed(self, like: _Like, tensors: Sequence[int], micros: Sequence[int]) -> Floats:
        """Seconds to accumulate gradients, `[tensor degree, micro-batch size, 2, kind]`."""
        device, plan = (
            self._machine.device.effective(offloads=like.moves),
            priced_plan(self._base, like.precision, accumulates=like.sums),
        )
        found = np.empty((len(tensors), len(micros), 2, len(self.ops.variants)))
        for at, tensor in enumerate(tensors):
            there = self._shared(tensor, like.parted)
            for (place, (name, _)), first in product(enumerate(self.ops.variants), (True, False)):
                kind = self.ops.kinds(tensor)[name]
                moved = [
                    grad_accumulation_bytes(
                        kind,
                        plan,
                        self._machine.stack,
                        shared=there.get(name, 0),
                        rows=int(rows),
                        first=first,
                    )
                    for rows in self.ops.fresh(tensor, name, tuple(micros)).sum(axis=1)
                ]
                seconds = _copying(device, np.array(moved, dtype=np.float64)).sum(axis=1)
                found[at, :, 0 if first else 1, place] = seconds
        return found

    def _shared_of(self, tensor: int, parted: bool) -> Mapping[str, int]:
        """Elements of a kind's first layer that a later one of its stage uses, by kind."""
        part = self._graph.shard(tensor)
        names = [kind.name for kind in part.layer_kinds()]
        stages = [0] * (len(names) - 1) + [int(parted)]
        there = tied_elements_within_stage(stages, part)
        return {name: there.get(names.index(name), 0) for name in self.ops.names}


def _copying(device: Device, nbytes: Floats) -> Floats:
    """Seconds of operations that each move this many bytes."""
    return np.asarray(nbytes / rates_at(device.traffic, nbytes))
