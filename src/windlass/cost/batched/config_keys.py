"""Keys of batched costs: how layers compute, recompute and share their state."""

from typing import NamedTuple

from windlass.schema import DEVICE_TIER, Plan, Precision, Recompute, ShardingDegrees


class LayerConfig(NamedTuple):
    """What the cost of a layer's passes depends on, apart from the sequence length."""

    tensor: int
    precision: Precision
    compiled: bool
    micro: int
    accumulates: bool
    """Whether a step has several micro-batches, so that gradients are accumulated."""
    pipelined: bool
    """Whether there are several pipeline stages."""
    replicas: int = 1
    """Data-parallel replicas, whose tensor-parallel collectives share the links."""
    offloads: bool = False
    """Whether compute units are reserved for transfers between tiers (`Device.moving_share`)."""


class ShardingOption(NamedTuple):
    """Sharding degrees of model state, and the tier of optimizer state."""

    parameters: int
    """Sharding degree of parameters (rts)."""
    optimizer: int
    """Sharding degree of optimizer state (rts')."""
    optimizer_tier: str = DEVICE_TIER
    """Tier of the optimizer state."""


class ShardingOptions(NamedTuple):
    """Several sharding options of layers with the same costs otherwise."""

    tensor: int
    precision: Precision
    accumulates: bool
    replicas: int
    options: tuple[ShardingOption, ...]
    offloads: bool = False
    """As in `LayerConfig`."""


def priced_plan(base: Plan, precision: Precision, *, accumulates: bool, optimizer: int = 1) -> Plan:
    """A plan with the number formats and optimizer sharding that costs depend on."""
    batch = base.batch.model_copy(update={"accumulation": 2 if accumulates else 1})
    sharding = ShardingDegrees.model_construct(
        {"parameters", "optimizer"}, parameters=1, optimizer=optimizer
    )
    return base.model_copy(update={"precision": precision, "batch": batch, "sharding": sharding})


class RecomputeConfig(NamedTuple):
    """Recomputed layers of each stage, the same for each of its model chunks."""

    full: tuple[int, ...] = ()
    """Fully recomputed layers, `[stage]`, the first ones; () for none."""
    selective: tuple[int, ...] = ()
    """Selectively recomputed layers, `[stage]`: the first ones, or all others where some are
    recomputed in full, as in `program.activation_checkpointing.with_recompute`."""

    @property
    def mode(self) -> Recompute:
        """The most that any stage recomputes."""
        return "full" if any(self.full) else "selective" if any(self.selective) else "none"


class ComputeConfig(NamedTuple):
    """What the passes of a plan depend on."""

    layer: LayerConfig
    recompute: RecomputeConfig
    microbatches: int
    """Micro-batches of a step."""
