"""Graph of a transformer as another software stack computes it (this module does not import torch).

Blocks are those of `stack_kernels`, whose letters and sources hold here too.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import NamedTuple

from windlass.capture.kernel import ACTIVATION_BYTES, kernel
from windlass.capture.stack_kernels import BlockKernels
from windlass.models import TransformerConfig
from windlass.schema import (
    Collective,
    CollectiveKind,
    Fusion,
    Graph,
    LayerCost,
    LayerKind,
    LayerRun,
    MatmulShape,
    Op,
    ParameterInfo,
    Polynomial,
    Precision,
    Stack,
)

_MASKED_SHARE = 0.15
"""Share of positions that a masked model predicts. Source: Devlin et al. 2019, arXiv:1810.04805."""
_LOGIT_BYTES: dict[Fusion, tuple[float, float]] = {
    "eager": (20, 18), "fused": (46, 30), "compiled": (8, 8),
}  # fmt: skip
"""Bytes for each logit of the loss, forward and backward: the cast to float32, the softmax, and for
Megatron's vocabulary-parallel loss its maximum, difference, exponential and sum."""


def stack_graph(
    config: TransformerConfig,
    stack: Stack,
    degrees: Iterable[int] = (),
    *,
    predicted_share: float | None = None,
    adapter: int | None = None,
) -> Graph:
    """The graph of a transformer on another stack, whole and as one of t tensor-parallel shards.

    Args:
        degrees: tensor-parallel degrees t; the graph also says which of them the model does not
            allow.
        predicted_share: share of the positions for which the head computes logits; None means all,
            or those that a masked model predicts.
        adapter: rank of the adapters of all linear layers of dense blocks, which alone are trained;
            None trains all weights.
    """
    several = {degree for degree in degrees if degree > 1}
    share = predicted_share or (1.0 if config.causal else _MASKED_SHARE)
    blocks = _blocks(config)
    kinds = {
        degree: _kinds(config, blocks, _Rank(stack, degree, adapter), share)
        for degree in {1, *several}
    }
    names = {block: name for name, block in blocks.items()}
    order = groupby(names[config.of_block(index)] for index in range(config.layers))
    return Graph(
        name=config.name,
        vocabulary=config.vocabulary,
        max_sequence=config.sequence,
        layer_runs=(
            LayerRun(kind="embedding", count=1),
            *(LayerRun(kind=kind, count=len(list(run))) for kind, run in order),
            LayerRun(kind="head", count=1),
        ),
        kinds=kinds[1],
        tensor_shards={degree: kinds[degree] for degree in several},
        unshardable={
            degree: errors
            for degree in several
            if (errors := tuple(_degree_errors(config, degree)))
        },
    )


def _degree_errors(config: TransformerConfig, degree: int) -> Iterator[str]:
    """Why heads cannot be divided over a tensor-parallel degree."""
    for name in ("heads", "kv_heads"):
        count = getattr(config, name)
        if count % degree:
            yield f"`{config.name}` has {count} `{name}`, which {degree} does not divide; lower it"
            return


def _precisions(stack: Stack) -> tuple[Precision, ...]:
    """The precisions whose kernels differ, of those that a stack has."""
    four_bits: tuple[Precision, ...] = ("float4",) if "float4" in stack.can.precisions else ()
    return ("bfloat16", "float8", *four_bits)


def _blocks(config: TransformerConfig) -> dict[str, TransformerConfig]:
    """The kinds of blocks by name: with experts or not, with a sliding window or not."""
    kinds = dict.fromkeys(config.of_block(index) for index in range(config.layers))
    return {f"block{number or ''}": block for number, block in enumerate(kinds)}


class _Rank(NamedTuple):
    """What computes a layer: a stack's tensor-parallel rank, with adapters of a rank or without."""

    stack: Stack
    tensor: int
    adapter: int | None

    def kernels(
        self, config: TransformerConfig, precision: Precision | None = None
    ) -> BlockKernels:
        return BlockKernels(config, self.stack, self.tensor, precision, self.adapter)

    def frozen(self, *parameters: ParameterInfo) -> tuple[ParameterInfo, ...]:
        """Parameters that are no adapters, which are not trained beside any."""
        if self.adapter is None:
            return parameters
        return tuple(each.model_copy(update={"frozen": True}) for each in parameters)


def _kinds(
    config: TransformerConfig,
    blocks: Mapping[str, TransformerConfig],
    rank: _Rank,
    predicted_share: float,
) -> dict[str, LayerKind]:
    kinds = (
        _embedding(config, rank),
        *(_block(name, block, rank) for name, block in blocks.items()),
        _head(config, rank, predicted_share),
    )
    return {kind.name: kind for kind in kinds}


def _block(name: str, config: TransformerConfig, rank: _Rank) -> LayerKind:
    stack, plain = rank.stack, rank.kernels(config)
    weights = chain.from_iterable(each.parameters() for each in plain.linears())
    norms = tuple(ParameterInfo(name=name, shape=(config.width,)) for name in ("norm", "ffn_norm"))
    biases: tuple[ParameterInfo, ...] = ()
    if config.ffn_bias:
        biases = tuple(
            ParameterInfo(name=f"{each.name}.bias", shape=(round(each.wide),))
            for each in plain.linears()
        )
    return LayerKind(
        name=name,
        parameters=(*weights, *rank.frozen(*biases, *norms)),
        is_hidden=True,
        costs=tuple(_block_cost(config, rank, each, False) for each in _precisions(stack)),
        selective_costs=tuple(_block_cost(config, rank, each, True) for each in _precisions(stack)),
    )


