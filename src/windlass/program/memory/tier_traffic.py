"""Traffic: bytes that each instruction reads from and writes to the tiers beyond the near one."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from windlass.program.instruction import Instruction
from windlass.program.memory.layer_sizes import LayerSizes, plan_layer_sizes
from windlass.program.memory.offloaded_bytes import offloaded_state_bytes
from windlass.program.phases import deferred_update_layers
from windlass.schema.graph import Graph
from windlass.schema.plan import OffloadClass, Plan


class TransferBytes(NamedTuple):
    """Bytes that cross between the near tier and another."""

    read: int = 0
    written: int = 0

    def plus(self, other: "TransferBytes") -> "TransferBytes":
        """Both together."""
        return TransferBytes(self.read + other.read, self.written + other.written)


class TierTraffic:
    """The traffic of one plan.

    Args:
        plan: the plan.
        graph: that it cuts.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self._plan, self._homes = plan, plan.offload_tiers
        self._put_off = frozenset(
            layer
            for stage in range(plan.parallel.pipeline)
            for layer in deferred_update_layers(plan, graph, stage)
        )
        self._sizes = plan_layer_sizes(plan, graph)

    def instruction_traffic(self, instruction: Instruction, *, stored: bool = True) -> dict[str, TransferBytes]:
        """What an instruction moves, by tier.

        Args:
            instruction: of a program that was lowered from the plan.
            stored: whether gradients wait at home for the updates that are put off: not in the
                first step, nor after settling, where such an update is a plain fetch.
        """
        if instruction.layer is None or not self._homes:
            return {}
        tiers: dict[str, TransferBytes] = {}
        for name, moved in self._classes(instruction, stored=stored):
            if name in self._homes and any(moved):
                tier = self._homes[name]
                tiers[tier] = tiers.get(tier, TransferBytes()).plus(moved)
        return tiers

    def total(
        self, instructions: Iterable[Instruction], *, stored: bool = True
    ) -> dict[str, TransferBytes]:
        """What a step moves, or what settles it, by tier.

        Args:
            instructions: of a program that was lowered from the plan.
            stored: as for one instruction.
        """
        tiers: dict[str, TransferBytes] = {}
        for instruction in instructions:
            for tier, moved in self.instruction_traffic(instruction, stored=stored).items():
                tiers[tier] = tiers.get(tier, TransferBytes()).plus(moved)
        return tiers

    def _classes(
        self, instruction: Instruction, *, stored: bool
    ) -> Iterable[tuple[OffloadClass, TransferBytes]]:
        kind, layer, _ = instruction
        sizes = self._sizes[layer or 0]
        if kind == "prefetch_weights":
            return (("parameters", TransferBytes(read=sizes.weight_shard)),)
        if kind == "offload_grads":
            return (("gradients", TransferBytes(written=sizes.gradient_shard)),)
        if kind == "all_gather_params":  # what others have updated goes home as well
            away = stored or layer not in self._put_off
            return (("parameters", TransferBytes(written=sizes.weight_shard - sizes.updated_weights if away else 0)),)
        if kind == "offload_activation":
            return (("activations", TransferBytes(written=sizes.output)),)
        if kind == "reload_activation":
            return (("activations", TransferBytes(read=sizes.output)),)
        if kind != "update":
            return ()
        if layer not in self._put_off:
            return self._update(sizes)
        if not stored:
            return (("parameters", TransferBytes(read=sizes.weight_shard)),)
        return (*self._update(sizes), ("gradients", TransferBytes(read=sizes.gradient_shard)))

    def _update(self, sizes: LayerSizes) -> tuple[tuple[OffloadClass, TransferBytes], ...]:
        """The state comes and goes; weights come only where they are the masters themselves."""
        state = offloaded_state_bytes(self._plan, sizes)
        read = 0 if self._plan.has_master_weights else sizes.updated_weights
        return (
            ("optimizer", TransferBytes(state, state)),
            ("parameters", TransferBytes(read, sizes.updated_weights)),
        )


def instruction_transfer(plan: Plan, graph: Graph, instruction: Instruction, *, stored: bool = True) -> TransferBytes:
    """Bytes that one instruction reads and writes in all far tiers together.

    Args:
        plan: the plan.
        graph: that it cuts.
        instruction: of a program that was lowered from the plan.
        stored: as in `Traffic.of`.
    """
    return sum_tiers(TierTraffic(plan, graph).instruction_traffic(instruction, stored=stored))


def sum_tiers(tiers: Mapping[str, TransferBytes]) -> TransferBytes:
    """All tiers in one sum."""
    return TransferBytes(
        sum(each.read for each in tiers.values()), sum(each.written for each in tiers.values())
    )
