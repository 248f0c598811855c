"""Time of each instruction of a plan, computed once for each kind of layer."""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from windlass.cost.communication_time import CommunicationCosts
from windlass.cost.device_rates import DeviceRates, OpContext, padded_vocabulary
from windlass.cost.op_time import (
    LayerPass,
    PassPrices,
    TermSeconds,
    exposed_seconds,
    pass_seconds,
)
from windlass.cost.optimizer_time import (
    norm_call_seconds,
    norm_launch_seconds,
    norm_rate,
    update_seconds,
)
from windlass.cost.step_traffic import (
    batch_load_bytes,
    batch_load_host_seconds,
    copy_seconds,
    grad_accumulation_bytes,
    tied_grad_add_bytes,
)
from windlass.program import (
    GRADIENT_PASSES,
    LAYER_PASSES,
    Instruction,
    InstructionKind,
    layers_of_stage,
    mesh_coord,
    micro_of_rank,
    pass_ops,
    rank_kinds,
    selective_layers,
    stages_by_layer,
    tied_across_stages,
    tied_elements_within_stage,
    updated_elements,
    with_attention,
)
from windlass.schema import Graph, Machine, Plan


@dataclass(frozen=True, slots=True)
class KnownCosts:
    """What is known of plans that differ in phases and, if they have several, micro-batches."""

    terms: dict[tuple[object, ...], TermSeconds] = field(default_factory=dict)
    communication: dict[tuple[object, ...], float] = field(default_factory=dict)
    overlapped: dict[tuple[InstructionKind, int], float] = field(default_factory=dict)