def _block_cost(
    config: TransformerConfig, rank: _Rank, precision: Precision, selective: bool
) -> LayerCost:
    kernels = rank.kernels(config, None if precision == "bfloat16" else precision)
    again = kernels.again() if selective else ()
    boundary = Polynomial(bs=ACTIVATION_BYTES * config.width * kernels.whole)
    cost = _cost(
        precision, kernels.forward(), chain(again, kernels.backward()),
        kernels.saved(selective=selective), boundary, kernels.working(), sent=kernels.sent(),
    )  # fmt: skip
    if not rank.stack.recompute_stops_early:
        return cost
    return cost.model_copy(update={"recompute": tuple(kernels.until_narrow())})


def _embedding(config: TransformerConfig, rank: _Rank) -> LayerKind:
    stack, tensor, kernels = rank.stack, rank.tensor, rank.kernels(config)
    share = kernels.whole
    numbers = ACTIVATION_BYTES * config.width * (2 + (1 if stack.dropout else 0) * share)
    ops = [kernel("embedding", "memory", read=numbers, calls=3)]
    if tensor > 1:
        kind: CollectiveKind = "reduce_scatter" if stack.sequence_parallel else "all_reduce"
        ops.append(
            kernel(
                kind,
                "collective",
                collective=Collective(kind, Polynomial(bs=ACTIVATION_BYTES * config.width)),
            )
        )
    rows = -(-config.vocabulary // tensor)
    tables = [ParameterInfo(name="tokens.weight", shape=(rows, config.width))]
    if config.positions == "learned":
        tables.append(ParameterInfo(name="positions.weight", shape=(config.sequence, config.width)))
    output = Polynomial(bs=ACTIVATION_BYTES * config.width * share)
    back = (kernel("embedding_back", "memory", read=numbers, calls=2),)
    return LayerKind(
        name="embedding",
        parameters=rank.frozen(*tables),
        costs=tuple(
            _cost(each, ops, back, Polynomial(), output, 0.0, first=True, sent=kernels.sent())
            for each in _precisions(stack)
        ),
        is_embedding=True,
    )


def _head(config: TransformerConfig, rank: _Rank, share: float) -> LayerKind:
    """Final norm, projection to the vocabulary and loss."""
    stack, tensor, kernels = rank.stack, rank.tensor, rank.kernels(config)
    rows = -(-config.vocabulary // tensor)
    tokens, depth = Polynomial(bs=share), Polynomial(constant=config.width)
    columns, one = Polynomial(constant=rows), Polynomial(constant=1)
    flop = Polynomial(bs=2 * share * config.width * rows)
    norm = 4 * config.width * kernels.whole
    there, back = (share * rows * each for each in _LOGIT_BYTES[stack.fusion])
    exchange = Polynomial(bs=ACTIVATION_BYTES * config.width * share)
    gathers: tuple[Op, ...] = ()
    sums: tuple[Op, ...] = ()
    if tensor > 1:
        kind: CollectiveKind = "reduce_scatter" if stack.sequence_parallel else "all_reduce"
        sums = (kernel(kind, "collective", collective=Collective(kind, exchange)),)
        if stack.sequence_parallel:
            gathers = (
                kernel("all_gather", "collective", collective=Collective("all_gather", exchange)),
            )
    product = MatmulShape(one, tokens, columns, depth)
    by_weight = MatmulShape(one, depth, columns, tokens)
    weights = (
        (kernel("logits_weight", "matmul", flop, shape=by_weight),) if rank.adapter is None else ()
    )
    forward = (
        kernel("norm", "memory", read=norm),
        *gathers,
        kernel("logits", "matmul", flop, shape=product),
        kernel(
            "loss",
            "memory",
            read=there,
            calls={"eager": 4, "fused": 9, "compiled": 2}[stack.fusion],
        ),
    )
    backward = (
        kernel("loss", "memory", read=back, calls=3),
        kernel("logits", "matmul", flop, shape=MatmulShape(one, tokens, depth, columns)),
        *weights,
        *sums,
        kernel("norm", "memory", read=1.5 * norm),
    )
    tied = "0.tokens.weight" if config.tied_embeddings else None
    logits = Polynomial(bs=share * rows * (8 if stack.fusion != "compiled" else 6))
    return LayerKind(
        name="head",
        parameters=rank.frozen(
            ParameterInfo(name="norm", shape=(config.width,)),
            ParameterInfo(name="projection.weight", shape=(rows, config.width), tied_to=tied),
        ),
        costs=tuple(
            _cost(
                each, forward, backward, logits,
                Polynomial(constant=4),
                4.0 * share * rows,
                entrance=Polynomial(bs=ACTIVATION_BYTES * config.width * kernels.whole),
            )
            for each in _precisions(stack)
        ),
    )  # fmt: skip


def _cost(
    precision: Precision, forward: Iterable[Op], backward: Iterable[Op], saved: Polynomial,
    output: Polynomial, working: float, *, first: bool = False, entrance: Polynomial | None = None,
    sent: Polynomial | None = None,
) -> LayerCost:  # fmt: skip
    """A layer's cost; every operation of a pass holds what the fullest does."""
    there = saved.plus(output)
    back = saved.plus(Polynomial(bs=working))
    return LayerCost(
        precision=precision,
        compiled=False,
        forward=tuple(op.model_copy(update={"live_bytes": there}) for op in forward),
        backward=tuple(op.model_copy(update={"live_bytes": back}) for op in backward),
        saved_bytes=saved,
        input_bytes=Polynomial(bs=8) if first else entrance or output,
        output_bytes=output,
        sent_bytes=sent,
    )
