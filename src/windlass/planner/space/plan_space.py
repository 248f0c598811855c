"""Field: the space of plans over several devices, as tables of indices; nothing is built.

Plans of one shape (order, stages, chunks, micro-batches) stand together, since the closed form
prices them together. What a plan is made of is read back from its place when it has won.
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
from windlass.program.validate_plan import schedule_errors, selective_recompute_errors, tensor_parallel_errors
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
"""Numbers of chunks that are tried of any number of blocks."""

_MOST_CHUNKS = 24
"""Of a stage: with more, messages have taken longer than the waiting that they saved."""


@dataclass(frozen=True, slots=True)
class PlanBatch:
    """Plans of one shape on one machine."""

    shape: PipelineShape
    ends: tuple[int, ...]
    """First layer of each chunk, and the chain's length."""
    rows: PlanTable


CompileAndRecompute = tuple[bool, Recompute]
"""Compiled or not, and how layers are recomputed."""

_MODES: tuple[Recompute, ...] = get_args(Recompute)


@dataclass(frozen=True)
class PlanSpace:
    """All plans that a request leaves open.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model, in the slices that are open.
        machine: what the plans are for.
    """

    request: Request
    graph: Graph
    machine: Machine

    @cached_property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return sequence_of(self.request, self.graph)

    @property
    def spares(self) -> bool:
        """Whether as few layers are to be computed again as make a plan fit."""
        return self.request.recompute is None and self.request.recompute_layers is None

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Numbers of slices that layers and tokens can be cut in."""
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
    def pipelines(self) -> tuple[int, ...]:
        """Numbers of stages: those that part the devices or the blocks evenly."""
        pin = self.request.parallel.pipeline
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
    def replicas(self) -> tuple[int, ...]:
        """Numbers of replicas, which part the batch evenly."""
        pin = self.request.parallel.data
        batch = self.request.train.batch
        return tuple(
            count
            for count in (divisors(batch) if pin is None else (pin,))
            if count <= self.machine.devices and batch % count == 0
        )

    def cells(self) -> Iterator[PlanBatch]:
        """All plans, shape by shape."""
        for shape, able in self.open():
            yield self.cell(shape, able)

    def open(self) -> Iterator[tuple[PipelineShape, Ints]]:
        """All shapes of which there are plans, each with the settings of these."""
        for shape in self.shapes():
            able = self.able(shape)
            if able.size:
                yield shape, able

    def shapes(self) -> Iterator[PipelineShape]:
        """All shapes that are legal; in each, plans of some numbers of micro-batches."""
        return iter(self._micros_of)

    @cached_property
    def _micros_of(self) -> Mapping[PipelineShape, tuple[int, ...]]:
        """All shapes that are legal, each with its plans' numbers of micro-batches."""
        found: dict[PipelineShape, tuple[int, ...]] = {}
        ways = ((each, *way) for each in self.pipelines for way in self._orders(each))
        for pipeline, order, chunks in ways:
            if chunks * pipeline > self.graph.layers or (pipeline == 1 and order != "1f1b"):
                continue
            for micros in self.micros:
                if self._legal(order, pipeline, chunks, micros):
                    shape = PipelineShape.of(order, pipeline, chunks, micros)
                    found[shape] = (*found.get(shape, ()), micros)
        return found

    def table(self, shape: PipelineShape) -> ConfigTable:
        """What the plans of a shape are places in, the same table for many shapes."""
        sums, parted = shape.micros > 1, shape.pipeline > 1
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

    def able(self, shape: PipelineShape) -> Ints:
        """The places in its table of the settings that a shape's plans have."""
        if shape not in self._known_able:
            self._known_able[shape] = self._able(shape)
        return self._known_able[shape]

    @cached_property
    def _known_able(self) -> dict[PipelineShape, Ints]:
        return {}

    def _able(self, shape: PipelineShape) -> Ints:
        table = self.table(shape)
        counts = np.zeros(self.request.train.batch + 1, dtype=bool)
        counts[list(self._micros_of[shape])] = True
        room = table.devices * shape.pipeline <= self.machine.devices
        runs = np.any(self._agains(shape.order, table)[:, table.mode], axis=0)
        return np.flatnonzero(room & counts[table.micros] & runs)

    def cell(self, shape: PipelineShape, chosen: Ints) -> PlanBatch:
        """All plans of some settings of a shape, which are places in its table."""
        table = self.table(shape)
        able = self._agains(shape.order, table)[:, table.mode[chosen]]
        again, at = np.nonzero(able)
        setting = chosen[at]
        runs = np.stack([table.block[setting], setting, again, table.micros[setting]], axis=1)
        counts = (self.request.recompute_layers or self.graph.layers,) * shape.pipeline
        agains = RecomputeConfig(), RecomputeConfig(selective=counts), RecomputeConfig(whole=counts)
        rows = PlanTable.crossed(table.settings, agains, table.blocks, runs)
        return PlanBatch(shape, self.ends(shape.chunks), rows)

    def count(self, shape: PipelineShape, chosen: Ints) -> int:
        """How many plans some settings of a shape have."""
        table = self.table(shape)
        ways = self._agains(shape.order, table).sum(axis=0)[table.mode[chosen]]
        return int((ways * table.blocks.counts[table.block[chosen]]).sum())

    def _agains(self, order: PipelineSchedule, table: ConfigTable) -> Bools:
        """In an order, whether layers can be computed again in each of `_MODES` (rows), by mode."""
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
        """All ways to cut layers over slices and replicas, and to share their state."""
        pins = self.request.sharding
        return tuple(
            ConfigFamily(tensor, replicas, precision, moves, shares)
            for tensor, replicas, precision in product(self.tensors, self.replicas, self.precisions)
            for homes, moves in self.homes(precision)
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
        """Precisions that the machine has and that the graph was captured in."""
        pin = self.request.precision
        return precisions(self.machine) if pin is None else (pin,)

    def micro(self, micros: int, replicas: int) -> int | None:
        """Sequences of a micro-batch; None if the batch does not come out even, or is pinned."""
        micro, rest = divmod(self.request.train.batch, replicas * micros)
        pin = self.request.batch.micro
        return None if rest or pin not in (None, micro) else micro

    def pairs(self, replicas: int) -> tuple[tuple[int, int], ...]:
        """The ways in which so many replicas may share weights and state: rts and rts'."""
        pins = self.request.sharding
        return _pairs(replicas, pins.parameters, pins.optimizer)

    def homes(self, precision: Precision) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """Tiers where optimizer state may live while weights stay near.

        Apart are those that set compute units apart for moves: layers take longer on the others.
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

    def ends(self, chunks: int) -> tuple[int, ...]:
        """First layer of each chunk of the chain, and the chain's length."""
        bounds = stage_partition(self.graph, chunks, self.sequence)
        return (*(first for first, _ in bounds), self.graph.layers)

    def plan(self, cell: PlanBatch, index: int) -> Plan:
        """The plan at one place of a cell."""
        rows, shape = cell.rows, cell.shape
        run, share = rows.run_of(rows.run[index]), rows.share_of(rows.pair[index])
        setting = run.setting
        plan = self.base.model_copy(
            update={
                "precision": setting.precision,
                "compile": setting.compiled,
                "parallel": Parallelism(
                    pipeline=shape.pipeline,
                    tensor=setting.tensor,
                    data=setting.replicas,
                    schedule=shape.order,
                    virtual_stages=shape.interleave,
                ),
                "sharding": ShardingDegrees(parameters=share.weights, optimizer=share.optimizer),
                "offload": Offload(optimizer=share.home),
                "batch": Batch(
                    sequence=self.sequence, micro=setting.micro, accumulation=run.micros
                ),
                "stages": tuple(Stage(phases=(bounds,)) for bounds in pairwise(cell.ends)),
            }
        )
        return _recomputing(plan, run.again, shape)

    @cached_property
    def base(self) -> Plan:
        """A plan with all that the request pins for all plans alike."""
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
        """Which orders compiled layers can run in."""
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
        """Orders of so many stages, each with a number of chunks."""
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
        """Numbers of chunks of a stage: some few, and all that part its blocks evenly."""
        own, rest = divmod(max(span.count for span in self.graph.layer_runs), pipeline)
        even = () if rest else divisors(own)[1:]
        return tuple(sorted({*_CHUNKS, *(count for count in even if count <= _MOST_CHUNKS)}))

    @cached_property
    def micros(self) -> tuple[int, ...]:
        """Numbers of micro-batches of a step that some number of replicas allows."""
        pin, batch = self.request.batch.accumulation, self.request.train.batch
        found = {each for count in self.replicas for each in divisors(batch // count)}
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
        recomputes = _MODES if self.spares else recomputes_of(self.request)
        for compiled, recompute in product(self._runs(order, precision), recomputes):
            if recompute != "selective" or self.selects(order, tensor, compiled=compiled):
                yield compiled, recompute

    def selects(self, order: PipelineSchedule, tensor: int, *, compiled: bool) -> bool:
        """Whether layers can keep what their large products give and run the rest again."""
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
    return with_recompute(plan, whole * shape.interleave, selective * shape.interleave)


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
