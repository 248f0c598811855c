"""Fault injection: mistakes that a distributed run might make, made on purpose to be detected.

Each fault replaces handlers on all ranks that it concerns, so that no rank waits for another
forever. Nothing here runs unless a verification asks for it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.errors import PlanError
from windlass.program import (
    Instruction,
    InstructionKind,
    optimizer_shard_index,
    tied_across_stages,
    updates_per_shard,
)
from windlass.runtime.distributed.flat_weights import WeightPart
from windlass.runtime.distributed.process_groups import PendingCollective, ProcessGroups
from windlass.runtime.interpreter import Handler, Handlers
from windlass.runtime.verify.handler_hooks import HookContext
from windlass.schema import Graph, Plan, TensorAxis

OVERFLOWING_STEPS = (2, 4)
"""Steps in which `overflow_on_last_rank` plants an infinite gradient; the first step's gradients
are compared, and a clean step follows each."""

_SECOND_STEP = 2
"""Step in which stale values are used; the first step has no older ones."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """One mistake, and the plans in which it can occur."""

    description: str
    """What goes wrong, for a message."""
    is_possible: Callable[[Plan, Graph | None], bool]
    """Whether the fault can occur in a plan for a graph."""
    requirement: str
    """What a plan must have for the fault to be possible."""
    inject: Callable[[Handlers, HookContext], Handlers]
    """Returns the handlers that make the mistake."""
    single_layer: bool = True
    """Whether the fault concerns one layer, so that a verification should name that layer."""


def inject_fault(name: str, handlers: Handlers, hook: HookContext) -> Handlers:
    """The handlers with a fault injected.

    Raises:
        PlanError: there is no such fault, or it cannot occur in the plan.
    """
    if name not in FAULTS:
        raise PlanError(f"no fault `{name}`; known are {', '.join(FAULTS)}")
    fault = FAULTS[name]
    if not fault.is_possible(hook.plan, hook.graph):
        raise PlanError(f"fault `{name}` needs {fault.requirement}")
    return {**handlers, **fault.inject(handlers, hook)}


def overflow_on_last_rank(handlers: Handlers, hook: HookContext) -> Handlers:
    """The last rank's gradients of some steps have one infinite element, and no other rank's have.

    It is no fault: a run in float16 leaves these steps out, on all ranks alike. The element is in
    the last layer alone, so that one rank has it where gradients are sharded.
    """
    last = hook.plan.parallel.devices - 1
    if hook.groups is not None and hook.groups.rank != last:
        return handlers
    spoiled = hook.plan.stages[-1].end_layer - 1

    def after(kind: InstructionKind) -> Handler:
        def backward(layer: int, micro: int) -> None:
            handlers[kind](layer, micro)
            used = hook.compute.layers[layer].used
            gradients = [w.gradient for w in used if w.gradient is not None]
            overflows = layer == spoiled and hook.compute.inputs.step in OVERFLOWING_STEPS
            if overflows and gradients:
                gradients[-1].view(-1)[0] = torch.inf

        return backward

    kinds: tuple[InstructionKind, ...] = ("backward", "backward_weight")
    return {**handlers, **{kind: after(kind) for kind in kinds if kind in handlers}}


def faulty_layer(plan: Plan) -> int:
    """The layer that single-layer faults are injected into: the middle one."""
    return plan.stages[-1].end_layer // 2


def _wrong_loss_scale(handlers: Handlers, hook: HookContext) -> Handlers:
    """Averages the gradient over twice as many targets as there are."""
    return _with_loss_weights(handlers, hook, lambda _, __, weights: weights / 2)


def _no_grad_reduce(handlers: Handlers, hook: HookContext) -> Handlers:
    """Leaves each data-parallel rank with its own gradient of one layer."""
    groups, plan = _groups(hook), hook.plan

    def local(flat: Tensor, part: WeightPart) -> PendingCollective:
        shards = flat.chunk(part.plan.sharding.optimizer)
        index = optimizer_shard_index(part.data_rank, part.plan)
        return PendingCollective(shards[index].clone(), None)

    replaced = _at_layer(
        handlers["reduce_grads"], plan, lambda: _replaced(groups, "reduce_grads", local)
    )
    return {"reduce_grads": replaced}


def _swapped_shards(handlers: Handlers, hook: HookContext) -> Handlers:
    """Gathers the weight shards of one layer in the wrong order."""
    groups, plan = _groups(hook), hook.plan
    sharded = plan.sharding.parameters > 1
    kind: InstructionKind = "unshard_weights" if sharded else "all_gather_params"
    gather = getattr(groups, kind)

    def swapped(full: Tensor, own: Tensor, part: WeightPart) -> PendingCollective:
        shards = part.plan.sharding.parameters if sharded else updates_per_shard(part.plan)
        pending = gather(full, own, part)
        if pending is not None:
            pending.wait()
        full.copy_(full.view(shards, -1).roll(1, 0).view(-1))
        return PendingCollective(full, None)

    return {kind: _at_layer(handlers[kind], plan, lambda: _replaced(groups, kind, swapped))}


def _dropped_micro_batch(handlers: Handlers, hook: HookContext) -> Handlers:
    """Drops the gradient of the first data-parallel rank's last micro-batch."""
    plan = hook.plan
    last, dropped = plan.stages[-1].end_layer - 1, plan.batch.accumulation - 1
    if hook.groups and hook.groups.coord.data_rank:
        return {}

    def without_last(layer: int, micro: int, weights: Tensor) -> Tensor:
        return torch.zeros_like(weights) if (layer, micro) == (last, dropped) else weights

    return _with_loss_weights(handlers, hook, without_last)


