"""Expert parallelism: what one of e ranks that divide a layer's experts holds and computes.

Adjacent replicas form an expert group. Each holds `experts / e` of the experts of every layer, and
all other weights as other replicas do. Inside a pass tokens go to the rank that holds their expert
and come back, an all-to-all each way. Source: Rajbhandari et al. 2022, arXiv:2201.05596, section 5.

How many tokens go where is known only in a run. Here each expert gets as many as any other, so a
rank computes as many products with experts as without this parallelism: with e times the tokens of
`1 / e` of the experts.
"""

from collections.abc import Callable, Iterator, Mapping

from windlass.program.replicas.context_parallel import gathered_kinds
from windlass.program.replicas.zero_sharding import adjacent_replicas, expert_sharding
from windlass.schema import (
    Collective,
    Graph,
    LayerCost,
    LayerKind,
    MatmulShape,
    Op,
    ParameterInfo,
    Plan,
    Polynomial,
    optimizer_law,
)

EXCHANGE = "all_to_all"
"""Name of the op in which tokens go to their experts or come back."""

_EXPERT_PRODUCTS = frozenset(
    ("grouped_linear", "grouped_linear_input_grad", "grouped_linear_weight_grad")
)
"""Names of the products with experts' weights, one for each expert."""
_ROWS = "rows_by_expert"
"""Name of the op that brings tokens into the order of their experts."""
_COUNT_BYTES = 8
"""Bytes in which a rank says how many tokens it sends to an expert."""


def expert_group(data_rank: int, plan: Plan) -> tuple[int, ...]:
    """The replicas that divide the experts with this one, in the order of their experts."""
    return adjacent_replicas(data_rank, plan.parallel.expert_degree)


def same_expert_ranks(
    group: Callable[[int, Plan], tuple[int, ...]], data_rank: int, plan: Plan
) -> tuple[int, ...]:
    """The replicas of a group of `zero_sharding` among those that hold the same experts.

    Args:
        group: gives the group of a replica, were there no others.
    """
    degree = plan.parallel.expert_degree
    block, own = divmod(data_rank, degree)
    return tuple(other * degree + own for other in group(block, expert_sharding(plan)))


def expert_errors(plan: Plan, graph: Graph) -> Iterator[str]:
    """Why experts cannot be divided as a plan says."""
    degree, parallel, sharding = plan.parallel.expert_degree, plan.parallel, plan.sharding
    if degree == 1:
        return
    yield from expert_degree_errors(degree, graph)
    if parallel.replicas % degree:
        times = " x `parallel.context`" if parallel.context else ""
        yield (
            f"`parallel.expert` = {degree} does not divide `parallel.data`{times} = "
            f"{parallel.replicas}, whose replicas divide the experts among them; choose a divisor"
        )
    yield from _uneven_group_errors(degree, parallel.context or 1)
    for key, shards in sharding:
        if key != "reshard" and shards % degree and degree % shards:
            yield (
                f"`sharding.{key}` = {shards} with `parallel.expert` = {degree}: one of them must "
                "be a multiple of the other, so that ranks with the same experts share them "
                "evenly; change one"
            )
    if optimizer_law(plan.optimizer).scope != "element":
        yield (
            f"`parallel.expert` = {degree} with `train.optimizer` = {plan.optimizer}, which this "
            "version does not combine; leave one of them out"
        )


def _uneven_group_errors(degree: int, context: int) -> Iterator[str]:
    """Refuses groups of a sequence and groups of experts that cut through each other.

    Where one degree is a multiple of the other, the ranks that run a pass at the same time are
    those of the larger group.
    """
    if degree % context and context % degree:
        yield (
            f"`parallel.expert` = {degree} with `parallel.context` = {context}: one of them must "
            "be a multiple of the other, so that ranks wait for each other in whole groups; change "
            "one"
        )


def pass_group(data_rank: int, plan: Plan) -> tuple[int, ...]:
    """The replicas that run a pass at the same time: they divide experts, sequences or both."""
    degree = max(plan.parallel.expert_degree, plan.parallel.context or 1)
    return adjacent_replicas(data_rank, degree)


def expert_degree_errors(degree: int, graph: Graph) -> Iterator[str]:
    """Why a graph's experts cannot be divided over so many ranks."""
    if degree == 1:
        return
    if not graph.experts:
        yield (
            f"`parallel.expert` = {degree}, but `{graph.name}` has no experts to divide; leave it "
            "out, or choose a model with a mixture of experts"
        )
    for experts in graph.experts:
        if experts % degree:
            yield (
                f"`parallel.expert` = {degree} does not divide the {experts} experts of "
                f"`{graph.name}`; choose a divisor"
            )


def rank_kinds(plan: Plan, graph: Graph, tensor_rank: int = 0) -> dict[str, LayerKind]:
    """The layer kinds that a rank of a plan computes: its shard, its experts, its tokens.

    Args:
        tensor_rank: tensor-parallel rank; rank 0 has the largest shard.
    """
    parallel = plan.parallel
    key = parallel.tensor, tensor_rank, plan.loss, parallel.context, parallel.expert
    if key not in graph.rank_kinds:
        kinds = graph.shard(parallel.tensor, tensor_rank, loss=plan.loss).kinds
        gathered = gathered_kinds(kinds, parallel.context or 1)
        graph.rank_kinds[key] = divided_kinds(gathered, parallel.expert_degree)
    return graph.rank_kinds[key]


