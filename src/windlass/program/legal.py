"""Which plans are legal for a graph and a machine: every fault at once, each with the way out."""

from collections.abc import Iterator

from windlass.errors import Faults
from windlass.program.ties import owners
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import Plan, Stage


def faults(
    plan: Plan, graph: Graph, machine: Machine, *, global_batch: int | None = None
) -> tuple[str, ...]:
    """All that is wrong with running `plan` for `graph` on `machine`; nothing if it is legal.

    Args:
        plan: the plan.
        graph: what is to be computed.
        machine: what it is to run on.
        global_batch: sequences of a step that the request asks for; None asks for none.
    """
    return (*_labels(plan, graph, machine), *_sizes(plan, graph, machine, global_batch),
            *_uncovered(plan, graph), *_homes(plan), *_not_yet(plan, graph))  # fmt: skip


def require_legal(
    plan: Plan, graph: Graph, machine: Machine, *, global_batch: int | None = None
) -> None:
    """Refuses a plan that is not legal.

    Raises:
        Faults: all that is wrong.
    """
    _raise(faults(plan, graph, machine, global_batch=global_batch))


def require_lowerable(plan: Plan, graph: Graph) -> None:
    """Refuses a plan that cannot be lowered, whatever the machine.

    Raises:
        Faults: all that is wrong.
    """
    _raise((*_uncovered(plan, graph), *_homes(plan), *_not_yet(plan, graph)))


def _raise(found: tuple[str, ...]) -> None:
    if found:
        raise Faults(found)


def _labels(plan: Plan, graph: Graph, machine: Machine) -> Iterator[str]:
    if plan.graph != graph.label:
        yield (
            f"the plan is for graph `{plan.graph}`, but this one is `{graph.label}`; "
            "plan again for this model"
        )
    if plan.machine != machine.label:
        yield (
            f"the plan is for machine `{plan.machine}`, but this one is `{machine.label}`; "
            "plan again for this machine"
        )


def _sizes(plan: Plan, graph: Graph, machine: Machine, global_batch: int | None) -> Iterator[str]:
    cut, batch = plan.cut, plan.batch
    if cut.devices > machine.devices:
        yield (
            f"`cut` takes {cut.pipeline} x {cut.tensor} x {cut.replicas} = {cut.devices} devices, "
            f"but `{machine.name}` has {machine.devices}; lower a degree"
        )
    if global_batch is not None and plan.global_batch != global_batch:
        yield (
            f"`batch.micro` x `batch.accumulation` x `cut.replicas` = {batch.micro} x "
            f"{batch.accumulation} x {cut.replicas} = {plan.global_batch}, but `train.batch` is "
            f"{global_batch}; make them equal"
        )
    if graph.max_sequence is not None and batch.sequence > graph.max_sequence:
        yield (
            f"`batch.sequence` = {batch.sequence}, but `{graph.name}` takes at most "
            f"{graph.max_sequence} tokens; shorten it or raise `model.sequence`"
        )
    if plan.precision not in {rate.precision for rate in machine.device.matmul}:
        yield (
            f"`precision` = {plan.precision}, but `{machine.name}` states no rate for it; "
            "choose one that it states"
        )
    for name, shards in (
        ("weights", plan.sharding.weights),
        ("optimizer", plan.sharding.optimizer),
    ):
        if cut.replicas % shards:
            yield (f"`sharding.{name}` = {shards} does not divide `cut.replicas` = {cut.replicas}")
    tiers = [tier.name for tier in machine.device.tiers]
    for name, tier in plan.home:
        if tier not in tiers:
            yield f"`home.{name}` = {tier!r}, but `{machine.name}` has only {', '.join(tiers)}"


def _uncovered(plan: Plan, graph: Graph) -> Iterator[str]:
    last = plan.stages[-1].last
    if last != graph.layers:
        yield (
            f"the stages cover layers [0, {last}), but `{graph.name}` has {graph.layers} layers; "
            "let the last phase end there"
        )


def _homes(plan: Plan) -> Iterator[str]:
    """Which classes may have homes beyond the near tier together."""
    weights, gradients = plan.home.weights, plan.home.gradients
    phases = len(plan.stages[0].phases)
    if plan.far("weights") and not plan.far("optimizer"):
        yield (
            f"`home.weights` = {weights} but `home.optimizer` = near: weights that are away are "
            f"updated as their optimizer state passes through; set `home.optimizer` = {weights}"
        )
    if plan.far("weights") and not plan.far("gradients"):
        yield (
            f"`home.weights` = {weights} but `home.gradients` = near: gradients of weights that "
            f"are away leave the near tier too; set `home.gradients` = {weights}"
        )
    if plan.far("gradients") and not plan.far("weights"):
        yield (
            f"`home.gradients` = {gradients} but `home.weights` = near: only gradients of weights "
            f"that go away leave; set `home.weights` and `home.optimizer` = {gradients}, or "
            "`home.gradients` = near"
        )
    if plan.far("weights") and phases == 1:
        yield (
            f"`home.weights` = {weights} but `stages.0.phases` = 1: with all layers in one phase "
            "no weights would ever be away; cut the layers into at least 2 phases"
        )
    if not plan.far("weights"):
        for index, stage in enumerate(plan.stages):
            if len(stage.phases) > 1:
                yield (
                    f"`stages.{index}.phases` = {len(stage.phases)} but `home.weights` = near: "
                    "weights that never go away need no turns; give them another home, or put "
                    "all layers into 1 phase"
                )


def _not_yet(plan: Plan, graph: Graph) -> Iterator[str]:
    later: list[tuple[str, object, bool]] = [
        ("cut.tensor", plan.cut.tensor, plan.cut.tensor > 1),
        ("sharding.weights", plan.sharding.weights, plan.sharding.weights > 1),
        ("sharding.optimizer", plan.sharding.optimizer, plan.sharding.optimizer > 1),
        ("interleave", plan.interleave, plan.interleave > 1),
        ("order", plan.order, plan.order not in ("gpipe", "1f1b")),
    ]
    for key, value, asked in later:
        if asked:
            yield f"`{key}` = {value} is not yet run by this version"
    cut = plan.cut
    for name, tier in plan.far_homes.items():
        for key, degree in (("cut.pipeline", cut.pipeline), ("cut.replicas", cut.replicas)):
            if degree > 1:
                yield (
                    f"`home.{name}` = {tier} with `{key}` = {degree} is not yet run by this "
                    f"version; set `{key}` = 1 or `home.{name}` = near"
                )
    yield from _parted_ties(plan.stages, graph)


def _parted_ties(stages: tuple[Stage, ...], graph: Graph) -> Iterator[str]:
    if len(stages) == 1:
        return
    borrowed = owners(graph)
    for index, stage in enumerate(stages):
        for layer in range(stage.first, min(stage.last, graph.layers)):
            for owner in borrowed[layer]:
                if not stage.first <= owner < stage.last:
                    yield (
                        f"stage {index} uses weights of layer {owner} in layer {layer}: tied "
                        "weights on two stages are not yet run by this version"
                    )
