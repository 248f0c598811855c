"""One rank of a plan that answers questions from a checkpoint, and trains nothing."""

from collections.abc import Callable, Sequence

from windlass.data import ChoiceLikelihood, EncodedChoice
from windlass.errors import RequestError
from windlass.runtime.checkpoint.checkpoint import Checkpoint
from windlass.runtime.distributed.p2p import P2PCommunicator
from windlass.runtime.distributed.process_groups import ProcessGroups
from windlass.runtime.inference.rank_passes import RankPasses
from windlass.runtime.inference.score_tasks import likelihoods_on_ranks
from windlass.runtime.layer_templates import layer_templates
from windlass.runtime.optimizers.optimizer import Optimizer
from windlass.runtime.param_store import ParamStore
from windlass.runtime.rank_context import RankContext


def score_on_rank(
    context: RankContext,
    checkpoint: Checkpoint,
    choices: Sequence[EncodedChoice],
    on_progress: Callable[[], None],
) -> list[ChoiceLikelihood]:
    """The likelihood of each choice, the same on all ranks of a plan.

    All weights are frozen, so that a rank keeps its part of them alone, without any gradient or
    optimizer state.

    Args:
        context: what this rank runs; torch.distributed is initialized.
        checkpoint: a checkpoint with every layer in one file; weights are all that is read.
        on_progress: called whenever a batch has passed through a phase.

    Raises:
        RequestError: the plan has one device, or keeps weights outside of device memory.
        CheckpointError: the checkpoint is of another model.
    """
    plan, graph = context.plan, context.graph
    if graph is None or plan.offloads:
        raise RequestError("ranks score models that they hold in device memory")
    for layer in context.stack.layers:
        layer.requires_grad_(requires_grad=False)
    context.device.activate()
    groups = ProcessGroups(plan, graph, context.rank, context.device)
    templates = layer_templates(
        context.stack, compiled=False, tp_rank=groups.tensor_parallel, experts=groups.experts,
        loss=plan.loss, attention=plan.attention,
    )  # fmt: skip
    optimizer = Optimizer(context.settings, context.device, plan.moments)
    store = ParamStore(context, optimizer, groups, before_update=lambda _: None)
    try:
        store.initialize(checkpoint)
        p2p = P2PCommunicator(context, groups, store, templates)
        passes = RankPasses(
            context=context, store=store, templates=templates, whole_templates=templates,
            dist=groups, p2p=p2p, on_progress=on_progress,
        )  # fmt: skip
        return likelihoods_on_ranks(passes, choices)
    finally:
        store.close()
