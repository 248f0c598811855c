"""Why layers cannot run as a plan says: recomputed, with a fused loss, or recorded."""

from collections.abc import Iterator

from windlass.program.activation_checkpointing import recomputable_layers, selective_layers
from windlass.schema import (
    DEVICE_TIER,
    Graph,
    Machine,
    ModelIdentity,
    MomentFormat,
    OptimizerName,
    Plan,
    Precision,
    grid_columns,
    optimizer_law,
)


def step_graph_errors(plan: Plan, graph: Graph, machine: Machine) -> Iterator[str]:
    """Why the steps of a plan cannot be recorded once and replayed, a sentence each.

    All that changes from step to step must be copied to the device before a replay: what the host
    computes anew for each step cannot be in it.
    """
    prefix, way_out = "`step_graph` = true", "leave `step_graph` out"
    if machine.device.kind != "cuda":
        yield (
            f"{prefix}, but the devices of `{machine.name}` are of kind `{machine.device.kind}` "
            f"and only those of kind `cuda` record steps; {way_out}"
        )
    if plan.parallel.devices > 1:
        yield (
            f"{prefix} with {plan.parallel.devices} devices: this version records the steps of one "
            f"device; set every `parallel` key = 1, or {way_out}"
        )
    if plan.offloads:
        tiers = [f"`offload.{name}` = {tier}" for name, tier in plan.offload_tiers.items()]
        yield f"{prefix} with {' and '.join(tiers)}: each step starts transfers; {way_out}"
    if plan.moments != "float32":
        yield (
            f"{prefix} with `moments` = {plan.moments}, which round by a key of each step; set "
            f"`moments` = float32, or {way_out}"
        )
    if plan.master_weights is not None:
        yield (
            f"{prefix} with `master_weights` = false, whose weights round by a key of each step; "
            "leave one of them out"
        )
    if not optimizer_law(plan.optimizer).fused:
        yield (
            f"{prefix} with `train.optimizer` = {plan.optimizer}, which takes its learning rate "
            f"from the host; choose `train.optimizer` = adamw or sgd, or {way_out}"
        )
    if graph.experts:
        yield (
            f"{prefix} with `{graph.name}`, whose experts take another number of tokens in each "
            f"pass, with which no recording was tried; {way_out}"
        )
    if plan.model is not None and plan.model.sparsity is not None:
        yield (f"{prefix} with `sparsity`, whose kernels were not tried in a recording; {way_out}")


def float8_errors(tensor: int, model: ModelIdentity | None) -> Iterator[str]:
    """Why linear layers cannot multiply 8-bit factors, a sentence each.

    Args:
        model: the model with its sparsity; None if all of its weights are kept.
    """
    excluded = {
        f"`parallel.tensor` = {tensor}, whose grid of ranks divides inputs and outputs": (
            grid_columns(tensor) > 1
        ),
        "`sparsity`, whose kept blocks have a kernel of their own": model is not None
        and model.sparsity is not None,
    }
    for what, is_asked in excluded.items():
        if is_asked:
            yield f"`precision` = float8 with {what}; leave one of them out"


def fused_loss_errors(tensor: int, graph: Graph) -> Iterator[str]:
    """Why a graph's last layer cannot compute its loss fused with its projection."""
    if tensor > 1:
        yield (
            f"`loss` = fused with `parallel.tensor` = {tensor}, whose ranks each have a part of "
            "the vocabulary; leave `loss` out or set `parallel.tensor` = 1"
        )
    if not graph.can_fuse_loss:
        yield (
            f"`loss` = fused, but the last layer of `{graph.name}` does not return what one "
            "`nn.Linear` gives, or has a loss of its own; leave `loss` out"
        )


def recompute_errors(plan: Plan, graph: Graph) -> Iterator[str]:
    """Stages that recompute more layers than they can, or selectively where that is impossible."""
    for index, stage in enumerate(plan.stages):
        count = len(recomputable_layers(plan, stage))
        if stage.recompute_layers is not None and stage.recompute_layers > count:
            yield (
                f"`stages.{index}.recompute_layers` = {stage.recompute_layers}, but the stage has "
                f"{count} layers whose recomputation a plan decides: the model's first and last "
                "layers are never recomputed, and those of other phases than the last always are; "
                "lower it or leave it out"
            )
    if selective_layers(plan):
        yield from selective_recompute_errors(plan, graph)


