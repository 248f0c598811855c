"""Context parallelism: what one of c ranks that divide the tokens of each sequence computes.

Adjacent replicas form a context group, whose ranks have the same samples. Before attention they
gather the keys and values of all tokens; on the way back each gets its part of the sum of their
gradients. Everything else is what a replica does with `1 / c` of the tokens. Source: Llama Team
2024, arXiv:2407.21783, section 3.3.2.
"""

from collections.abc import Iterator, Mapping

from windlass.schema import (
    CONTEXT_RUNS,
    PRECISION_BYTES,
    Graph,
    LayerCost,
    LayerKind,
    Op,
    Plan,
    Polynomial,
)


def context_group(data_rank: int, plan: Plan) -> tuple[int, ...]:
    """The replicas that divide each sequence with this one, in the order of their first tokens."""
    degree = plan.parallel.context or 1
    first = data_rank // degree * degree
    return tuple(range(first, first + degree))


def micro_of_rank(plan: Plan) -> float:
    """Sequences of a micro-batch for each context-parallel rank, which has a part of each.

    Operations on tokens and attention to a whole sequence both take a rank's share of the time.
    """
    return plan.batch.micro / (plan.parallel.context or 1)


def context_errors(degree: int, sequence: int) -> Iterator[str]:
    """Why a context-parallel degree cannot divide sequences of this many tokens."""
    if degree > 1 and sequence % (CONTEXT_RUNS * degree):
        yield (
            f"`parallel.context` = {degree} needs sequences of a multiple of "
            f"{CONTEXT_RUNS * degree} tokens, and this one has {sequence}: each rank has "
            f"{CONTEXT_RUNS} runs of them; change one"
        )


def context_run_errors(degree: int, graph: Graph, *, tensor: int, selective: bool) -> Iterator[str]:
    """What this version does not run beside context parallelism; other stacks may.

    Args:
        degree: context-parallel degree.
        graph: the full graph of the model.
        tensor: tensor-parallel degree.
        selective: whether layers are recomputed selectively.
    """
    if degree == 1:
        return
    excluded = {
        f"`parallel.tensor` = {tensor}": int(tensor) > 1,
        "`recompute` = selective": selective,
        "examples that are no text": graph.examples is not None,
        "experts": bool(graph.experts),
    }
    for what, is_asked in excluded.items():
        if is_asked:
            yield (
                f"`parallel.context` = {degree} with {what}, which this version does not "
                "combine; leave one of them out"
            )


def key_value_bytes(cost: LayerCost) -> Polynomial:
    """Bytes of the keys and values of a micro-batch in a layer; nothing without fused attention.

    Fused attention reads queries, as many as its results, with keys and values. Its `4 b s s h k`
    FLOP tell how many results, `b s h k`, it has.
    """
    width = PRECISION_BYTES[cost.precision]
    return Polynomial(
        bs=sum(
            max(0.0, op.read_bytes.bs - width * op.flop.bss / 4)
            for op in cost.forward
            if op.kind == "attention"
        )
    )


def exchanged_bytes(cost: LayerCost, plan: Plan) -> float:
    """Bytes that a rank sends to give the others its keys and values, or their gradients, once.

    Args:
        cost: the layer's cost under the plan.
        plan: the plan.
    """
    own = key_value_bytes(cost).at(micro_of_rank(plan), plan.batch.sequence)
    return ((plan.parallel.context or 1) - 1) * own


def gathered_kinds(kinds: Mapping[str, LayerKind], degree: int) -> dict[str, LayerKind]:
    """Layer kinds whose attention holds the keys and values of all `degree` ranks."""
    if degree == 1:
        return dict(kinds)
    return {name: _gathered(kind, degree) for name, kind in kinds.items()}


def _gathered(kind: LayerKind, degree: int) -> LayerKind:
    """A layer kind beside whose own keys and values lie those of all ranks."""
    if not any(op.kind == "attention" for cost in kind.costs for op in cost.forward):
        return kind
    return kind.with_costs(lambda cost: _gathered_cost(cost, degree))


def _gathered_cost(cost: LayerCost, degree: int) -> LayerCost:
    """A layer's cost for `1 / degree` of the tokens of a micro-batch."""
    others = Polynomial(bs=(degree - 1) * key_value_bytes(cost).bs)
    repeated = cost.recompute
    return cost.model_copy(
        update={
            "forward": _with_gathered(cost.forward, others),
            "backward": _with_gathered(cost.backward[::-1], others)[::-1],
            "recompute": repeated and _with_gathered(repeated, others),
            "saved_bytes": cost.saved_bytes.plus(others),
        }
    )


def _with_gathered(ops: tuple[Op, ...], others: Polynomial) -> tuple[Op, ...]:
    """Ops from attention on beside what other ranks sent; attention itself has it once more."""
    held, gathered = [], Polynomial()
    for op in ops:
        if op.kind == "attention":
            gathered = others
            held.append(_beside(op, others.doubled))
        else:
            held.append(_beside(op, gathered))
    return tuple(held)


def _beside(op: Op, more: Polynomial) -> Op:
    return op.model_copy(update={"live_bytes": op.live_bytes.plus(more)})
