"""Plan space: all plans over several devices that a request leaves open, as tables of indices.

Plans of one pipeline shape (schedule, stages, virtual stages, micro-batches) form a batch, because
the batched cost model evaluates them together. No `Plan` is built until it has won.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

import numpy as np

from windlass.cost import (
    Bools,
    Ints,
    PipelineShape,
    PlanTable,
    RecomputeConfig,
    ShardingOption,
    ShardingTable,
)
from windlass.planner.space.config_table import ConfigFamily, ConfigTable, sharding_options
from windlass.planner.space.open_choices import RECOMPUTE_MODES, OpenChoices, sharding_pairs
from windlass.program import schedule_errors, with_recompute
from windlass.schema import (
    Batch,
    Offload,
    Parallelism,
    PipelineSchedule,
    Plan,
    ShardingDegrees,
    Stage,
)


@dataclass(frozen=True, slots=True)
class PlanBatch:
    """Plans of one pipeline shape on one machine."""

    shape: PipelineShape
    chunk_bounds: tuple[int, ...]
    """First layer of each model chunk, and the number of layers."""
    table: PlanTable


@dataclass(frozen=True)
class PlanSpace(OpenChoices):
    """All plans that a request leaves open.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model, sharded for the tensor-parallel degrees that are
            open.
        machine: the machine of the plans.
    """

    def batches(self) -> Iterator[PlanBatch]:
        """All plans, shape by shape."""
        for shape, configs in self.open_shapes():
            yield self.batch_of(shape, configs)

    def open_shapes(self) -> Iterator[tuple[PipelineShape, Ints]]:
        """All shapes that have plans, each with the indices of its layer configurations."""
        for shape in self.shapes():
            configs = self.legal_configs(shape)
            if configs.size:
                yield shape, configs

    def shapes(self) -> Iterator[PipelineShape]:
        """All legal shapes, each of which has plans with some numbers of micro-batches."""
        return iter(self._microbatches_of)

    @cached_property
    def _microbatches_of(self) -> Mapping[PipelineShape, tuple[int, ...]]:
        """All legal shapes, each with its numbers of micro-batches."""
        shapes: dict[PipelineShape, tuple[int, ...]] = {}
        schedules = (
            (each, *choice)
            for each in self.pipeline_degrees
            for choice in self._open_schedules(each)
        )
        for pipeline, schedule, virtual_stages in schedules:
            if virtual_stages * pipeline > self.graph.layers or (
                pipeline == 1 and schedule != "1f1b"
            ):
                continue
            for micros in self.accumulations:
                if self._is_legal(schedule, pipeline, virtual_stages, micros):
                    shape = PipelineShape.of(schedule, pipeline, virtual_stages, micros)
                    shapes[shape] = (*shapes.get(shape, ()), micros)
        return shapes

    def config_table(self, shape: PipelineShape) -> ConfigTable:
        """The table that a shape's layer configurations are indices of; many shapes share one."""
        accumulates, pipelined = shape.microbatches > 1, shape.pipeline > 1
        if (accumulates, pipelined) not in self._config_tables:
            self._config_tables[accumulates, pipelined] = ConfigTable.of(
                self._families,
                self._sharding_table(sums=accumulates),
                batch=self.request.train.batch,
                micro=self.request.batch.micro,
                sums=accumulates,
                parted=pipelined,
            )
        return self._config_tables[accumulates, pipelined]

    def legal_configs(self, shape: PipelineShape) -> Ints:
        """Indices of the layer configurations of a shape's plans."""
        if shape not in self._legal_config_cache:
            self._legal_config_cache[shape] = self._find_legal_configs(shape)
        return self._legal_config_cache[shape]

    @cached_property
    def _legal_config_cache(self) -> dict[PipelineShape, Ints]:
        return {}

    def _find_legal_configs(self, shape: PipelineShape) -> Ints:
        table = self.config_table(shape)
        counts = np.zeros(self.request.train.batch + 1, dtype=bool)
        counts[list(self._microbatches_of[shape])] = True
        fits = table.devices * shape.pipeline <= self.machine.devices
        has_mode = np.any(self._recompute_options(shape.schedule, table)[:, table.mode], axis=0)
        return np.flatnonzero(fits & counts[table.microbatches] & has_mode)

    def batch_of(self, shape: PipelineShape, chosen: Ints) -> PlanBatch:
        """All plans of a shape with some layer configurations, given by their indices."""
        table = self.config_table(shape)
        recomputable = self._recompute_options(shape.schedule, table)[:, table.mode[chosen]]
        recompute, position = np.nonzero(recomputable)
        config = chosen[position]
        configs = np.stack(
            [table.options[config], config, recompute, table.microbatches[config]], axis=1
        )
        layers = self.request.recompute_layers or self.graph.layers
        counts = layers if isinstance(layers, tuple) else (layers,) * shape.pipeline
        recomputes = (
            RecomputeConfig(),
            RecomputeConfig(selective=counts),
            RecomputeConfig(full=counts),
        )
        plans = PlanTable.crossed(table.layer_configs, recomputes, table.sharding_table, configs)
        return PlanBatch(shape, self.chunk_bounds(shape.chunks), plans)

    def count(self, shape: PipelineShape, chosen: Ints) -> int:
        """How many plans of a shape have these layer configurations."""
        table = self.config_table(shape)
        options = self._recompute_options(shape.schedule, table).sum(axis=0)[table.mode[chosen]]
        return int((options * table.sharding_table.counts[table.options[chosen]]).sum())

    def _recompute_options(self, schedule: PipelineSchedule, table: ConfigTable) -> Bools:
        """Whether layers can be recomputed so under a schedule, `[recompute mode, config mode]`."""
        if (schedule, table) not in self._recompute_option_cache:
            options = np.zeros((len(RECOMPUTE_MODES), len(table.modes)), dtype=bool)
            for index, (tensor, precision, compiled) in enumerate(table.modes):
                for is_compiled, recompute in self.modes(schedule, precision, tensor):
                    options[RECOMPUTE_MODES.index(recompute), index] |= is_compiled == compiled
            self._recompute_option_cache[schedule, table] = options
        return self._recompute_option_cache[schedule, table]

    @cached_property
    def _recompute_option_cache(self) -> dict[tuple[PipelineSchedule, ConfigTable], Bools]:
        return {}

    @cached_property
    def _config_tables(self) -> dict[tuple[bool, bool], ConfigTable]:
        return {}

    @cached_property
    def _families(self) -> tuple[ConfigFamily, ...]:
        """All combinations of tensor and data degrees, precision and sharding of state."""
        pins = self.request.sharding
        return tuple(
            ConfigFamily(tensor, replicas, precision, offloads, options)
            for tensor, replicas, precision in product(
                self.tensor_degrees, self.data_degrees, self.precisions
            )
            for tiers, offloads in self.optimizer_tiers(precision)
            if (options := _sharding_options(replicas, tiers, pins.parameters, pins.optimizer))
        )

    def _sharding_table(self, *, sums: bool) -> ShardingTable:
        if sums not in self._sharding_tables:
            entries = tuple(sharding_options(family, sums=sums) for family in self._families)
            self._sharding_tables[sums] = ShardingTable(entries)
        return self._sharding_tables[sums]

    @cached_property
    def _sharding_tables(self) -> dict[bool, ShardingTable]:
        return {}

    def plan(self, batch: PlanBatch, index: int) -> Plan:
        """The plan at one index of a batch."""
        table, shape = batch.table, batch.shape
        config, option = (
            table.config_of(table.config[index]),
            table.sharding_of(table.sharding[index]),
        )
        layer = config.layer
        plan = self.base.model_copy(
            update={
                "precision": layer.precision,
                "compile": layer.compiled,
                "parallel": Parallelism(
                    pipeline=shape.pipeline,
                    tensor=layer.tensor,
                    data=layer.replicas,
                    schedule=shape.schedule,
                    virtual_stages=shape.virtual_stages,
                ),
                "sharding": ShardingDegrees(
                    parameters=option.parameters, optimizer=option.optimizer
                ),
                "offload": Offload(optimizer=option.optimizer_tier),
                "batch": Batch(
                    sequence=self.sequence, micro=layer.micro, accumulation=config.microbatches
                ),
                "stages": tuple(Stage(phases=(bounds,)) for bounds in pairwise(batch.chunk_bounds)),
            }
        )
        return _with_recompute_config(plan, config.recompute, shape)

    def _is_legal(
        self, schedule: PipelineSchedule, pipeline: int, virtual_stages: int, micros: int
    ) -> bool:
        plan = self.base.model_copy(
            update={
                "parallel": Parallelism.model_construct(
                    pipeline=pipeline,
                    tensor=1,
                    data=1,
                    schedule=schedule,
                    virtual_stages=virtual_stages,
                ),
                "batch": Batch.model_construct(
                    sequence=self.sequence, micro=1, accumulation=micros
                ),
            }
        )
        return not any(schedule_errors(plan))


def _with_recompute_config(plan: Plan, config: RecomputeConfig, shape: PipelineShape) -> Plan:
    if config.mode == "none":
        return plan
    none = (0,) * shape.pipeline
    full, selective = (counts or none for counts in config)
    return with_recompute(plan, full * shape.virtual_stages, selective * shape.virtual_stages)


@lru_cache(maxsize=4096)
def _sharding_options(
    replicas: int, tiers: tuple[str, ...], parameters: int | None, optimizer: int | None
) -> tuple[ShardingOption, ...]:
    pairs = sharding_pairs(replicas, parameters, optimizer)
    return tuple(ShardingOption(*pair, tier) for tier in tiers for pair in pairs)
