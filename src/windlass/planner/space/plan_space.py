"""Plan space: all plans that a request leaves open, as rows of arrays.

A *configuration* says how one replica computes: tensor-parallel degree, precision, compiled or not,
data-parallel degree and micro-batch. Configurations do not depend on the pipeline, so there are
some thousand of them at most. Each goes with every number of pipeline stages, schedule, recompute
and sharding; those products are spelled out only for the few configurations that a search reaches.
No `Plan` is built until it may have won.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise, product
from typing import Literal, NamedTuple

import numpy as np

from windlass.cost import Bools, Ints, LayerConfig, PipelineShape, PlanColumns
from windlass.planner.space.open_choices import OpenChoices
from windlass.planner.space.options import is_captured, vary
from windlass.program import with_recompute
from windlass.schema import (
    Batch,
    Offload,
    Parallelism,
    PipelineSchedule,
    Plan,
    Precision,
    Recompute,
    ShardingDegrees,
    Stage,
)


class PipelineOption(NamedTuple):
    """How layers are divided over pipeline stages."""

    pipeline: int
    schedule: PipelineSchedule
    virtual_stages: int


class StateOption(NamedTuple):
    """How replicas share state, and where it is."""

    parameters: int
    optimizer: int
    optimizer_tier: str
    reshard: Literal[True] | None


@dataclass(frozen=True, eq=False)
class ConfigTable:
    """All configurations of a space."""

    modes: tuple[LayerConfig, ...]
    """How layers compute, with state on the device."""
    mode: Ints
    """Index among `modes`, `[config]`."""
    data: Ints
    """Data-parallel degree, `[config]`."""
    micro: Ints
    """Sequences of a micro-batch, `[config]`."""
    accumulation: Ints
    """Micro-batches of a step, `[config]`."""
    devices: Ints
    """Devices of one pipeline stage, `[config]`."""

    @property
    def count(self) -> int:
        """Number of configurations."""
        return len(self.mode)


@dataclass(frozen=True)
class PlanSpace(OpenChoices):
    """All plans that a request leaves open.

    Args:
        request: pins whatever it names; the rest is open.
        graph: the request's model, sharded for the tensor-parallel degrees that are open.
        machine: the machine of the plans; the stack that drives it bounds what is open.
    """

    @cached_property
    def table(self) -> ConfigTable:
        """All configurations."""
        modes = tuple(
            LayerConfig(
                tensor,
                precision,
                compiled,
                context=context,
                loss=loss,
                attention=attention,
                expert=expert,
            )
            for tensor, precision, compiled, context, loss, attention, expert in product(
                self.tensor_degrees,
                self.precisions,
                self.compile_modes,
                self.context_degrees,
                self.losses,
                self.attentions,
                self.expert_degrees,
            )
            if is_captured(self.graph, precision, compiled=compiled)
            and (loss is None or tensor == 1)
            and self.divides_tokens(context, tensor)
        )
        sizes = np.array(
            [(data, *each) for data in self.data_degrees for each in self.microbatches(data)],
            dtype=np.int64,
        ).reshape(-1, 3)
        ranks = np.array([each.ranks for each in modes], dtype=np.int64)
        mode, size = (each.ravel() for each in np.indices((len(modes), len(sizes))))
        kept = ranks[mode] * sizes[size, 0] <= self.machine.devices
        if any(each.expert for each in modes):
            pairs = zip(mode.tolist(), sizes[size, 0].tolist(), strict=True)
            kept &= np.array(
                [
                    self.divides_experts(modes[each].expert, data, modes[each].context)
                    for each, data in pairs
                ]
            )
        mode, size = mode[kept], size[kept]
        data, micro, accumulation = sizes[size].T
        return ConfigTable(modes, mode, data, micro, accumulation, ranks[mode] * data)

    def options(self, pipeline: int) -> Iterator[PipelineOption]:
        """The ways to run so many pipeline stages."""
        alone = self.request.parallel.schedule if self.machine.devices == 1 else None
        for schedule, chunks in self.open_schedules(pipeline):
            runs = pipeline > 1 or schedule == (alone or "1f1b")  # all are the same on one stage
            if runs and pipeline * chunks <= self.graph.layers:
                yield PipelineOption(pipeline, schedule, chunks)

    def legal(self, option: PipelineOption, configs: Ints) -> Ints:
        """Those of some configurations that can run so."""
        table = self.table
        kept = table.devices[configs] * option.pipeline <= self.machine.devices
        if option.schedule == "interleaved":
            kept &= table.accumulation[configs] % option.pipeline == 0
        able = self._able(option.schedule)
        return np.asarray(configs[kept & able[table.mode[configs]]])

    @cached_property
    def _able(self) -> Callable[[PipelineSchedule], Bools]:
        """Says of each mode of layers whether a schedule can run them at all, `[mode]`."""

        def found(schedule: PipelineSchedule) -> Bools:
            option = PipelineOption(1, schedule, 1)
            return np.array(
                [bool(self.recomputes(option, mode)) for mode in self.table.modes], dtype=bool
            )

        return cache(found)

    def recomputes(self, option: PipelineOption, mode: LayerConfig) -> tuple[Recompute, ...]:
        """Recompute modes of such layers; none if they cannot run so at all."""
        modes = self.modes(option.schedule, mode.precision, mode.tensor)
        return tuple(recompute for compiled, recompute in modes if compiled == mode.compiled)

    def columns(self, option: PipelineOption, configs: Ints) -> Iterator[tuple[PlanColumns, Ints]]:
        """The plans of some configurations with nothing recomputed, shape by shape.

        Yields:
            Plans with every sharding and tier of state, and each one's configuration.
        """
        table, bounds = self.table, self.chunk_bounds(option.pipeline * option.virtual_stages)
        schedule = option.schedule, option.pipeline, option.virtual_stages
        shapes: dict[PipelineShape, list[int]] = {}
        for config in configs.tolist():
            shape = PipelineShape.of(*schedule, int(table.accumulation[config]))
            shapes.setdefault(shape, []).append(config)
        for shape, alike in shapes.items():
            numbers: dict[LayerConfig, int] = {}
            rows = [
                (config, numbers.setdefault(layer, len(numbers)), state.parameters, state.optimizer)
                for config in alike
                for layer, state in self._states(config)
            ]
            if not rows:
                continue
            config, layer, parameters, optimizer = np.array(rows, dtype=np.int64).T
            none = np.zeros((len(rows), shape.chunks), dtype=np.int64)
            yield (
                PlanColumns(
                    shape=shape,
                    chunk_bounds=bounds,
                    configs=tuple(numbers),
                    config=layer,
                    micro=table.micro[config],
                    accumulation=table.accumulation[config],
                    data=table.data[config],
                    parameters=parameters,
                    optimizer=optimizer,
                    full=none,
                    selective=none,
                ),
                config,
            )

    def _states(self, config: int) -> Iterator[tuple[LayerConfig, StateOption]]:
        """Every sharding and tier of a configuration's state."""
        mode = self.table.modes[self.table.mode[config]]
        replicas = int(self.table.data[config]) * (mode.context or 1)
        for state in self.state_options(mode.precision, replicas, mode.expert or 1):
            yield (
                mode._replace(optimizer_tier=state.optimizer_tier, reshard=state.reshard),
                state,
            )

    @cached_property
    def state_options(self) -> Callable[[Precision, int, int], tuple[StateOption, ...]]:
        """Every sharding and tier of state that is open.

        Arguments are the precision, the number of replicas and the expert-parallel degree.
        """

        def found(precision: Precision, replicas: int, expert: int) -> tuple[StateOption, ...]:
            return tuple(
                StateOption(parameters, optimizer, tier, reshard)
                for tier in self.optimizer_tiers(precision)
                for parameters, optimizer in self.sharding_degrees(replicas, expert)
                for reshard in self.reshards(parameters)
            )

        return cache(found)

    @cached_property
    def pinned_recompute(self) -> dict[Recompute, tuple[int, ...]]:
        """Layers that each stage recomputes where that is not open, by mode."""
        layers = self.request.recompute_layers or self.graph.layers
        return {
            mode: layers if isinstance(layers, tuple) else (layers,)
            for mode in ("selective", "full")
        } | {"none": (0,)}

    def count(self) -> int:
        """Number of plans of the space, with layers recomputed in each mode that is open."""
        everything, table, total = np.arange(self.table.count), self.table, 0
        replicas = table.devices // np.array([int(each.tensor) for each in table.modes])[table.mode]
        states = np.array(
            [
                len(
                    self.state_options(
                        table.modes[mode].precision, count, table.modes[mode].expert or 1
                    )
                )
                for mode, count in zip(table.mode.tolist(), replicas.tolist(), strict=True)
            ]
        )
        for pipeline in self.pipeline_degrees:
            for option in self.options(pipeline):
                modes = np.array([len(self.recomputes(option, mode)) for mode in table.modes])
                legal = self.legal(option, everything)
                total += int((states[legal] * modes[table.mode[legal]]).sum())
        return total

    def plan(self, columns: PlanColumns, row: int) -> Plan:
        """The plan of one row."""
        shape, layer = columns.shape, columns.configs[columns.config[row]]
        plan = self.base.model_copy(
            update={
                "precision": layer.precision,
                "compile": layer.compiled,
                "loss": layer.loss,
                "attention": layer.attention,
                "parallel": Parallelism(
                    pipeline=shape.pipeline,
                    tensor=layer.tensor,
                    data=int(columns.data[row]),
                    schedule=shape.schedule,
                    virtual_stages=shape.virtual_stages,
                    context=layer.context,
                    expert=layer.expert,
                ),
                "sharding": ShardingDegrees(
                    parameters=int(columns.parameters[row]),
                    optimizer=int(columns.optimizer[row]),
                    reshard=layer.reshard,
                ),
                "offload": Offload(optimizer=layer.optimizer_tier),
                "batch": Batch(
                    sequence=self.sequence,
                    micro=int(columns.micro[row]),
                    accumulation=int(columns.accumulation[row]),
                ),
                "stages": tuple(
                    Stage(phases=(bounds,)) for bounds in pairwise(columns.chunk_bounds)
                ),
            }
        )
        request = self.request
        if request.recompute is not None and request.recompute_layers is None:
            return vary(plan, recompute=request.recompute)
        full, selective = columns.full[row].tolist(), columns.selective[row].tolist()
        return with_recompute(plan, full, selective) if any((*full, *selective)) else plan
