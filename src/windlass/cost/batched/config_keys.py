"""Ways: how layers run, and how replicas share their state, as keys of what that costs."""

from typing import NamedTuple

from windlass.schema.graph import Precision
from windlass.schema.plan import DEVICE_TIER, Plan, Recompute, ShardingDegrees


class LayerConfig(NamedTuple):
    """What the passes of a layer depend on, the length of a sequence apart."""

    tensor: int
    precision: Precision
    compiled: bool
    micro: int
    accumulates: bool
    """Whether a step has several micro-batches, so that their gradients are summed."""
    pipelined: bool
    """Whether there are several stages."""
    replicas: int = 1
    """Whose slices exchange at the same time, on the same links."""
    offloads: bool = False
    """Whether compute units are set apart for moves between tiers (`Device.moving_share`)."""


class ShardingOption(NamedTuple):
    """How replicas share the state of layers, and where that of the optimizer lives."""

    parameters: int
    """rts."""
    optimizer: int
    """rts'."""
    optimizer_tier: str = DEVICE_TIER
    """The tier of the optimizer's state."""


class ShardingOptions(NamedTuple):
    """Ways to share the state of layers."""

    tensor: int
    precision: Precision
    accumulates: bool
    replicas: int
    options: tuple[ShardingOption, ...]
    offloads: bool = False
    """As in `Setting`."""


def priced_plan(base: Plan, precision: Precision, *, accumulates: bool, optimizer: int = 1) -> Plan:
    """A plan as far as it says how wide numbers are, and how replicas share optimizer state."""
    batch = base.batch.model_copy(update={"accumulation": 2 if accumulates else 1})
    sharding = ShardingDegrees.model_construct(
        {"parameters", "optimizer"}, parameters=1, optimizer=optimizer
    )
    return base.model_copy(update={"precision": precision, "batch": batch, "sharding": sharding})


class RecomputeConfig(NamedTuple):
    """What is computed again of the blocks of each stage, the same of each of its chunks."""

    full: tuple[int, ...] = ()
    """For each stage of how many of the first blocks all is; () of none."""
    selective: tuple[int, ...] = ()
    """For each stage of how many all but large products: of the first, or of all that are left
    where of some all is, as `program.recompute.recomputing` has it."""

    @property
    def mode(self) -> Recompute:
        """The most that any stage computes again."""
        return "full" if any(self.full) else "selective" if any(self.selective) else "none"


class ComputeConfig(NamedTuple):
    """What the passes of a plan depend on."""

    layer: LayerConfig
    recompute: RecomputeConfig
    microbatches: int
    """Micro-batches of a step."""
