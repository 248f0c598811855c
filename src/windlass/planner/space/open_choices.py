"""Choices that a request leaves open: degrees, schedules, precisions, modes and tiers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product
from math import gcd
from typing import Literal, get_args

from windlass.cost import KeptCode
from windlass.models import has_config, predicts_pairs, predicts_text_classes
from windlass.planner.space.options import (
    divisors,
    is_captured,
    offload_tiers,
    open_precisions,
)
from windlass.planner.space.stage_partition import stage_partition
from windlass.planner.space.tensor_degrees import open_tensor_degrees
from windlass.program import (
    context_errors,
    context_run_errors,
    float8_errors,
    offloaded_optimizer_errors,
    selective_recompute_errors,
    tensor_parallel_errors,
)
from windlass.schema import (
    DEVICE_TIER,
    OWN_STACK,
    Batch,
    Capabilities,
    Graph,
    Machine,
    OtherAttention,
    Parallelism,
    PipelineSchedule,
    Plan,
    Precision,
    Recompute,
    ResolvedRequest,
    Stage,
    optimizer_law,
)

_SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "gpipe", "zero-bubble", "interleaved")

VIRTUAL_STAGES = (2, 3, 4, 6, 8, 12)
"""Virtual stages that are tried for any number of blocks."""

MAX_VIRTUAL_STAGES = 24
"""Most virtual stages of a stage: with more, messages took longer than the bubble they saved."""

_LOGITS_SHARE = 1 / 16
"""Share of the device memory from which on a sequence's float32 logits make a fused loss worth a
try."""

RECOMPUTE_MODES: tuple[Recompute, ...] = get_args(Recompute)
"""All recompute modes, from none to full."""


CompileAndRecompute = tuple[bool, Recompute]
"""Whether layers are compiled, and how they are recomputed."""


@dataclass(frozen=True)
class OpenChoices:
    """The single choices of a plan that a request leaves open.

    Args:
        request: pins whatever it names; the rest is open.
        graph: the request's model, sharded for the tensor-parallel degrees that are open.
        machine: the machine of the plans; the stack that drives it bounds what is open.
        every_grid: whether the tensor-parallel grids that need least memory are open too.
        recompute_within: recompute modes that are open where the request names none.
        kept_code: compiled code of the model that earlier runs have left on the machine.
    """

    request: ResolvedRequest
    graph: Graph
    machine: Machine
    every_grid: bool = False
    recompute_within: tuple[Recompute, ...] = RECOMPUTE_MODES
    kept_code: KeptCode = frozenset()

    @cached_property
    def sequence(self) -> int:
        """Tokens of one sequence."""
        return self.request.train.sequence

    @property
    def minimizes_recompute(self) -> bool:
        """Whether only as many layers are recomputed as a plan needs to fit."""
        return self.request.recompute is None and self.request.recompute_layers is None

    @property
    def _can(self) -> Capabilities:
        """What the stack of the machine can run."""
        return (self.machine.stack or OWN_STACK).can

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees by which layers and tokens can be sharded."""
        pin, captured = self.request.parallel.tensor, self.graph.tensor_shards
        wanted = open_tensor_degrees(
            self.request, self.machine, self.graph.unshardable, every=self.every_grid
        )
        if not self._can.tensor:
            wanted = ()
        sharded = (each for each in wanted if each in captured)
        candidates = (1, *sharded) if pin is None else (pin,)
        own = self.machine.stack is None
        if self.request.loss == "fused":
            candidates = (1,)
        elif own and self.request.precision == "float8":
            candidates = tuple(each for each in candidates if not any(float8_errors(each, None)))
        return tuple(
            degree
            for degree in candidates
            if degree <= self.machine.devices
            and not any(tensor_parallel_errors(degree, self.sequence, self.graph))
        )

    @cached_property
    def pipeline_degrees(self) -> tuple[int, ...]:
        """Pipeline-parallel degrees: every number of stages that devices and layers allow."""
        pin = self.request.parallel.pipeline
        if isinstance(self.request.recompute_layers, tuple):
            pin = pin or len(self.request.recompute_layers)
        if pin is not None:
            return (pin,)
        most = min(self.machine.devices, self.graph.layers) if self._can.pipeline else 1
        return tuple(range(1, most + 1))

    @cached_property
    def data_degrees(self) -> tuple[int, ...]:
        """Data-parallel degrees that divide the batch evenly, and leave devices idle or not."""
        pin = self.request.parallel.data
        batch = self.request.train.batch
        return tuple(
            count
            for count in (divisors(batch) if pin is None else (pin,))
            if count <= self.machine.devices and batch % count == 0
        )

    def microbatches(self, replicas: int) -> tuple[tuple[int, int], ...]:
        """Sequences of a micro-batch and their number, for so many replicas."""
        pins, whole = self.request.batch, self.request.train.batch // replicas
        return tuple(
            (micro, whole // micro)
            for micro in divisors(whole)
            if pins.micro in (None, micro) and pins.accumulation in (None, whole // micro)
        )

    @cached_property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions that machine and stack support."""
        pin, able = self.request.precision, open_precisions(self.machine)
        if pin is not None:
            return (pin,)
        # Plans of a space all take the norm of gradients or none, and float16 must.
        is_open = self.request.train.clip is not None or "float16" not in able
        return able if is_open else ("float16",)

    def sharding_degrees(self, replicas: int, expert: int = 1) -> tuple[tuple[int, int], ...]:
        """Sharding degrees of parameters and optimizer state among this many replicas.

        Args:
            expert: expert-parallel degree, of which a sharding degree is a divisor or a multiple.
        """
        pins, can = self.request.sharding, self._can
        modes = {"none"} | set(can.sharding)
        return tuple(
            (parameters, optimizer)
            for optimizer in divisors(replicas)
            for parameters in divisors(optimizer)
            if pins.parameters in (None, parameters)
            and pins.optimizer in (None, optimizer)
            and (optimizer == parameters or "optimizer" in modes)
            and (parameters == 1 or "parameters" in modes)
            and (can.replica_groups or {parameters, optimizer} <= {1, replicas})
            and not any(min(each % expert, expert % each) for each in (parameters, optimizer))
        )

    @cached_property
    def context_degrees(self) -> tuple[int | None, ...]:
        """Context-parallel degrees that divide a sequence; None means 1.

        A request with 1 for each of the three other degrees asks for one device.
        """
        asked = self.request.parallel
        if asked.context is not None:
            return (asked.context if asked.context > 1 else None,)
        is_open = self._can.context and (not self._has_own_layers or self._is_plain_text)
        is_open &= (asked.pipeline, asked.tensor, asked.data) != (1, 1, 1)
        most = self.machine.devices if is_open else 1
        degrees = (each for each in divisors(self.sequence) if 1 < each <= most)
        return (None, *(each for each in degrees if not any(context_errors(each, self.sequence))))

    @property
    def _has_own_layers(self) -> bool:
        """Whether plans run on layers of Windlass, by its own runtime or by an engine."""
        stack = self.machine.stack
        return stack is None or stack.engine is not None

    @property
    def _is_plain_text(self) -> bool:
        """Whether tokens see others by the attention of our own layers alone, as ranks need it."""
        name, arguments = self.request.model.name, self.request.model.model_dump(exclude_none=True)
        has_head = predicts_pairs(name, arguments) or predicts_text_classes(name, arguments)
        return has_config(name) and not has_head and self.request.data.format != "classes"

    def divides_tokens(self, context: int | None, tensor: int) -> bool:
        """Whether context and tensor parallelism can divide the tokens of a sequence together."""
        return not self._has_own_layers or not any(
            context_run_errors(context or 1, self.graph, tensor, self.sequence)
        )

    @cached_property
    def expert_degrees(self) -> tuple[int | None, ...]:
        """Expert-parallel degrees: the common divisors of all layers' experts; None means 1."""
        experts, pin = self.graph.experts, self.request.parallel.expert
        if pin is None and not (experts and self._can.expert):
            return (None,)
        most = min(gcd(*experts), self.machine.devices) if experts else 1
        degrees = [each for each in divisors(gcd(*experts)) if each <= most] if experts else [1]
        return tuple(
            each if each > 1 else None for each in degrees if pin in (None, each)
        )  # fmt: skip

    def divides_experts(self, degree: int | None, data: int, context: int | None = None) -> bool:
        """Whether so many of all replicas can divide experts."""
        degree, context = degree or 1, context or 1
        is_even = not (degree % context and context % degree)
        return degree == 1 or (is_even and not (data * context % degree or self._whole_state))

    @cached_property
    def _whole_state(self) -> bool:
        """Whether the optimizer updates whole weights."""
        return optimizer_law(self.request.train.optimizer).scope != "element"

    def reshards(self, parameters: int) -> tuple[Literal[True] | None, ...]:
        """Whether sharded parameters are gathered for each pass; None means once a step."""
        pin = self.request.sharding.reshard
        able: tuple[Literal[True] | None, ...] = (None, True) if self._can.reshard else (None,)
        if pin is not None:
            able = (True if pin else None,)
        return able if parameters > 1 else tuple(each for each in able if each is None)

    @cached_property
    def losses(self) -> tuple[Literal["fused"] | None, ...]:
        """Whether the loss is fused with the projection to the vocabulary; None means it is not.

        It is open where the logits of a single sequence already take much of the memory. Elsewhere
        it would seldom change a plan, and double the number of plans.
        """
        pin = self.request.loss
        if pin is not None:
            return ("fused",) if pin == "fused" else (None,)
        budget_bytes = self.request.memory or self.machine.device.memory.capacity_bytes
        logits_bytes = 4 * self.sequence * self.graph.vocabulary
        is_able = self._can.fused_loss and self.graph.can_fuse_loss
        is_open = is_able and logits_bytes > _LOGITS_SHARE * budget_bytes
        return (None, "fused") if is_open else (None,)

    @cached_property
    def attentions(self) -> tuple[OtherAttention | None, ...]:
        """How attention can be computed; None means by the fused kernel that torch prefers.

        It is open where the machine states rates of several ways, as this one's probe does.
        """
        pin = self.request.attention
        if pin is not None:
            return (None if pin == "flash" else pin,)
        if self.machine.stack is not None or not self.graph.chooses_attention:
            return (None,)
        rates = (each for rate in self.machine.device.matmul for each in rate.attention_rates)
        return (None, *sorted({each.attention for each in rates if each.attention is not None}))

    def optimizer_tiers(self, precision: Precision) -> tuple[str, ...]:
        """Tiers for optimizer state, weights staying on the device."""
        pin = self.request.offload.optimizer
        optimizer, parts = self.request.train.optimizer, self.machine.devices
        offloads = precision != "float64" and not any(offloaded_optimizer_errors(optimizer, parts))
        tiers = offload_tiers(self.machine) if offloads else ()
        allowed = (DEVICE_TIER, *(tier.name for tier in tiers))
        if self.request.step_graph:
            allowed = (DEVICE_TIER,)
        return allowed if pin is None else tuple(tier for tier in allowed if tier == pin)

    @cached_property
    def base(self) -> Plan:
        """A plan with everything that the request pins for all plans."""
        stack, optimizer = self.machine.stack, self.request.train.optimizer
        return Plan(
            graph=self.graph.label,
            machine=self.machine.label,
            stack=None if stack is None else stack.name,
            optimizer=None if optimizer == "adamw" else optimizer,
            moments=self.request.moments,
            master_weights=None if self.request.master_weights else False,
            ema=self.request.train.ema,
            deterministic=True if self.request.deterministic else None,
            step_graph=True if self.request.step_graph else None,
            # In float16 the norm says whether a step counts, before any weight changes.
            clip=self.request.train.clip is not None or "float16" in self.precisions,
            batch=Batch(sequence=self.sequence, micro=1),
            stages=(Stage(phases=((0, self.graph.layers),)),),
        )

    @cached_property
    def chunk_bounds(self) -> Callable[[int], tuple[int, ...]]:
        """Gives the first layer of each of so many model chunks, and the number of layers."""

        def found(chunks: int) -> tuple[int, ...]:
            bounds = stage_partition(self.graph, chunks, self.sequence)
            return (*(first for first, _ in bounds), self.graph.layers)

        return cache(found)

    @cached_property
    def modes(
        self,
    ) -> Callable[[PipelineSchedule, Precision, int], tuple[CompileAndRecompute, ...]]:
        """Compiled or not and how layers are recomputed, by schedule, precision and tensor."""
        return cache(lambda *key: tuple(self._find_modes(*key)))

    def allows_selective(self, schedule: PipelineSchedule, tensor: int, *, compiled: bool) -> bool:
        """Whether layers can recompute selectively: keep the outputs of large products only."""
        changes = {"compile": compiled, "parallel": Parallelism(tensor=tensor, schedule=schedule)}
        return not any(selective_recompute_errors(self.base.model_copy(update=changes), self.graph))

    def _find_modes(
        self, schedule: PipelineSchedule, precision: Precision, tensor: int
    ) -> Iterator[CompileAndRecompute]:
        minimizes, can = self.minimizes_recompute, self._can
        recomputes = self.recompute_within if minimizes else (self.request.recompute or "full",)
        recomputes = tuple(each for each in recomputes if each in can.recompute)
        for compiled, recompute in product(self.compile_modes, recomputes):
            runs = is_captured(self.graph, precision, compiled=compiled) and not (
                compiled and schedule == "zero-bubble"  # no split backward of compiled layers
            )
            if runs and (
                recompute != "selective"
                or self.allows_selective(schedule, tensor, compiled=compiled)
            ):
                yield compiled, recompute

    @cached_property
    def compile_modes(self) -> tuple[bool, ...]:
        """Compiled or not."""
        pin, can = self.request.compile, self._can
        if pin is not None:
            return (pin,)
        is_known = "compiled code" not in self.machine.unmeasured
        return (False, True) if can.compile and is_known else (False,)

    def open_schedules(self, pipeline: int) -> Iterator[tuple[PipelineSchedule, int]]:
        """Schedules of this many stages, each with a number of virtual stages."""
        pin, virtual_stages = self.request.parallel.schedule, self.request.parallel.virtual_stages
        known = tuple(each for each in _SCHEDULES if each == "1f1b" or each in self._can.schedules)
        for schedule in known if pin is None else (pin,):
            if schedule != "interleaved":
                if virtual_stages in (None, 1):
                    yield schedule, 1
            elif pipeline == 1:
                continue
            elif virtual_stages is None:
                yield from ((schedule, count) for count in self._open_virtual_stages(pipeline))
            elif virtual_stages > 1:
                yield schedule, virtual_stages

    def _open_virtual_stages(self, pipeline: int) -> tuple[int, ...]:
        """Numbers of virtual stages: a few fixed ones, and all that divide a stage's blocks."""
        blocks, rest = divmod(max(span.count for span in self.graph.layer_runs), pipeline)
        even = () if rest else divisors(blocks)[1:]
        return tuple(
            sorted({*VIRTUAL_STAGES, *(count for count in even if count <= MAX_VIRTUAL_STAGES)})
        )