def selective_recompute_errors(plan: Plan, graph: Graph) -> Iterator[str]:
    """Why a plan's layers cannot be recomputed selectively."""
    prefix = "`recompute` = selective with"
    if plan.compile:
        yield (
            f"{prefix} `compile`: a compiled layer already recomputes what takes no time; set "
            "`compile` = false, or `recompute` = none or full"
        )
    if plan.parallel.schedule == "zero-bubble":
        yield (
            f"{prefix} `parallel.schedule` = zero-bubble, which splits backward passes in two; set "
            "`parallel.schedule` = 1f1b, or `recompute` = none or full"
        )
    if plan.parallel.tensor > 1 and plan.parallel.tensor not in graph.tensor_shards:
        return  # `tensor_parallel_errors` reports it
    kinds = graph.shard(plan.parallel.tensor).kinds
    runs = graph.layer_runs
    inner_kinds = {run.kind for run in runs} - {runs[0].kind, runs[-1].kind}
    if not all(kinds[name].selective_costs for name in inner_kinds):
        yield (
            f"{prefix} `{graph.name}`, some of whose layers cannot be recomputed selectively; set "
            "`recompute` = none or full"
        )


def master_weight_errors(optimizer: OptimizerName, precision: Precision | None) -> Iterator[str]:
    """Why an optimizer cannot update weights without float32 masters.

    Args:
        precision: precision that layers compute in; None if it is open.
    """
    if precision != "bfloat16":
        asked = "left open" if precision is None else f"= {precision}"
        yield (
            f"`master_weights` = false with `precision` {asked}: weights are rounded "
            "stochastically to bfloat16 only; set `precision` = bfloat16, or leave "
            "`master_weights` out"
        )
    law = optimizer_law(optimizer)
    if law.scope != "element" or law.averages:
        yield (
            f"`master_weights` = false with `train.optimizer` = {optimizer}: only updates that "
            "read one element of one weight are rounded; leave `master_weights` out, or set "
            "`train.optimizer` = adamw, lion or sgd"
        )


def moment_errors(optimizer: OptimizerName, moments: MomentFormat) -> Iterator[str]:
    """Why an optimizer's moments cannot be stored in a format."""
    if moments != "float32" and not optimizer_law(optimizer).quantizes_moments:
        yield (
            f"`moments` = {moments} with `train.optimizer` = {optimizer}: only AdamW's two moments "
            "are stored in fewer bits; set `moments` = float32, or `train.optimizer` = adamw"
        )


def sparse_state_errors(optimizer: OptimizerName, *, sparse: bool) -> Iterator[str]:
    """Why an optimizer cannot update weights that are stored in kept blocks."""
    if sparse and optimizer_law(optimizer).factored:
        yield (
            f"`train.optimizer` = {optimizer} with `sparsity`: its second moment is that of whole "
            "rows and columns, and kept blocks lie apart; set `train.optimizer` = adamw, or leave "
            "`sparsity` out"
        )


def offloaded_optimizer_errors(optimizer: OptimizerName, parts: int) -> Iterator[str]:
    """Why an optimizer's state cannot be offloaded where so many ranks hold parts of weights."""
    scope = optimizer_law(optimizer).scope
    if scope == "matrix":
        yield (
            f"`train.optimizer` = {optimizer} with offloaded state, which is updated part by part: "
            f"it updates whole matrices; set `offload.optimizer` = {DEVICE_TIER}, or "
            "`train.optimizer` = adamw, lion or sgd"
        )
    elif scope == "tensor" and parts > 1:
        yield (
            f"`train.optimizer` = {optimizer} with offloaded state of which ranks hold parts: its "
            "norms of whole weights are summed in device memory only; set `offload.optimizer` = "
            f"{DEVICE_TIER}, or train on one device"
        )