def _with_loss_weights(
    handlers: Handlers, hook: HookContext, change: Callable[[int, int, Tensor], Tensor]
) -> Handlers:
    """Backward passes of (layer, micro-batch) with other weights of the losses."""
    inputs = hook.compute.inputs

    def changed(handler: Handler) -> Handler:
        def backward(layer: int, micro: int) -> None:
            weights = inputs.loss_weights
            inputs.loss_weights = change(layer, micro, weights)
            handler(layer, micro)
            inputs.loss_weights = weights

        return backward

    kinds: tuple[InstructionKind, ...] = ("backward", "backward_input")
    return {kind: changed(handlers[kind]) for kind in kinds}


def _skipped_update(handlers: Handlers, hook: HookContext) -> Handlers:
    """Skips one layer's update in the second step."""
    target = faulty_layer(hook.plan)

    def update(layer: int, micro: int) -> None:
        if layer != target or hook.compute.inputs.step != _SECOND_STEP:
            handlers["update"](layer, micro)

    return {"update": update}


def _stale_weights(handlers: Handlers, hook: HookContext) -> Handlers:
    """Computes one layer's second step with the weights gathered in the first."""
    groups, unshard = _groups(hook), _groups(hook).unshard_weights
    first_step: list[Tensor] = []

    def stale(full: Tensor, shard: Tensor, part: WeightPart) -> PendingCollective:
        unshard(full, shard, part).wait()
        if hook.compute.inputs.step == 1:
            first_step[:] = [full.clone()]
        elif hook.compute.inputs.step == _SECOND_STEP:
            full.copy_(first_step[0])
        return PendingCollective(full, None)

    replaced = _at_layer(
        handlers["unshard_weights"],
        hook.plan,
        lambda: _replaced(groups, "unshard_weights", stale),
    )
    return {"unshard_weights": replaced}


def _no_tensor_reduce(handlers: Handlers, hook: HookContext) -> Handlers:
    """Leaves each tensor-parallel rank with its own gradient of replicated weights."""
    groups = _groups(hook)

    def nothing(tensor: Tensor, axis: TensorAxis) -> None:
        del tensor, axis

    replaced = _at_layer(
        handlers["reduce_grads"],
        hook.plan,
        lambda: _replaced(groups, "all_reduce_tensor_parallel", nothing),
    )
    return {"reduce_grads": replaced}


