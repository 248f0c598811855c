"""Faulty: mistakes that a distributed run might make, made on purpose, to see that they are found.

Each is a handler that does its work wrongly on every device that it concerns, so that no device
waits for another for ever. Nothing here runs unless a proof asks for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.errors import PlanError
from windlass.program.instruction import Instruction, InstructionKind
from windlass.program.tied_weights import tied_across_stages
from windlass.program.zero_sharding import optimizer_shard_index, updates_per_shard
from windlass.runtime.distributed.process_groups import PendingReduce, ProcessGroups
from windlass.runtime.handler import Handler
from windlass.runtime.verify.handler_hooks import HookContext
from windlass.runtime.handler import Handlers
from windlass.schema.graph import Graph
from windlass.schema.plan import Plan
from windlass.schema.tensor_grid import TensorAxis

_LATER_STEP = 2
"""In which what is stale is used: in the first there is nothing older."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One mistake."""

    description: str
    is_possible: Callable[[Plan, Graph | None], bool]
    """Whether a plan for a graph can make it."""
    requirement: str
    """What a plan that cannot make it lacks."""
    inject: Callable[[Handlers, HookContext], Mapping[InstructionKind, Handler]]
    """Gives the handlers that make it."""
    single_layer: bool = True
    """Whether one layer makes it, so that a proof should name that layer."""


def inject_fault(name: str, handlers: Handlers, inside: HookContext) -> Handlers:
    """The handlers with a mistake in them.

    Raises:
        PlanError: no such fault, or none that the plan can make.
    """
    if name not in FAULTS:
        raise PlanError(f"no fault `{name}`; known are {', '.join(FAULTS)}")
    fault = FAULTS[name]
    if not fault.is_possible(inside.plan, inside.graph):
        raise PlanError(f"fault `{name}` needs {fault.requirement}")
    return {**handlers, **fault.inject(handlers, inside)}


def faulty_layer(plan: Plan) -> int:
    """The layer that faults of one layer are made in: in the middle of the chain."""
    return plan.stages[-1].end_layer // 2


