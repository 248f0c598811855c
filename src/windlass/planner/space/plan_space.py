"""Plan space: all plans over several devices that a request leaves open, as tables of indices.

Plans of one pipeline shape (schedule, stages, virtual stages, micro-batches) form a batch, because
the batched cost model evaluates them together. No `Plan` is built until it has won.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import get_args

import numpy as np

from windlass.cost.arrays import Bools, Ints
from windlass.cost.batched.config_keys import RecomputeConfig, ShardingOption
from windlass.cost.batched.plan_table import PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.cost.batched.sharding_table import ShardingTable
from windlass.planner.space.config_table import ConfigFamily, ConfigTable, sharding_options
from windlass.planner.space.options import (
    divisors,
    is_captured,
    open_tensor_degrees,
    precisions,
    sequence_of,
)
from windlass.planner.space.options import open_recompute as recomputes_of
from windlass.planner.space.stage_partition import stage_partition
from windlass.program.activation_checkpointing import with_recompute
from windlass.program.validate_plan import (
    schedule_errors,
    selective_recompute_errors,
    tensor_parallel_errors,
)
from windlass.schema.graph import Graph, Precision
from windlass.schema.machine import Machine
from windlass.schema.plan import (
    DEVICE_TIER,
    Batch,
    Offload,
    Parallelism,
    PipelineSchedule,
    Plan,
    Recompute,
    ShardingDegrees,
    Stage,
)
from windlass.schema.request import Request

_ORDERS: tuple[PipelineSchedule, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")
_CHUNKS = (2, 3, 4, 6, 8, 12)
"""Virtual stages that are tried for any number of blocks."""

_MOST_CHUNKS = 24
"""Most virtual stages of a stage: with more, messages took longer than the bubble they saved."""


@dataclass(frozen=True, slots=True)
class PlanBatch:
    """Plans of one pipeline shape on one machine."""

    shape: PipelineShape
    chunk_bounds: tuple[int, ...]
    """First layer of each model chunk, and the number of layers."""
    table: PlanTable


CompileAndRecompute = tuple[bool, Recompute]
"""Whether layers are compiled, and how they are recomputed."""

_MODES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class PlanSpace:
    """All plans that a request leaves open.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model, sharded for the tensor-parallel degrees that are
            open.
        machine: the machine of the plans.
    """

    request: Request
    graph: Graph
    machine: Machine

    @cached_property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return sequence_of(self.request, self.graph)

    @property
    def minimizes_recompute(self) -> bool:
        """Whether only as many layers are recomputed as a plan needs to fit."""
        return self.request.recompute is None and self.request.recompute_layers is None

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees by which layers and tokens can be sharded."""
        pin, known = self.request.parallel.tensor, self.graph.tensor_shards
        asked = open_tensor_degrees(self.request, self.machine, self.graph.unshardable)
        open_ = (each for each in asked if each in known)
        able = (1, *open_) if pin is None else (pin,)
        return tuple(
            degree
            for degree in able
            if degree <= self.machine.devices
            and not any(tensor_parallel_errors(degree, self.sequence, self.graph))
        )

    @cached_property
    def pipeline_degrees(self) -> tuple[int, ...]:
        """Pipeline-parallel degrees that divide the devices or the blocks evenly."""
        pin = self.request.parallel.pipeline
        if isinstance(self.request.recompute_layers, tuple):
            pin = pin or len(self.request.recompute_layers)
        if pin is not None:
            return (pin,)
        most = min(self.machine.devices, self.graph.layers)
        blocks = max(span.count for span in self.graph.layer_runs)
        return tuple(
            count
            for count in range(1, most + 1)
            if self.machine.devices % count == 0 or blocks % count == 0
        )

    @cached_property
    def data_degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees that divide the batch evenly."""
        pin = self.request.parallel.data
        batch = self.request.train.batch
        return tuple(
            count
            for count in (divisors(batch) if pin is None else (pin,))
            if count <= self.machine.devices and batch % count == 0
        )

    def batches(self) -> Iterator[PlanBatch]:
        """All plans, shape by shape."""
        for shape, able in self.open_shapes():
            yield self.batch_of(shape, able)

    def open_shapes(self) -> Iterator[tuple[PipelineShape, Ints]]:
        """All shapes that have plans, each with the indices of its layer configurations."""
        for shape in self.shapes():
            able = self.legal_configs(shape)
            if able.size:
                yield shape, able

    def shapes(self) -> Iterator[PipelineShape]:
        """All legal shapes, each of which has plans with some numbers of micro-batches."""
        return iter(self._micros_of)

    @cached_property
    def _micros_of(self) -> Mapping[PipelineShape, tuple[int, ...]]:
        """All legal shapes, each with its numbers of micro-batches."""
        found: dict[PipelineShape, tuple[int, ...]] = {}
        ways = ((each, *way) for each in self.pipeline_degrees for way in self._orders(each))
        for pipeline, order, chunks in ways:
            if chunks * pipeline > self.graph.layers or (pipeline == 1 and order != "1f1b"):
                continue
            for micros in self.accumulations:
                if self._legal(order, pipeline, chunks, micros):
                    shape = PipelineShape.of(order, pipeline, chunks, micros)
                    found[shape] = (*found.get(shape, ()), micros)
        return found

    def config_table(self, shape: PipelineShape) -> ConfigTable:
        """The table that a shape's layer configurations are indices of; many shapes share one."""
        sums, parted = shape.microbatches > 1, shape.pipeline > 1
        if (sums, parted) not in self._tables:
            self._tables[sums, parted] = ConfigTable.of(
                self._families,
                self._blocks(sums=sums),
                batch=self.request.train.batch,
                micro=self.request.batch.micro,
                sums=sums,
                parted=parted,
            )
        return self._tables[sums, parted]

    def legal_configs(self, shape: PipelineShape) -> Ints:
        """Indices of the layer configurations of a shape's plans."""
        if shape not in self._known_able:
            self._known_able[shape] = self._able(shape)
        return self._known_able[shape]

    @cached_property
    def _known_able(self) -> dict[PipelineShape, Ints]:
        return {}

    def _able(self, shape: PipelineShape) -> Ints:
        table = self.config_table(shape)
        counts = np.zeros(self.request.train.batch + 1, dtype=bool)
        counts[list(self._micros_of[shape])] = True
        room = table.devices * shape.pipeline <= self.machine.devices
        runs = np.any(self._agains(shape.schedule, table)[:, table.mode], axis=0)
        return np.flatnonzero(room & counts[table.microbatches] & runs)

    def batch_of(self, shape: PipelineShape, chosen: Ints) -> PlanBatch:
        """All plans of a shape with some layer configurations, given by their indices."""
        table = self.config_table(shape)
        able = self._agains(shape.schedule, table)[:, table.mode[chosen]]
        again, at = np.nonzero(able)
        setting = chosen[at]
        runs = np.stack(
            [table.options[setting], setting, again, table.microbatches[setting]], axis=1
        )
        layers = self.request.recompute_layers or self.graph.layers
        counts = layers if isinstance(layers, tuple) else (layers,) * shape.pipeline
        agains = RecomputeConfig(), RecomputeConfig(selective=counts), RecomputeConfig(full=counts)
        rows = PlanTable.crossed(table.layer_configs, agains, table.sharding_table, runs)
        return PlanBatch(shape, self.chunk_bounds(shape.chunks), rows)

    def count(self, shape: PipelineShape, chosen: Ints) -> int:
        """How many plans of a shape have these layer configurations."""
        table = self.config_table(shape)
        ways = self._agains(shape.schedule, table).sum(axis=0)[table.mode[chosen]]
        return int((ways * table.sharding_table.counts[table.options[chosen]]).sum())

    def _agains(self, order: PipelineSchedule, table: ConfigTable) -> Bools:
        """Whether layers can be recomputed so under a schedule, `[recompute mode, config mode]`."""
        if (order, table) not in self._known_agains:
            found = np.zeros((len(_MODES), len(table.modes)), dtype=bool)
            for at, (tensor, precision, compiled) in enumerate(table.modes):
                for known, recompute in self.modes(order, precision, tensor):
                    found[_MODES.index(recompute), at] |= known == compiled
            self._known_agains[order, table] = found
        return self._known_agains[order, table]

    @cached_property
    def _known_agains(self) -> dict[tuple[PipelineSchedule, ConfigTable], Bools]:
        return {}

    @cached_property
    def _tables(self) -> dict[tuple[bool, bool], ConfigTable]:
        return {}

    @cached_property
    def _families(self) -> tuple[ConfigFamily, ...]:
        """All combinations of tensor and data degrees, precision and sharding of state."""
        pins = self.request.sharding
        return tuple(
            ConfigFamily(tensor, replicas, precision, moves, shares)
            for tensor, replicas, precision in product(
                self.tensor_degrees, self.data_degrees, self.precisions
            )
            for homes, moves in self.optimizer_tiers(precision)
            if (shares := _shares(replicas, homes, pins.parameters, pins.optimizer))
        )

    def _blocks(self, *, sums: bool) -> ShardingTable:
        if sums not in self._known_blocks:
            found = tuple(sharding_options(family, sums=sums) for family in self._families)
            self._known_blocks[sums] = ShardingTable(found)
        return self._known_blocks[sums]

    @cached_property
    def _known_blocks(self) -> dict[bool, ShardingTable]:
        return {}

    @cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that the machine supports and that the graph was captured in."""
        pin = self.request.precision
        return precisions(self.machine) if pin is None else (pin,)

    def microbatch_size(self, micros: int, replicas: int) -> int | None:
        """Sequences of a micro-batch; None if the batch is not divisible, or the pin differs."""
        micro, rest = divmod(self.request.train.batch, replicas * micros)
        pin = self.request.batch.micro
        return None if rest or pin not in (None, micro) else micro

    def sharding_degrees(self, replicas: int) -> tuple[tuple[int, int], ...]:
        """Sharding degrees of parameters and optimizer state among this many replicas."""
        pins = self.request.sharding
        return _pairs(replicas, pins.parameters, pins.optimizer)

    def optimizer_tiers(self, precision: Precision) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """Tiers for optimizer state, weights staying on the device, by whether moves need units.

        Each item is some tiers, and whether they reserve compute units for transfers: layers then
        take longer.
        """
        pin, device = self.request.offload.optimizer, self.machine.device
        beyond = tuple(tier.name for tier in device.tiers[1:] if tier.read and tier.write)
        able = (DEVICE_TIER, *(beyond if precision != "float64" else ()))
        able = able if pin is None else tuple(tier for tier in able if tier == pin)
        if not device.moving_share:
            return ((able, False),) if able else ()
        parted = (
            tuple(tier for tier in able if (tier == DEVICE_TIER) is near) for near in (True, False)
        )
        return tuple((tiers, DEVICE_TIER not in tiers) for tiers in parted if tiers)

    def chunk_bounds(self, chunks: int) -> tuple[int, ...]:
        """First layer of each model chunk, and the number of layers."""
        bounds = stage_partition(self.graph, chunks, self.sequence)
        return (*(first for first, _ in bounds), self.graph.layers)

    def plan(self, cell: PlanBatch, index: int) -> Plan:
        """The plan at one index of a batch."""
        rows, shape = cell.table, cell.shape
        run, share = rows.config_of(rows.config[index]), rows.sharding_of(rows.sharding[index])
        setting = run.layer
        plan = self.base.model_copy(
            update={
                "precision": setting.precision,
                "compile": setting.compiled,
                "parallel": Parallelism(
                    pipeline=shape.pipeline,
                    tensor=setting.tensor,
                    data=setting.replicas,
                    schedule=shape.schedule,
                    virtual_stages=shape.virtual_stages,
                ),
                "sharding": ShardingDegrees(parameters=share.parameters, optimizer=share.optimizer),
                "offload": Offload(optimizer=share.optimizer_tier),
                "batch": Batch(
                    sequence=self.sequence, micro=setting.micro, accumulation=run.microbatches
                ),
                "stages": tuple(Stage(phases=(bounds,)) for bounds in pairwise(cell.chunk_bounds)),
            }
        )
        return _recomputing(plan, run.recompute, shape)

    @cached_property
    def base(self) -> Plan:
        """A plan with everything that the request pins for all plans."""
        return Plan(
            graph=self.graph.label,
            machine=self.machine.label,
            moments=self.request.moments,
            clip=self.request.train.clip is not None,
            batch=Batch(sequence=self.sequence, micro=1),
            stages=(Stage(phases=((0, self.graph.layers),)),),
        )

    @cached_property
    def _compiles(self) -> dict[PipelineSchedule, bool]:
        """Whether compiled layers can run under each schedule."""
        compiled = self.base.model_copy(update={"compile": True})
        return {
            order: not any(
                schedule_errors(
                    compiled.model_copy(update={"parallel": Parallelism(schedule=order)})
                )
            )
            for order in ("1f1b", "gpipe", "zero-bubble")
        } | {"interleaved": True}

    def _orders(self, pipeline: int) -> Iterator[tuple[PipelineSchedule, int]]:
        """Schedules of this many stages, each with a number of virtual stages."""
        order, chunks = self.request.parallel.schedule, self.request.parallel.virtual_stages
        for each in _ORDERS if order is None else (order,):
            if each != "interleaved":
                if chunks in (None, 1):
                    yield each, 1
            elif chunks is None:
                yield from ((each, count) for count in self._chunks(pipeline))
            elif chunks > 1:
                yield each, chunks

    def _chunks(self, pipeline: int) -> tuple[int, ...]:
        """Numbers of virtual stages: a few fixed ones, and all that divide a stage's blocks."""
        own, rest = divmod(max(span.count for span in self.graph.layer_runs), pipeline)
        even = () if rest else divisors(own)[1:]
        return tuple(sorted({*_CHUNKS, *(count for count in even if count <= _MOST_CHUNKS)}))

    @cached_property
    def accumulations(self) -> tuple[int, ...]:
        """Numbers of micro-batches of a step that some number of replicas allows."""
        pin, batch = self.request.batch.accumulation, self.request.train.batch
        found = {each for count in self.data_degrees for each in divisors(batch // count)}
        return tuple(sorted(found if pin is None else found & {pin}))

    def _legal(self, order: PipelineSchedule, pipeline: int, chunks: int, micros: int) -> bool:
        plan = self.base.model_copy(
            update={
                "parallel": Parallelism.model_construct(
                    pipeline=pipeline, tensor=1, data=1, schedule=order, virtual_stages=chunks
                ),
                "batch": Batch.model_construct(
                    sequence=self.sequence, micro=1, accumulation=micros
                ),
            }
        )
        return not any(schedule_errors(plan))

    def modes(
        self, order: PipelineSchedule, precision: Precision, tensor: int
    ) -> tuple[CompileAndRecompute, ...]:
        """Compiled or not, and how layers are recomputed."""
        key = order, precision, tensor
        if key not in self._known_modes:
            self._known_modes[key] = tuple(self._modes(*key))
        return self._known_modes[key]

    @cached_property
    def _known_modes(
        self,
    ) -> dict[tuple[PipelineSchedule, Precision, int], tuple[CompileAndRecompute, ...]]:
        return {}

    def _modes(
        self, order: PipelineSchedule, precision: Precision, tensor: int
    ) -> Iterator[CompileAndRecompute]:
        recomputes = _MODES if self.minimizes_recompute else recomputes_of(self.request)
        for compiled, recompute in product(self._runs(order, precision), recomputes):
            if recompute != "selective" or self.allows_selective(order, tensor, compiled=compiled):
                yield compiled, recompute

    def allows_selective(self, order: PipelineSchedule, tensor: int, *, compiled: bool) -> bool:
        """Whether layers can recompute selectively: keep the outputs of large products only."""
        changes = {"compile": compiled, "parallel": Parallelism(tensor=tensor, schedule=order)}
        return not any(selective_recompute_errors(self.base.model_copy(update=changes), self.graph))

    def _runs(self, order: PipelineSchedule, precision: Precision) -> tuple[bool, ...]:
        """Compiled or not."""
        mode = self.request.compile
        return tuple(
            compiled
            for compiled in ((False, True) if mode is None else (mode,))
            if is_captured(self.graph, precision, compiled=compiled)
            and (not compiled or self._compiles[order])
        )


def _recomputing(plan: Plan, again: RecomputeConfig, shape: PipelineShape) -> Plan:
    if again.mode == "none":
        return plan
    none = (0,) * shape.pipeline
    whole, selective = (each or none for each in again)
    return with_recompute(plan, whole * shape.virtual_stages, selective * shape.virtual_stages)


@lru_cache(maxsize=4096)
def _pairs(
    replicas: int, weights: int | None, optimizer: int | None
) -> tuple[tuple[int, int], ...]:
    return tuple(
        (one, other)
        for other in divisors(replicas)
        for one in divisors(other)
        if weights in (None, one) and optimizer in (None, other)
    )


@lru_cache(maxsize=4096)
def _shares(
    replicas: int, homes: tuple[str, ...], weights: int | None, optimizer: int | None
) -> tuple[ShardingOption, ...]:
    pairs = _pairs(replicas, weights, optimizer)
    return tuple(ShardingOption(*pair, home) for home in homes for pair in pairs)
