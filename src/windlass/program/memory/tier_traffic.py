"""Tier traffic: bytes that each instruction reads from and writes to the offload tiers."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from windlass.program.instruction import Instruction
from windlass.program.memory.layer_sizes import LayerSizes, plan_layer_sizes
from windlass.program.memory.offloaded_bytes import read_frozen_bytes, update_state_bytes
from windlass.program.phases import deferred_update_layers
from windlass.schema import Graph, OffloadClass, Plan, optimizer_law


class TransferBytes(NamedTuple):
    """Bytes transferred between device memory and an offload tier."""

    read: int = 0
    """From the offload tier."""
    written: int = 0
    """To the offload tier."""

    def plus(self, other: "TransferBytes") -> "TransferBytes":
        """The sum of both transfers."""
        return TransferBytes(self.read + other.read, self.written + other.written)


class TierTraffic:
    """The transfers of one plan."""

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._plan, self._graph, self._tiers = plan, graph, plan.offload_tiers
        self._law = optimizer_law(plan.optimizer)
        self._deferred = frozenset(
            layer
            for stage in range(plan.parallel.pipeline)
            for layer in deferred_update_layers(plan, graph, stage)
        )
        self._sizes = plan_layer_sizes(plan, graph)

    def instruction_traffic(
        self, instruction: Instruction, *, stored: bool = True
    ) -> dict[str, TransferBytes]:
        """What an instruction transfers, by tier.

        Args:
            instruction: an instruction of a program that was lowered from the plan.
            stored: whether offloaded gradients wait for the deferred updates. They do not in the
                first step, nor after deferred updates were flushed; then such an update only
                fetches weights.
        """
        if instruction.layer is None or not self._tiers:
            return {}
        traffic: dict[str, TransferBytes] = {}
        for name, transfer in self._by_class(instruction, stored=stored):
            if name in self._tiers and any(transfer):
                tier = self._tiers[name]
                traffic[tier] = traffic.get(tier, TransferBytes()).plus(transfer)
        return traffic

    def total(
        self, instructions: Iterable[Instruction], *, stored: bool = True
    ) -> dict[str, TransferBytes]:
        """What a step, or a flush of its deferred updates, transfers, by tier."""
        traffic: dict[str, TransferBytes] = {}
        for instruction in instructions:
            for tier, transfer in self.instruction_traffic(instruction, stored=stored).items():
                traffic[tier] = traffic.get(tier, TransferBytes()).plus(transfer)
        return traffic

    def _by_class(
        self, instruction: Instruction, *, stored: bool
    ) -> Iterable[tuple[OffloadClass, TransferBytes]]:
        kind, layer, _ = instruction
        sizes = self._sizes[layer or 0]
        if kind == "prefetch_weights":
            return (("parameters", TransferBytes(read=self._weights(sizes))),)
        if kind == "offload_grads":
            return (("gradients", TransferBytes(written=sizes.gradient_shard)),)
        if kind == "all_gather_params":  # parts that other replicas have updated are written too
            writes = stored or layer not in self._deferred
            others = sizes.weight_shard - sizes.frozen_shard - sizes.updated_weights
            return (("parameters", TransferBytes(written=others if writes else 0)),)
        if kind == "offload_activation":
            return (("activations", TransferBytes(written=sizes.output)),)
        if kind == "reload_activation":
            return (("activations", TransferBytes(read=sizes.output)),)
        if kind != "update":
            return ()
        if layer not in self._deferred:
            return self._update(sizes)
        if not stored:
            return (("parameters", TransferBytes(read=self._weights(sizes))),)
        frozen = read_frozen_bytes(self._plan, self._graph, sizes)
        return (
            *self._update(sizes),
            ("gradients", TransferBytes(read=self._law.gradient_passes * sizes.gradient_shard)),
            ("parameters", TransferBytes(read=frozen)),
        )

    def _weights(self, sizes: LayerSizes) -> int:
        """Bytes that are read for all of a layer's weights: frozen ones as files have them."""
        read = read_frozen_bytes(self._plan, self._graph, sizes)
        return sizes.weight_shard - sizes.frozen_shard + read

    def _update(self, sizes: LayerSizes) -> tuple[tuple[OffloadClass, TransferBytes], ...]:
        """State is read and written; weights are read only if they are the master weights."""
        state, weights = update_state_bytes(self._plan, sizes), sizes.updated_weights
        masters = 0 if self._plan.has_master_weights else self._law.passes * weights
        return (
            ("optimizer", TransferBytes(state, state)),
            ("parameters", TransferBytes(masters, masters or weights)),
        )


def sum_tiers(tiers: Mapping[str, TransferBytes]) -> TransferBytes:
    """The sum of the transfers of all tiers."""
    return TransferBytes(
        sum(transfer.read for transfer in tiers.values()),
        sum(transfer.written for transfer in tiers.values()),
    )