def _wrong_samples(handlers: Handlers, hook: HookContext) -> Handlers:
    """Gives every data-parallel rank the samples of the first."""
    del handlers
    hook.compute.inputs.first_sample = 0
    return {}


def _no_tied_gradient(handlers: Handlers, hook: HookContext) -> Handlers:
    """Ignores the gradient that another stage sends for tied weights."""
    groups, receive = _groups(hook), _groups(hook).receive

    def zeros(instruction: Instruction, into: Tensor) -> Tensor:
        return receive(instruction, into).zero_()

    def accumulate_tied_grads(layer: int, micro: int) -> None:
        with _replaced(groups, "receive", zeros):
            handlers["accumulate_tied_grads"](layer, micro)

    return {"accumulate_tied_grads": accumulate_tied_grads}


def _groups(hook: HookContext) -> ProcessGroups:
    if hook.groups is None:
        raise PlanError("a fault of communication needs several devices")
    return hook.groups


def _at_layer(
    handler: Handler, plan: Plan, replaced: Callable[[], AbstractContextManager[None]]
) -> Handler:
    """A handler that runs inside `replaced` for the faulty layer only."""
    target = faulty_layer(plan)

    def call(layer: int, micro: int) -> None:
        if layer != target:
            handler(layer, micro)
            return
        with replaced():
            handler(layer, micro)

    return call


@contextmanager
def _replaced(
    groups: ProcessGroups, method: str, replacement: Callable[..., object]
) -> Iterator[None]:
    """Replaces a method of `groups` meanwhile."""
    setattr(groups, method, replacement)
    try:
        yield
    finally:
        delattr(groups, method)


def _tensor_parallel(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.parallel.tensor > 1


def _data_parallel(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.parallel.data > 1


def _replicated(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.parallel.replicas > 1


def _sharded_optimizer(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.sharding.optimizer > 1


def _sharded_parameters(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return plan.sharding.parameters > 1


def _optimizer_on_device(plan: Plan, graph: Graph | None) -> bool:
    del graph
    return not plan.is_offloaded("optimizer")


def _tied_across_stages(plan: Plan, graph: Graph | None) -> bool:
    return graph is not None and bool(tied_across_stages(plan, graph))


def _always(plan: Plan, graph: Graph | None) -> bool:
    del plan, graph
    return True


FAULTS: Mapping[str, InjectedFault] = {
    "loss-scale": InjectedFault(
        "a wrong loss scale", _always, "", _wrong_loss_scale, single_layer=False
    ),
    "micro-batch": InjectedFault(
        "a dropped micro-batch", _always, "", _dropped_micro_batch, single_layer=False
    ),
    "update": InjectedFault(
        "an update left out", _optimizer_on_device, "optimizer state in device memory",
        _skipped_update,
    ),
    "reduction": InjectedFault(
        "a gradient reduction left out", _replicated,
        "`parallel.data` or `parallel.context` above 1", _no_grad_reduce,
    ),
    "samples": InjectedFault(
        "a wrong range of samples", _data_parallel, "`parallel.data` above 1", _wrong_samples,
        single_layer=False,
    ),
    "shards": InjectedFault(
        "swapped shards", _sharded_optimizer,
        "`sharding.optimizer` above 1", _swapped_shards,
    ),
    "gather": InjectedFault(
        "weights of the previous step", _sharded_parameters, "`sharding.parameters` above 1",
        _stale_weights,
    ),
    "tensor-reduce": InjectedFault(
        "a tensor-parallel sum left out", _tensor_parallel, "`parallel.tensor` above 1",
        _no_tensor_reduce,
    ),
    "tied-gradient": InjectedFault(
        "the gradient of tied weights left out", _tied_across_stages,
        "tied weights on two pipeline stages", _no_tied_gradient, single_layer=False,
    ),
}  # fmt: skip
"""Faults by the name that `windlass check` uses."""
