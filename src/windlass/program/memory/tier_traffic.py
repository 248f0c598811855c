"""Traffic: bytes that each instruction reads from and writes to the tiers beyond the near one."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from windlass.program.instruction import Instruction
from windlass.program.memory.layer_sizes import LayerSizes, sizes_of
from windlass.program.memory.offloaded_bytes import state_at_home
from windlass.program.phases import put_off
from windlass.schema.graph import Graph
from windlass.schema.plan import OffloadClass, Plan


class Moved(NamedTuple):
    """Bytes that cross between the near tier and another."""

    read: int = 0
    written: int = 0

    def plus(self, other: "Moved") -> "Moved":
        """Both together."""
        return Moved(self.read + other.read, self.written + other.written)


class Traffic:
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
            for layer in put_off(plan, graph, stage)
        )
        self._sizes = sizes_of(plan, graph)

    def of(self, instruction: Instruction, *, stored: bool = True) -> dict[str, Moved]:
        """What an instruction moves, by tier.

        Args:
            instruction: of a program that was lowered from the plan.
            stored: whether gradients wait at home for the updates that are put off: not in the
                first step, nor after settling, where such an update is a plain fetch.
        """
        if instruction.layer is None or not self._homes:
            return {}
        tiers: dict[str, Moved] = {}
        for name, moved in self._classes(instruction, stored=stored):
            if name in self._homes and any(moved):
                tier = self._homes[name]
                tiers[tier] = tiers.get(tier, Moved()).plus(moved)
        return tiers

    def total(
        self, instructions: Iterable[Instruction], *, stored: bool = True
    ) -> dict[str, Moved]:
        """What a step moves, or what settles it, by tier.

        Args:
            instructions: of a program that was lowered from the plan.
            stored: as for one instruction.
        """
        tiers: dict[str, Moved] = {}
        for instruction in instructions:
            for tier, moved in self.of(instruction, stored=stored).items():
                tiers[tier] = tiers.get(tier, Moved()).plus(moved)
        return tiers

    def _classes(
        self, instruction: Instruction, *, stored: bool
    ) -> Iterable[tuple[OffloadClass, Moved]]:
        kind, layer, _ = instruction
        sizes = self._sizes[layer or 0]
        if kind == "prefetch_weights":
            return (("parameters", Moved(read=sizes.held)),)
        if kind == "offload_grads":
            return (("gradients", Moved(written=sizes.shard)),)
        if kind == "all_gather_params":  # what others have updated goes home as well
            away = stored or layer not in self._put_off
            return (("parameters", Moved(written=sizes.held - sizes.part if away else 0)),)
        if kind == "offload_activation":
            return (("activations", Moved(written=sizes.output)),)
        if kind == "reload_activation":
            return (("activations", Moved(read=sizes.output)),)
        if kind != "update":
            return ()
        if layer not in self._put_off:
            return self._update(sizes)
        if not stored:
            return (("parameters", Moved(read=sizes.held)),)
        return (*self._update(sizes), ("gradients", Moved(read=sizes.shard)))

    def _update(self, sizes: LayerSizes) -> tuple[tuple[OffloadClass, Moved], ...]:
        """The state comes and goes; weights come only where they are the masters themselves."""
        state = state_at_home(self._plan, sizes)
        read = 0 if self._plan.has_master_weights else sizes.part
        return (
            ("optimizer", Moved(state, state)),
            ("parameters", Moved(read, sizes.part)),
        )


def moved(plan: Plan, graph: Graph, instruction: Instruction, *, stored: bool = True) -> Moved:
    """Bytes that one instruction reads and writes in all far tiers together.

    Args:
        plan: the plan.
        graph: that it cuts.
        instruction: of a program that was lowered from the plan.
        stored: as in `Traffic.of`.
    """
    return together(Traffic(plan, graph).of(instruction, stored=stored))


def together(tiers: Mapping[str, Moved]) -> Moved:
    """All tiers in one sum."""
    return Moved(
        sum(each.read for each in tiers.values()), sum(each.written for each in tiers.values())
    )