class InstructionCosts:
    """Seconds of the instructions of one plan on one machine.

    Args:
        known: what is known of such plans; None if nothing is.

    Raises:
        KeyError: the machine states no rate for the plan's precision.
    """

    def __init__(
        self, plan: Plan, graph: Graph, machine: Machine, known: KnownCosts | None = None
    ) -> None:
        batch = plan.batch
        context = plan.parallel.context or 1
        mode = OpContext(
            batch.sequence, plan.precision, plan.compile, context, bool(plan.deterministic),
            bool(plan.step_graph),
            padded_vocabulary(graph, plan.parallel.tensor, plan.loss), graph.document_tokens,
        )  # fmt: skip
        self._micro = micro_of_rank(plan)
        self._plan, self._graph, self._machine = plan, graph, machine
        self._device = machine.device.effective(offloads=plan.offloads)
        in_turn = machine.execution_model == "bulk-synchronous"
        self._rates = DeviceRates(self._device, mode, machine.stack, in_turn=in_turn)
        kinds = rank_kinds(plan, graph)
        self._kinds = tuple(kinds[each.name] for each in graph.layer_kinds())
        self._selective = selective_layers(plan)
        self._known = known or KnownCosts()
        self._seconds_cache: dict[tuple[InstructionKind, int | None, bool, int | None], float] = {}
        self._exposed_cache: dict[tuple[InstructionKind, int | None], float] = {}
        self.communication = CommunicationCosts(plan, graph, machine)

    @cached_property
    def _shared_elements(self) -> dict[int, int]:
        return tied_elements_within_stage(
            stages_by_layer(self._plan), self._graph.shard(self._plan.parallel.tensor)
        )

    @cached_property
    def _tied_elements(self) -> dict[int, int]:
        return {
            loan.user_layer: loan.gradient_elements
            for loan in tied_across_stages(self._plan, self._graph)
        }

    def terms(self, instruction: Instruction, device: int = 0) -> TermSeconds:
        """Seconds of one instruction on a device, by cost term; without communication."""
        kind, layer, micro = instruction
        if layer is None:
            key: tuple[object, ...] = (kind, device)
        else:
            shared_elements = self._shared_elements.get(layer, 0)
            tied_layer = layer if kind == "accumulate_tied_grads" else None
            selective = layer in self._selective
            key = (
                kind,
                self._kinds[layer].name,
                shared_elements,
                micro == 0,
                tied_layer,
                selective,
                self._graph.gradient_reach(layer),
            )
        if key not in self._known.terms:
            self._known.terms[key] = self._price(instruction, device)
        return self._known.terms[key]

    def seconds(self, instruction: Instruction, device: int = 0) -> float:
        """Seconds of one instruction on a device, all terms together; without communication."""
        kind, layer, micro = instruction
        key = kind, layer, micro == 0, None if layer is not None else device
        cached = self._seconds_cache.get(key)
        if cached is None:
            cached = self._seconds_cache[key] = self.terms(instruction, device).total
        return cached

    def communication_seconds(self, instruction: Instruction) -> float:
        """Seconds of communication on its links; of a pass, what it takes longer than without."""
        kind, layer, _ = instruction
        cached = self._exposed_cache.get((kind, layer))
        if cached is None:
            key: tuple[object, ...] = (kind, layer)
            if layer is not None and kind in LAYER_PASSES:
                reach = self._graph.gradient_reach(layer)
                key = kind, self._kinds[layer].name, reach, layer in self._selective
            if key not in self._known.communication:
                self._known.communication[key] = self._exposed_communication(instruction)
            cached = self._exposed_cache[kind, layer] = self._known.communication[key]
        return cached

    def overlapped_seconds(self, instruction: Instruction) -> float:
        """The part of an instruction's communication that overlaps with computation."""
        kind, layer, _ = instruction
        if layer is None:
            return 0.0
        if (kind, layer) not in self._known.overlapped:
            seconds = self.communication.overlapped_seconds(instruction)
            self._known.overlapped[kind, layer] = seconds
        return self._known.overlapped[kind, layer]

    def _exposed_communication(self, instruction: Instruction) -> float:
        sent = self.communication.seconds(instruction)
        gather = self.communication.gather_seconds(instruction)
        run = self._layer_pass(instruction)
        if run is None or not (sent or gather):
            return sent
        tensor = int(self._plan.parallel.tensor)
        micros = np.array([self._micro])
        parts = PassPrices((run,), self._rates, tensor=tensor).seconds(micros)
        work, host = (float(each[0, 0]) for each in parts)
        alone = exposed_seconds(self._rates, work, host)
        return float(exposed_seconds(self._rates, work, host, sent, gather) - alone)

    def _price(self, instruction: Instruction, device: int) -> TermSeconds:
        kind, layer, micro = instruction
        if kind == "load_batch":
            return self._load_batch()
        if kind == "grad_norm":
            return self._grad_norm(device)
        if layer is None:
            return TermSeconds()
        if kind == "update":
            own = self._kinds[layer]
            return update_seconds(
                self._plan, own, self._device, self._machine.stack, full=self._graph.kinds[own.name]
            )
        if kind == "accumulate_tied_grads":
            return self._accumulate_tied_grads(layer)
        run = self._layer_pass(instruction)
        if run is None:
            return TermSeconds()
        tensor = int(self._plan.parallel.tensor)
        passed = pass_seconds(run, self._rates, self._micro, tensor=tensor)
        summed = (
            self._accumulate_grads(layer, first=micro == 0)
            if kind in GRADIENT_PASSES
            else TermSeconds()
        )
        return passed.plus(summed)

    def _layer_pass(self, instruction: Instruction) -> LayerPass | None:
        """The operations of an instruction that runs a pass of a layer; None for any other."""
        kind, layer, _ = instruction
        if layer is None or kind not in LAYER_PASSES:
            return None
        layer_kind = self._kinds[layer]
        plan, selective = self._plan, layer in self._selective
        cost = layer_kind.cost(plan.precision, compiled=plan.compile, selective=selective)
        cost = with_attention(
            cost, layer_kind, plan.attention, plan.batch.sequence, selective=selective
        )
        ops = pass_ops(kind, layer_kind, cost, reach=self._graph.gradient_reach(layer))
        return LayerPass(ops, cost, backward=kind not in ("forward", "recompute"))

    def _load_batch(self) -> TermSeconds:
        moved = batch_load_bytes(self._graph, self._plan)
        host_seconds = batch_load_host_seconds(self._device)
        return TermSeconds(load=copy_seconds(moved, self._device) + host_seconds)

    def _grad_norm(self, device: int) -> TermSeconds:
        stage = mesh_coord(device, self._plan.parallel).stage
        layers = [self._kinds[index] for index in layers_of_stage(self._plan, stage)]
        elements = sum(updated_elements(self._plan, kind) for kind in layers)
        nbytes = self._plan.gradient_itemsize * elements
        if not nbytes:
            return TermSeconds()
        stack = self._machine.stack
        launches = norm_call_seconds(self._plan, self._device, stack) + sum(
            norm_launch_seconds(self._plan, kind, self._device, stack) for kind in layers
        )
        rate = norm_rate(self._plan, self._device) or self._device.traffic.at(nbytes)
        return TermSeconds(norm=nbytes / rate, launch=launches)

    def _accumulate_tied_grads(self, layer: int) -> TermSeconds:
        moved = tied_grad_add_bytes(self._tied_elements[layer], self._plan.gradient_itemsize)
        return TermSeconds(traffic=copy_seconds(moved, self._device))

    def _accumulate_grads(self, layer: int, *, first: bool) -> TermSeconds:
        """Seconds to accumulate a layer's new gradients."""
        plan, kind = self._plan, self._kinds[layer]
        moved = grad_accumulation_bytes(
            kind,
            plan,
            self._machine.stack,
            shared=self._shared_elements.get(layer, 0),
            rows=sum(kind.pass_gradient_elements(self._micro, plan.batch.sequence)),
            first=first,
        )
        return TermSeconds(traffic=sum(copy_seconds(nbytes, self._device) for nbytes in moved))
