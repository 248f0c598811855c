"""Choices that a request leaves open: degrees, schedules, precisions, modes and tiers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import get_args

from windlass.planner.space.options import (
    divisors,
    is_captured,
    open_recompute as recomputes_of,
    precisions,
)
from windlass.planner.space.stage_partition import stage_partition
from windlass.planner.space.tensor_degrees import open_tensor_degrees
from windlass.program import schedule_errors, selective_recompute_errors, tensor_parallel_errors
from windlass.schema import (
    DEVICE_TIER,
    Batch,
    Graph,
    Machine,
    Parallelism,
    PipelineSchedule,
    Plan,
    Precision,
    Recompute,
    ResolvedRequest,
    Stage,
)

_SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")

_VIRTUAL_STAGES = (2, 3, 4, 6, 8, 12)
"""Virtual stages that are tried for any number of blocks."""

_MAX_VIRTUAL_STAGES = 24
"""Most virtual stages of a stage: with more, messages took longer than the bubble they saved."""

RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)
"""All recompute modes, from none to full."""


CompileAndRecompute = tuple[bool, Recompute]
"""Whether layers are compiled, and how they are recomputed."""


@dataclass(frozen=True)
class OpenChoices:
    """The single choices of a plan that a request leaves open, on several devices.

    Args:
        request: pins whatever it names; the rest is open.
        graph: captured from the request's model, sharded for the tensor-parallel degrees that are
            open.
        machine: the machine of the plans.
        every_grid: whether the tensor-parallel grids that need least memory are open too.
    """

    request: ResolvedRequest
    graph: Graph
    machine: Machine
    every_grid: bool = False

    @cached_property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return self.request.train.sequence

    @property
    def minimizes_recompute(self) -> bool:
        """Whether only as many layers are recomputed as a plan needs to fit."""
        return self.request.recompute is None and self.request.recompute_layers is None

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees by which layers and tokens can be sharded."""
        pin, captured = self.request.parallel.tensor, self.graph.tensor_shards
        wanted = open_tensor_degrees(
            self.request, self.machine, self.graph.unshardable, every=self.every_grid
        )
        sharded = (each for each in wanted if each in captured)
        candidates = (1, *sharded) if pin is None else (pin,)
        return tuple(
            degree
            for degree in candidates
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

    @cached_property
    def accumulations(self) -> tuple[int, ...]:
        """Numbers of micro-batches of a step that some number of replicas allows."""
        pin, batch = self.request.batch.accumulation, self.request.train.batch
        counts = {each for count in self.data_degrees for each in divisors(batch // count)}
        return tuple(sorted(counts if pin is None else counts & {pin}))

    def microbatch_size(self, micros: int, replicas: int) -> int | None:
        """Sequences of a micro-batch; None if the batch is not divisible, or the pin differs."""
        micro, rest = divmod(self.request.train.batch, replicas * micros)
        pin = self.request.batch.micro
        return None if rest or pin not in (None, micro) else micro

    @cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that the machine supports and that the graph was captured in."""
        pin = self.request.precision
        return precisions(self.machine) if pin is None else (pin,)

    def sharding_degrees(self, replicas: int) -> tuple[tuple[int, int], ...]:
        """Sharding degrees of parameters and optimizer state among this many replicas."""
        pins = self.request.sharding
        return sharding_pairs(replicas, pins.parameters, pins.optimizer)

    def optimizer_tiers(self, precision: Precision) -> tuple[tuple[tuple[str, ...], bool], ...]:
        """Tiers for optimizer state, weights staying on the device, by whether moves need units.

        Each item is some tiers, and whether they reserve compute units for transfers: layers then
        take longer.
        """
        pin, device = self.request.offload.optimizer, self.machine.device
        offload_tiers = tuple(tier.name for tier in device.tiers[1:] if tier.read and tier.write)
        allowed = (DEVICE_TIER, *(offload_tiers if precision != "float64" else ()))
        allowed = allowed if pin is None else tuple(tier for tier in allowed if tier == pin)
        if not device.moving_share:
            return ((allowed, False),) if allowed else ()
        by_place = (
            tuple(tier for tier in allowed if (tier == DEVICE_TIER) is on_device)
            for on_device in (True, False)
        )
        return tuple((tiers, DEVICE_TIER not in tiers) for tiers in by_place if tiers)

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

    def chunk_bounds(self, chunks: int) -> tuple[int, ...]:
        """First layer of each model chunk, and the number of layers."""
        bounds = stage_partition(self.graph, chunks, self.sequence)
        return (*(first for first, _ in bounds), self.graph.layers)

    def modes(
        self, schedule: PipelineSchedule, precision: Precision, tensor: int
    ) -> tuple[CompileAndRecompute, ...]:
        """Compiled or not, and how layers are recomputed."""
        key = schedule, precision, tensor
        if key not in self._mode_cache:
            self._mode_cache[key] = tuple(self._find_modes(*key))
        return self._mode_cache[key]

    def allows_selective(self, schedule: PipelineSchedule, tensor: int, *, compiled: bool) -> bool:
        """Whether layers can recompute selectively: keep the outputs of large products only."""
        changes = {"compile": compiled, "parallel": Parallelism(tensor=tensor, schedule=schedule)}
        return not any(selective_recompute_errors(self.base.model_copy(update=changes), self.graph))

    @cached_property
    def _mode_cache(
        self,
    ) -> dict[tuple[PipelineSchedule, Precision, int], tuple[CompileAndRecompute, ...]]:
        return {}

    def _find_modes(
        self, schedule: PipelineSchedule, precision: Precision, tensor: int
    ) -> Iterator[CompileAndRecompute]:
        recomputes = RECOMPUTE_MODES if self.minimizes_recompute else recomputes_of(self.request)
        for compiled, recompute in product(self._compile_modes(schedule, precision), recomputes):
            if recompute != "selective" or self.allows_selective(
                schedule, tensor, compiled=compiled
            ):
                yield compiled, recompute

    def _compile_modes(self, schedule: PipelineSchedule, precision: Precision) -> tuple[bool, ...]:
        """Compiled or not."""
        mode = self.request.compile
        return tuple(
            compiled
            for compiled in ((False, True) if mode is None else (mode,))
            if is_captured(self.graph, precision, compiled=compiled)
            and (not compiled or self._schedule_compiles[schedule])
        )

    @cached_property
    def _schedule_compiles(self) -> dict[PipelineSchedule, bool]:
        """Whether compiled layers can run under each schedule."""
        compiled = self.base.model_copy(update={"compile": True})
        return {
            schedule: not any(
                schedule_errors(
                    compiled.model_copy(update={"parallel": Parallelism(schedule=schedule)})
                )
            )
            for schedule in ("1f1b", "gpipe", "zero-bubble")
        } | {"interleaved": True}

    def _open_schedules(self, pipeline: int) -> Iterator[tuple[PipelineSchedule, int]]:
        """Schedules of this many stages, each with a number of virtual stages."""
        pin, virtual_stages = self.request.parallel.schedule, self.request.parallel.virtual_stages
        for schedule in _SCHEDULES if pin is None else (pin,):
            if schedule != "interleaved":
                if virtual_stages in (None, 1):
                    yield schedule, 1
            elif virtual_stages is None:
                yield from ((schedule, count) for count in self._open_virtual_stages(pipeline))
            elif virtual_stages > 1:
                yield schedule, virtual_stages

    def _open_virtual_stages(self, pipeline: int) -> tuple[int, ...]:
        """Numbers of virtual stages: a few fixed ones, and all that divide a stage's blocks."""
        blocks, rest = divmod(max(span.count for span in self.graph.layer_runs), pipeline)
        even = () if rest else divisors(blocks)[1:]
        return tuple(
            sorted({*_VIRTUAL_STAGES, *(count for count in even if count <= _MAX_VIRTUAL_STAGES)})
        )


@lru_cache(maxsize=4096)
def sharding_pairs(
    replicas: int, parameters: int | None, optimizer: int | None
) -> tuple[tuple[int, int], ...]:
    """Sharding degrees of parameters and optimizer state that keep the pins."""
    return tuple(
        (parameter_degree, optimizer_degree)
        for optimizer_degree in divisors(replicas)
        for parameter_degree in divisors(optimizer_degree)
        if parameters in (None, parameter_degree) and optimizer in (None, optimizer_degree)
    )