def _wrong_scale(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """The mean is taken over twice as many micro-batches."""
    del handlers
    inside.compute.loss_scale.mul_(0.5)
    return {}


def _no_reduction(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """Each replica goes on with its own gradient of one layer."""
    pod, plan = _pod(inside), inside.plan

    def own(whole: Tensor) -> PendingReduce:
        shards = whole.chunk(plan.sharding.optimizer)
        return PendingReduce(shards[optimizer_shard_index(pod.coord.data_rank, plan)].clone(), None)

    return {
        "reduce_grads": _at_layer(
            handlers["reduce_grads"], plan, lambda: _replaced(pod, "reduce_grads", own)
        )
    }


def _swapped_shards(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """The shards of one layer's weights come together in another order."""
    pod, plan = _pod(inside), inside.plan
    kind: InstructionKind = "unshard_weights" if plan.sharding.parameters > 1 else "all_gather_params"
    shards = plan.sharding.parameters if plan.sharding.parameters > 1 else updates_per_shard(plan)
    right = getattr(pod, kind)

    def swapped(whole: Tensor, part: Tensor) -> None:
        right(whole, part)
        whole.copy_(whole.view(shards, -1).roll(1, 0).view(-1))

    return {kind: _at_layer(handlers[kind], plan, lambda: _replaced(pod, kind, swapped))}


def _dropped_micro(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """The first replica adds nothing for its last micro-batch."""
    plan, compute = inside.plan, inside.compute
    last, dropped = plan.stages[-1].end_layer - 1, plan.batch.accumulation - 1
    if inside.pod and inside.pod.coord.data_rank:
        return {}

    def without(handler: Handler) -> Handler:
        def backward(layer: int, micro: int) -> None:
            scale = compute.loss_scale
            if (layer, micro) == (last, dropped):
                compute.loss_scale = torch.zeros_like(scale)
            handler(layer, micro)
            compute.loss_scale = scale

        return backward

    kinds: tuple[InstructionKind, ...] = ("backward", "backward_input")
    return {kind: without(handlers[kind]) for kind in kinds}


def _left_out_update(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """One layer keeps the weights of the step before."""
    target = faulty_layer(inside.plan)

    def update(layer: int, micro: int) -> None:
        if layer != target or inside.compute.step != _LATER_STEP:
            handlers["update"](layer, micro)

    return {"update": update}


def _stale_gather(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """One layer computes a second step with the weights that were gathered for the first."""
    pod, right = _pod(inside), _pod(inside).unshard_weights
    kept: list[Tensor] = []

    def stale(whole: Tensor, held: Tensor) -> None:
        right(whole, held)
        if inside.compute.step == 1:
            kept[:] = [whole.clone()]
        elif inside.compute.step == _LATER_STEP:
            whole.copy_(kept[0])

    gather = _at_layer(
        handlers["unshard_weights"], inside.plan, lambda: _replaced(pod, "unshard_weights", stale)
    )
    return {"unshard_weights": gather}


def _no_slice_sum(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """Each slice goes on with its own contribution to what all of them have whole."""
    pod = _pod(inside)

    def nothing(common: Tensor, among: TensorAxis) -> None:
        del common, among

    left_out = _at_layer(
        handlers["reduce_grads"], inside.plan, lambda: _replaced(pod, "all_reduce_tensor_parallel", nothing)
    )
    return {"reduce_grads": left_out}


def _wrong_samples(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """Every replica takes the samples of the first."""
    del handlers
    inside.compute.first = 0
    return {}


def _no_loan_gradient(handlers: Handlers, inside: HookContext) -> Mapping[InstructionKind, Handler]:
    """The gradient that a stage hands over for weights it borrowed is not added."""
    pod, right = _pod(inside), _pod(inside).receive

    def nothing(instruction: Instruction, into: Tensor) -> Tensor:
        return right(instruction, into).zero_()

    def take_over(layer: int, micro: int) -> None:
        with _replaced(pod, "receive", nothing):
            handlers["accumulate_tied_grads"](layer, micro)

    return {"accumulate_tied_grads": take_over}


def _pod(inside: HookContext) -> ProcessGroups:
    if inside.pod is None:
        raise PlanError("a fault of exchanges needs several devices")
    return inside.pod


def _at_layer(
    handler: Handler, plan: Plan, spoil: Callable[[], AbstractContextManager[None]]
) -> Handler:
    target = faulty_layer(plan)

    def at(layer: int, micro: int) -> None:
        if layer != target:
            handler(layer, micro)
            return
        with spoil():
            handler(layer, micro)

    return at


@contextmanager
def _replaced(pod: ProcessGroups, name: str, by: Callable[..., object]) -> Iterator[None]:
    """Lets a pod do something else under a method's name."""
    setattr(pod, name, by)
    try:
        yield
    finally:
        delattr(pod, name)


def _slices(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.parallel.tensor > 1


def _replicas(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.parallel.data > 1


def _shared(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.sharding.optimizer > 1


def _gathered(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.sharding.parameters > 1


def _near(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return not plan.is_offloaded("optimizer")


def _lent(plan: Plan, graph: Graph | None) -> bool:
    return graph is not None and bool(tied_across_stages(plan, graph))


def _any(plan: Plan, graph: Graph | None) -> bool:
    del plan, graph
    return True


FAULTS: Mapping[str, InjectedFault] = {
    "loss-scale": InjectedFault("a wrong loss scale", _any, "", _wrong_scale, single_layer=False),
    "micro-batch": InjectedFault("a dropped micro-batch", _any, "", _dropped_micro, single_layer=False),
    "update": InjectedFault(
        "an update left out", _near, "optimizer state in the near tier", _left_out_update
    ),
    "reduction": InjectedFault("a reduction left out", _replicas, "replicas", _no_reduction),
    "samples": InjectedFault(
        "a wrong range of samples", _replicas, "replicas", _wrong_samples, single_layer=False
    ),
    "shards": InjectedFault(
        "shards swapped as they come together", _shared, "`sharding.optimizer` above 1",
        _swapped_shards,
    ),
    "unshard_weights": InjectedFault(
        "weights of the step before", _gathered, "`sharding.parameters` above 1", _stale_gather
    ),
    "slice-sum": InjectedFault(
        "a sum over slices left out", _slices, "`parallel.tensor` above 1", _no_slice_sum
    ),
    "loan": InjectedFault(
        "the gradient of lent weights left out", _lent, "tied weights on two stages",
        _no_loan_gradient, single_layer=False,
    ),
}  # fmt: skip
"""By the name that asks for it."""
