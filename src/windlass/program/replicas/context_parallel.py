"""Context parallelism: what one of c ranks that divide the tokens of each sequence computes.

Adjacent replicas form a context group, whose ranks have the same samples. Before attention they
gather the keys and values of all tokens; on the way back each gets its part of the sum of their
gradients. Everything else is what a replica does with `1 / c` of the tokens. Source: Llama Team
2024, arXiv:2407.21783, section 3.3.2.
"""

from collections.abc import Iterator, Mapping

from windlass.program.replicas.zero_sharding import adjacent_replicas
from windlass.schema import (
    CONTEXT_RUNS,
    PRECISION_BYTES,
    Collective,
    CollectiveKind,
    Graph,
    LayerCost,
    LayerKind,
    Op,
    Plan,
    Polynomial,
    grid_rows,
)

_ROUTER_GRADIENT = "choose_experts_grad"
"""Name of the op that makes the gradient of a router's scores."""

_FULL_EXPERTS = "drop_late_tokens"
"""Name of the op that finds choices of experts without room."""

_COUNT_BYTES = 8


def context_group(data_rank: int, plan: Plan) -> tuple[int, ...]:
    """The replicas that divide each sequence with this one, in the order of their first tokens."""
    return adjacent_replicas(data_rank, plan.parallel.context or 1)


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


def context_run_errors(degree: int, graph: Graph, tensor: int, sequence: int) -> Iterator[str]:
    """What this version does not run beside context parallelism; other stacks may."""
    if degree == 1:
        return
    rows = grid_rows(tensor)
    if rows > 1 and sequence % (degree * rows):
        yield (
            f"`parallel.context` = {degree} leaves each rank {sequence / degree:g} of {sequence} "
            f"tokens, which {rows} tensor-parallel ranks cannot share equally; make "
            f"`train.sequence` a multiple of {degree * rows}, or change a degree"
        )
    if graph.examples is not None:
        yield (
            f"`parallel.context` = {degree} with examples that are no text, which this version "
            "does not combine; leave one of them out"
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
    """
    own = key_value_bytes(cost).at(micro_of_rank(plan), plan.batch.sequence)
    return ((plan.parallel.context or 1) - 1) * own


def gathered_kinds(kinds: Mapping[str, LayerKind], degree: int) -> dict[str, LayerKind]:
    """Layer kinds whose attention gathers and holds the keys and values of all `degree` ranks."""
    if degree == 1:
        return dict(kinds)
    return {name: _gathered(kind, degree) for name, kind in kinds.items()}


def _gathered(kind: LayerKind, degree: int) -> LayerKind:
    """A layer kind beside whose own keys and values lie those of all ranks."""
    experts = next((p.shape[0] for p in kind.parameters if p.expert), 0)
    names = ("costs", "selective_costs", "fused_costs")
    return kind.model_copy(
        update={
            name: tuple(
                _gathered_cost(cost, degree, experts, again=name == "selective_costs")
                for cost in getattr(kind, name)
            )
            for name in names
        }
    )


def _gathered_cost(cost: LayerCost, degree: int, experts: int, *, again: bool) -> LayerCost:
    """A layer's cost for `1 / degree` of the tokens of a micro-batch.

    Args:
        cost: the cost of one rank that has all of them.
        experts: number E of experts of a mixture in it.
        again: whether keys and values are gathered again as backward begins, in place of being kept
            from the forward pass.
    """
    own = key_value_bytes(cost)
    everyone, others = (Polynomial(bs=count * own.bs) for count in (degree, degree - 1))
    gather, scatter = _exchange("all_gather", everyone), _exchange("reduce_scatter", everyone)
    kept = Polynomial() if again else others
    repeated = cost.recompute
    backward = _around_attention(cost.backward[::-1], scatter, kept=others, others=others)[::-1]
    passes = {
        "forward": _around_attention(cost.forward, gather, kept=kept, others=others),
        "backward": (*((gather,) if again and own.bs else ()), *backward),
        "recompute": repeated and _around_attention(repeated, gather, kept=others, others=others),
    }
    width = max(4, PRECISION_BYTES[cost.precision])
    routed = {
        name: ops and _with_counts(ops, degree, experts, width) for name, ops in passes.items()
    }
    return cost.model_copy(update={**routed, "saved_bytes": cost.saved_bytes.plus(kept)})


def _around_attention(
    ops: tuple[Op, ...], exchange: Op, *, kept: Polynomial, others: Polynomial
) -> tuple[Op, ...]:
    """The ops of a pass, in either direction, with what ranks exchange for its attention.

    Args:
        ops: the ops from the beginning of the forward pass on, or from the end of the backward
            pass on.
        exchange: what ranks do on that side of attention.
        kept: bytes of other ranks that are there on its other side.
        others: bytes of the keys and values of other ranks, of which attention has two copies.
    """
    held: list[Op] = []
    is_behind = False
    for op in ops:
        if op.kind != "attention":
            held.append(_beside(op, kept) if is_behind else op)
            continue
        attention = _beside(op, others.doubled)
        if not is_behind:
            held.append(exchange.model_copy(update={"live_bytes": attention.live_bytes}))
        held.append(attention)
        is_behind = True
    return tuple(held)


def _with_counts(ops: tuple[Op, ...], degree: int, experts: int, width: int) -> tuple[Op, ...]:
    """The ops of a pass in which ranks tell each other how often sequences chose each expert.

    Before choices without room are found, each says it of each of its runs of tokens; before the
    gradient of a router's scores, which has that of the balance loss, it is summed.

    Args:
        experts: number E of experts.
        width: bytes of a number in such a sum.
    """
    runs, sums = (
        Polynomial(b=degree * experts * nbytes)
        for nbytes in (CONTEXT_RUNS * degree * _COUNT_BYTES, width)
    )
    exchanges = {
        _FULL_EXPERTS: _exchange("all_gather", runs),
        _ROUTER_GRADIENT: _exchange("all_reduce", sums),
    }
    held: list[Op] = []
    for op in ops:
        # A compiler fuses several operations into one.
        needed = (exchanges[name] for name in op.name.split("+") if name in exchanges)
        held += [*(_beside(exchange, op.live_bytes) for exchange in needed), op]
    return tuple(held)


def _exchange(kind: CollectiveKind, nbytes: Polynomial) -> Op:
    """A collective of a buffer, which the links pay for and no kernel of this device."""
    return Op(
        name=kind,
        kind="collective",
        read_bytes=Polynomial(),
        written_bytes=Polynomial(),
        live_bytes=Polynomial(),
        collective=Collective(kind, nbytes, "context"),
        calls=0,
    )


def _beside(op: Op, more: Polynomial) -> Op:
    return op.model_copy(update={"live_bytes": op.live_bytes.plus(more)})
