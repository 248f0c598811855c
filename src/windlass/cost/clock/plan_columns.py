"""Plan columns: plans that run through the pipeline alike, as arrays over plans."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, NamedTuple, Self

import numpy as np

from windlass.cost.arrays import Bools, Ints
from windlass.schema import DEVICE_TIER, OtherAttention, PipelineSchedule, Plan, Precision, Stage

_FEW_MORE = 5
"""Micro-batches beyond the number of stages until all stages of a plain schedule are busy."""
_SETTLED = 24
"""Micro-batches after which steps of few stages repeat themselves, and a multiple of most of the
periods in which they do: a stage that waits for k micro-batches in flight repeats after k."""


class PipelineShape(NamedTuple):
    """How a step runs through the stages."""

    schedule: PipelineSchedule
    pipeline: int
    virtual_stages: int
    microbatches: int
    """Micro-batches of a step; plans with more than `settled` share a shape."""

    @classmethod
    def of(
        cls, schedule: PipelineSchedule, pipeline: int, virtual_stages: int, microbatches: int
    ) -> Self:
        """The shape of plans with this many micro-batches."""
        shape = cls(schedule, pipeline, virtual_stages, microbatches)
        most = shape.settled + shape.period + 1
        return shape._replace(microbatches=min(microbatches, most))

    @property
    def settled(self) -> int:
        """Micro-batches from which each further `period` takes as long as the last."""
        if self.virtual_stages > 1:
            return max(3 * self.pipeline, self.period)
        return max(self.pipeline + _FEW_MORE, _SETTLED)

    @property
    def period(self) -> int:
        """Micro-batches after which a step repeats itself: a multiple of the number of stages."""
        return -(-_SETTLED // self.pipeline) * self.pipeline

    @property
    def repeats(self) -> bool:
        """Whether it stands for any larger number of micro-batches too."""
        return self.microbatches > self.settled + self.period

    @property
    def chunks(self) -> int:
        """Model chunks of all stages."""
        return self.pipeline * self.virtual_stages


class LayerConfig(NamedTuple):
    """What plans of one batch differ in and is no number: how layers compute and where state is."""

    tensor: int
    precision: Precision
    compiled: bool = False
    optimizer_tier: str = DEVICE_TIER
    """Tier of the optimizer state."""
    context: int | None = None
    reshard: Literal[True] | None = None
    loss: Literal["fused"] | None = None
    attention: OtherAttention | None = None
    expert: int | None = None

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """The configuration of a plan."""
        return cls(
            plan.parallel.tensor,
            plan.precision,
            plan.compile,
            plan.offload.optimizer,
            plan.parallel.context,
            plan.sharding.reshard,
            plan.loss,
            plan.attention,
            plan.parallel.expert,
        )

    @property
    def ranks(self) -> int:
        """Devices of one replica of one stage."""
        return int(self.tensor) * (self.context or 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class PlanColumns:
    """Plans of one pipeline shape that are cut into the same model chunks."""

    shape: PipelineShape
    chunk_bounds: tuple[int, ...]
    """First layer of each model chunk, and the number of layers."""
    configs: tuple[LayerConfig, ...]
    config: Ints
    """Index among `configs`, `[plan]`."""
    micro: Ints
    """Sequences of a micro-batch, `[plan]`."""
    accumulation: Ints
    """Micro-batches of a step, `[plan]`."""
    data: Ints
    """Data-parallel degree, `[plan]`."""
    parameters: Ints
    """Sharding degree of parameters, `[plan]`."""
    optimizer: Ints
    """Sharding degree of optimizer state, `[plan]`."""
    full: Ints
    """Fully recomputed layers of each model chunk, the first that can be, `[plan, chunk]`."""
    selective: Ints
    """Selectively recomputed layers: the first ones, or all others where some are recomputed in
    full, `[plan, chunk]`."""

    @classmethod
    def of(cls, plans: Sequence[Plan]) -> Self:
        """The columns of plans of one shape.

        Raises:
            ValueError: their shapes or model chunks differ.
        """
        parallel = [plan.parallel for plan in plans]
        shapes = {
            PipelineShape.of(
                each.schedule, each.pipeline, each.virtual_stages, plan.batch.accumulation
            )
            for each, plan in zip(parallel, plans, strict=True)
        }
        bounds = {tuple(stage.first_layer for stage in plan.stages) for plan in plans}
        if len(shapes) != 1 or len(bounds) != 1:
            raise ValueError(f"{len(shapes)} pipeline shapes and {len(bounds)} cuts of the layers")
        layers = plans[0].stages[-1].end_layer
        numbers: dict[LayerConfig, int] = {}
        config = [numbers.setdefault(LayerConfig.of(plan), len(numbers)) for plan in plans]
        recomputed = [[_recomputed(stage, layers) for stage in plan.stages] for plan in plans]
        full, selective = np.moveaxis(np.array(recomputed, dtype=np.int64), 2, 0)
        return cls(
            shape=shapes.pop(),
            chunk_bounds=(*bounds.pop(), layers),
            configs=tuple(numbers),
            config=np.array(config),
            micro=np.array([plan.batch.micro for plan in plans]),
            accumulation=np.array([plan.batch.accumulation for plan in plans]),
            data=np.array([each.data for each in parallel]),
            parameters=np.array([plan.sharding.parameters for plan in plans]),
            optimizer=np.array([plan.sharding.optimizer for plan in plans]),
            full=full,
            selective=selective,
        )

    @property
    def count(self) -> int:
        """Number of plans."""
        return len(self.config)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.chunk_bounds[-1]

    def select(self, plans: Ints | Bools | slice) -> Self:
        """Some of the plans; the columns themselves if that is all of them, in their order."""
        if isinstance(plans, np.ndarray) and len(plans) == self.count:
            every = (
                plans.all() if plans.dtype == np.bool_ else (plans == np.arange(len(plans))).all()
            )
            if every:
                return self
        arrays = {
            each.name: getattr(self, each.name)[plans]
            for each in fields(self)
            if isinstance(getattr(self, each.name), np.ndarray)
        }
        return replace(self, **arrays)

    def of_configs(self, values: Sequence[int]) -> Ints:
        """The value of each plan's configuration, `[plan]`."""
        return np.asarray(np.array(values)[self.config])

    @property
    def replicas(self) -> Ints:
        """Ranks that hold the same parameters unless they shard them, `[plan]`."""
        context = self.of_configs([each.context or 1 for each in self.configs])
        return np.asarray(self.data * context)

    @property
    def devices(self) -> Ints:
        """Devices of all stages, `[plan]`."""
        ranks = self.of_configs([each.ranks for each in self.configs])
        return np.asarray(self.shape.pipeline * self.data * ranks)

    @property
    def recomputable(self) -> Ints:
        """Layers of each model chunk that can be recomputed, `[chunk]`."""
        bounds = np.array(self.chunk_bounds)
        able = np.minimum(bounds[1:], self.layers - 1) - np.maximum(bounds[:-1], 1)
        return np.asarray(np.maximum(able, 0))

    def recompute_modes(self) -> tuple[Bools, Bools]:
        """Whether each layer is recomputed in full, and selectively, `[layer, plan]`."""
        able = self.recomputable
        full = np.minimum(self.full, able)
        some = np.minimum(self.selective, able)
        some = np.where((full > 0) & (some > 0), able - full, some)
        bounds = np.array(self.chunk_bounds)
        chunk = np.repeat(np.arange(len(able)), np.diff(bounds))
        place = np.arange(self.layers) - np.maximum(bounds[:-1], 1)[chunk]
        inner = (place >= 0) & (np.arange(self.layers) < self.layers - 1)
        place = np.where(inner, place, self.layers)[:, None]
        whole, more = full.T[chunk], some.T[chunk]
        is_full = place < whole
        return is_full, ~is_full & (place < whole + more)


def _recomputed(stage: Stage, layers: int) -> tuple[int, int]:
    """Layers of a model chunk that a plan recomputes in full, and selectively."""
    if stage.recompute == "none":
        return 0, 0
    able = max(0, min(stage.end_layer, layers - 1) - max(stage.first_layer, 1))
    count = able if stage.recompute_layers is None else min(stage.recompute_layers, able)
    if stage.recompute == "selective":
        return 0, count
    return count, (able - count if stage.recompute_rest else 0)