def divided_kinds(kinds: Mapping[str, LayerKind], degree: int) -> dict[str, LayerKind]:
    """Layer kinds with `1 / degree` of their experts, whose passes exchange tokens."""
    if degree == 1:
        return dict(kinds)
    return {name: _divided(kind, degree) for name, kind in kinds.items()}


def _divided(kind: LayerKind, degree: int) -> LayerKind:
    experts = next((p.shape[0] for p in kind.parameters if p.expert), 0)
    if not experts:
        return kind
    divided = kind.with_costs(lambda cost: _divided_cost(cost, experts, degree))
    parameters = tuple(_divided_parameter(each, degree) for each in kind.parameters)
    return divided.model_copy(update={"parameters": parameters})


def _divided_parameter(parameter: ParameterInfo, degree: int) -> ParameterInfo:
    if not parameter.expert:
        return parameter
    experts, *rest = parameter.shape
    return parameter.model_copy(update={"shape": (experts // degree, *rest)})


def _divided_cost(cost: LayerCost, experts: int, degree: int) -> LayerCost:
    products = [op for op in cost.forward if op.name in _EXPERT_PRODUCTS]
    if not products:
        return cost
    # The first one reads all vectors, and its weights, whose bytes depend on no size.
    sent = products[0].read_bytes._replace(constant=0.0)
    repeated = cost.recompute
    return cost.model_copy(
        update={
            "forward": _with_exchange(cost.forward, sent, degree, experts),
            "backward": _with_exchange(cost.backward, sent, degree, 0),
            "recompute": repeated and _with_exchange(repeated, sent, degree, experts),
        }
    )


def _with_exchange(
    ops: tuple[Op, ...], sent: Polynomial, degree: int, counts: int
) -> tuple[Op, ...]:
    """The ops of a pass of one rank: tokens go to their experts before the first product and back.

    A backward pass that begins with recomputed ops sends tokens to their experts again.

    Args:
        ops: the ops of a rank that has all experts.
        sent: bytes of the vectors that all tokens send to their experts.
        counts: numbers of rows that the ranks tell each other first, one for each expert.
    """
    # Tensor-parallel ranks that hold whole experts of other stacks take part in the exchange.
    ops = tuple(op for op in ops if op.name != EXCHANGE)
    places = [index for index, op in enumerate(ops) if op.name in _EXPERT_PRODUCTS]
    if not places:
        return ops
    first, last = places[0], places[-1]
    again = next((index for index, op in enumerate(ops) if op.name == _ROWS), first) + 1
    if again < first:
        sent_again = _exchange(sent, ops[again - 1].live_bytes)
        ops, first, last = (*ops[:again], sent_again, *ops[again:]), first + 1, last + 1
    before = ops[first - 1].live_bytes if first else Polynomial()
    there = [_exchange(sent, before)]
    if counts:
        numbers = Polynomial(constant=float(_COUNT_BYTES * counts))
        there.insert(0, _exchange(numbers, before))
    divided = [_divided_op(op, degree) for op in ops]
    back = _exchange(sent, ops[last].live_bytes)
    return (*divided[:first], *there, *divided[first : last + 1], back, *divided[last + 1 :])


def _exchange(sent: Polynomial, before: Polynomial) -> Op:
    """An all-to-all of a buffer, and the copy that brings what arrives into the order of experts.

    Args:
        sent: bytes of the buffer.
        before: bytes that are alive before it.
    """
    return Op(
        name=EXCHANGE,
        kind="collective",
        read_bytes=sent.doubled,
        written_bytes=sent.doubled,
        live_bytes=before.plus(sent),
        collective=Collective("all_to_all", sent, "experts"),
        calls=2,
    )


def _divided_op(op: Op, degree: int) -> Op:
    """A product with `1 / degree` of the experts, each for `degree` times the tokens.

    Its shape may be that of one expert's product of which there are many, or of all rows at once.
    """
    if op.name not in _EXPERT_PRODUCTS or op.shape is None:
        return op
    batch, *sides = op.shape
    if batch.constant == 1:
        return op.model_copy(update=_bytes_of_fewer(op, degree))
    shape = (_scaled(batch, 1 / degree), *(_more_tokens(side, degree) for side in sides))
    return op.model_copy(
        update={
            "calls": max(1, op.calls // degree),
            "shape": MatmulShape._make(shape),
            **_bytes_of_fewer(op, degree),
        }
    )


def _bytes_of_fewer(op: Op, degree: int) -> dict[str, Polynomial]:
    """Bytes that a product moves of `1 / degree` of the experts."""
    return {
        "read_bytes": _fewer_weights(op.read_bytes, degree),
        "written_bytes": _fewer_weights(op.written_bytes, degree),
    }


def _more_tokens(side: Polynomial, degree: int) -> Polynomial:
    """The side of a product with each expert; the side of tokens depends on their number."""
    is_fixed = side == Polynomial(side.constant)
    return side if is_fixed else _scaled(side, degree)


def _fewer_weights(nbytes: Polynomial, degree: int) -> Polynomial:
    """Bytes of which the fixed part belongs to experts."""
    return nbytes._replace(constant=nbytes.constant / degree)


def _scaled(side: Polynomial, factor: float) -> Polynomial:
    return Polynomial(*(factor * coefficient for coefficient in side))
