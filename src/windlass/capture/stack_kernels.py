"""Graph of a transformer as another software stack computes it (this module does not import torch).

Windlass's own graphs list every ATen operation. Of other stacks only their kernels are known:
matrix products with their sides, attention, and element-wise kernels with the bytes that they read
and write, which depend on how much is fused. Letters: b micro-batch, s sequence, d width, h heads,
k key-value heads over heads, f feed-forward width, v vocabulary, t tensor-parallel degree.

Sources: Shoeybi et al. 2019, arXiv:1909.08053 (tensor parallelism); Korthikanti et al. 2022,
arXiv:2205.05198 (sequence parallelism, what a block saves); Dao 2023, arXiv:2307.08691 (attention).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile

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
    OpKind,
    ParameterInfo,
    Polynomial,
    Precision,
    Stack,
)

_MASKED_SHARE = 0.15
"""Share of positions that a masked model predicts. Source: Devlin et al. 2019, arXiv:1810.04805."""
_BYTES = 2
"""Bytes of an activation: bfloat16 or float16."""
_RESIDUAL_BYTES: dict[Fusion, float] = {"eager": 10, "fused": 10, "compiled": 8}
"""Bytes for each number of a residual sum and the norm after it, forward: each reads and writes; a
compiler reads and writes both results once."""
_RESIDUAL_GRADIENT_BYTES: dict[Fusion, float] = {"eager": 12, "fused": 12, "compiled": 8}
"""The same backward: a norm's gradient reads two numbers and writes one, and the gradients of both
branches are summed."""
_DROPOUT_BYTES: dict[Fusion, float] = {"eager": 5, "fused": 1, "compiled": 1}
"""Bytes for each number of a dropout: a mask, and the number itself where nothing is fused."""
_LOGIT_BYTES: dict[Fusion, tuple[float, float]] = {
    "eager": (20, 18), "fused": (46, 30), "compiled": (8, 8),
}  # fmt: skip
"""Bytes for each logit of the loss, forward and backward: the cast to float32, the softmax, and for
Megatron's vocabulary-parallel loss its maximum, difference, exponential and sum."""


@dataclass(frozen=True, slots=True)
class _Kernels:
    """The operations of a block's passes on one tensor-parallel rank."""

    config: TransformerConfig
    stack: Stack
    tensor: int
    float8: bool

    @property
    def whole(self) -> float:
        """Share of a token's numbers that a rank handles outside its products."""
        return 1.0 / self.tensor if self.stack.sequence_parallel else 1.0

    @property
    def attended(self) -> float:
        """Numbers of a token's queries, keys and values, `(1 + 2k) d / t`."""
        config = self.config
        return (1 + 2 * config.kv_heads / config.heads) * config.width / self.tensor

    @property
    def hidden(self) -> float:
        """Numbers of a token in the feed-forward part, `f / t`."""
        return self.config.ffn / self.tensor

    @property
    def widened(self) -> float:
        """Numbers of a token that the first feed-forward product gives: `f / t`, or twice that."""
        return self.hidden * (2 if self.config.activation == "swiglu" else 1)

    def linears(self) -> Iterator[tuple[str, float, float]]:
        """Name, columns and depth of a block's products in order."""
        width = float(self.config.width)
        yield "qkv", self.attended, width
        yield "projection", width, width / self.tensor
        yield "widen", self.widened, width
        yield "narrow", width, self.hidden

    def forward(self) -> Iterator[Op]:
        """Operations of a forward pass in order."""
        qkv, projection, widen, narrow = (
            self._product(name, wide, deep) for name, wide, deep in self.linears()
        )
        yield from self._casts(backward=False)
        yield from self._gather()
        yield from (qkv, self._copies())
        yield from self.attention()
        yield projection
        yield from self._scatter()
        yield self._residual()
        yield from self._gather()
        yield from (widen, self._activation(), narrow)
        yield from self._scatter()
        yield self._residual()

    def backward(self) -> Iterator[Op]:
        """Operations of a backward pass in order."""
        qkv, projection, widen, narrow = (
            tuple(self._gradient_products(*each)) for each in self.linears()
        )
        yield self._residual(backward=True)
        yield from self._gather()
        yield from (*narrow, self._activation(backward=True), *widen)
        yield from self._scatter()
        yield self._residual(backward=True)
        yield from self._gather()
        yield from projection
        yield from self.attention(backward=True)
        yield from (self._copies(), *qkv)
        yield from self._scatter()
        yield from self._casts(backward=True)

    def attention(self, *, backward: bool = False) -> Iterator[Op]:
        """Operations of attention between the projections."""
        config = self.config
        heads = config.heads / self.tensor
        head = config.width / config.heads
        if self.stack.attention != "unfused":
            flop = (10 if backward else 4) * heads * head
            keys = (self.attended - config.width / self.tensor) * _BYTES
            results = heads * head * _BYTES
            yield _op(
                "attention", "attention", Polynomial(bss=flop), calls=2 if backward else 1,
                read=keys + (4 if backward else 1) * results,
                written=results + 4 * heads + (results + keys if backward else 0),
                is_causal=config.causal,
            )  # fmt: skip
            return
        s = Polynomial(s=1)
        batch = Polynomial(b=heads)
        deep, flop = Polynomial(constant=head), 2 * heads * head
        scores, values = MatmulShape(batch, s, s, deep), MatmulShape(batch, s, deep, s)
        for shape in (scores, values, scores, values) if backward else (scores, values):
            yield _op("bmm", "matmul", Polynomial(bss=flop), shape=shape)
        each = 6 if backward else 4
        dropped = 5 if self.stack.dropout else 0
        eager = 3 * 4 if self.stack.fusion == "eager" else 0
        moved = Polynomial(bss=heads * (each + dropped + eager))
        yield _op("softmax", "memory", read=moved, calls=4 if self.stack.dropout else 3)

    def again(self) -> Iterator[Op]:
        """Operations that selective recompute repeats as a backward pass begins."""
        if self.stack.selective == "attention":
            yield from self.attention()
            return
        kept = ("attention",) if self.float8 else ("qkv", "widen", "attention")
        for op in self.until_narrow() if self.float8 else self.forward():
            if op.name not in kept and not (op.collective and op.collective.kind != "all_gather"):
                yield op

    def until_narrow(self) -> Iterator[Op]:
        """Operations of a forward pass whose results its backward pass needs."""
        return takewhile(lambda op: op.name != "narrow", self.forward())

    def saved(self, *, selective: bool) -> Polynomial:
        """Bytes that a block keeps for its backward pass, apart from its input and output."""
        config, d, t = self.config, self.config.width, self.tensor
        if selective and self.stack.selective == "products":
            # Outputs of attention and of every second product: queries, values, the first of the
            # feed-forward part. Products of 8-bit numbers are ops of another name, and repeated.
            values = d / t * config.kv_heads / config.heads
            products = 0.0 if self.float8 else d / t + values + self.hidden
            return Polynomial(bs=_BYTES * (d / t + products))
        inputs = 3 * _BYTES * d * self.whole
        masks = 2 * d * self.whole if self.stack.dropout else 0
        inside = _BYTES * (self.attended + d / t + self.widened + self.hidden)
        scores = 0.0
        if self.stack.attention == "unfused" and not selective:
            scores = config.heads / t * (5 if self.stack.dropout else 2)
        return Polynomial(bs=inputs + masks + inside, bss=scores)

    def sent(self) -> Polynomial:
        """Bytes of the output that one rank sends to the next stage: its part."""
        return Polynomial(bs=_BYTES * self.config.width / self.tensor)

    def working(self) -> float:
        """Bytes for each token that the fullest moment of a backward pass takes beyond that."""
        return _BYTES * (self.widened + self.hidden + 3 * self.config.width)

    def _product(self, name: str, wide: float, deep: float) -> Op:
        tokens = Polynomial(bs=1)
        shape = MatmulShape(
            Polynomial(constant=1), tokens, Polynomial(constant=wide), Polynomial(constant=deep)
        )
        return _op(
            name, "matmul", Polynomial(bs=2 * wide * deep), shape=shape,
            precision="float8" if self.float8 else None,
        )  # fmt: skip

    def _gradient_products(self, name: str, wide: float, deep: float) -> Iterator[Op]:
        """The gradient of a product's input, then that of its weight."""
        yield self._product(name, deep, wide)
        shape = MatmulShape(
            Polynomial(constant=1), Polynomial(constant=deep), Polynomial(constant=wide),
            Polynomial(bs=1),
        )  # fmt: skip
        yield _op(
            f"{name}_weight", "matmul", Polynomial(bs=2 * wide * deep), shape=shape,
            precision="float8" if self.float8 else None,
        )  # fmt: skip

    def _residual(self, *, backward: bool = False) -> Op:
        """Dropout, residual sum and norm after one branch."""
        fusion, dropped = self.stack.fusion, self.stack.dropout
        each = (_RESIDUAL_GRADIENT_BYTES if backward else _RESIDUAL_BYTES)[fusion]
        each += _DROPOUT_BYTES[fusion] if dropped else 0
        if self.config.ffn_bias and backward:
            each += _BYTES  # the bias's gradient sums over tokens
        calls = {"eager": 4, "fused": 2, "compiled": 1}[fusion]
        return self._moves("residual", each * self.config.width * self.whole, calls=calls)

    def _copies(self) -> Op:
        """Queries, keys and values in the layout of attention, rotated where positions are."""
        unfused = self.stack.attention == "unfused"
        copied = 2 * _BYTES * (self.attended + self.config.width / self.tensor) if unfused else 0.0
        if self.config.positions == "rotary":
            rounds = 3 if self.stack.fusion == "eager" else 1
            copied += 2 * _BYTES * rounds * self.attended
        calls = {"eager": 8, "fused": 4, "compiled": 1}[self.stack.fusion]
        return self._moves("copy", copied, calls=calls)

    def _activation(self, *, backward: bool = False) -> Op:
        moved = _BYTES * (self.widened + self.hidden) * (2 if backward else 1)
        if self.config.activation == "swiglu" and self.stack.fusion == "eager":
            moved += 2 * _BYTES * self.hidden * (2 if backward else 1)
        return self._moves("activation", moved, calls=2 if self.stack.fusion == "eager" else 1)

    def _casts(self, *, backward: bool) -> Iterator[Op]:
        """Factors of products that become 8-bit numbers."""
        if self.float8:
            width = self.config.width
            factors = 2 * width + width / self.tensor + self.hidden
            gradients = (2 * width + self.attended + self.widened) if backward else 0.0
            yield self._moves("cast", self.stack.cast_bytes * (factors + gradients), calls=4)

    def _gather(self) -> Iterator[Op]:
        if self.tensor > 1 and self.stack.sequence_parallel:
            width = 1 if self.float8 else _BYTES
            yield self._exchange("all_gather", width * self.config.width)

    def _scatter(self) -> Iterator[Op]:
        if self.tensor > 1:
            kind: CollectiveKind = (
                "reduce_scatter" if self.stack.sequence_parallel else "all_reduce"
            )
            yield self._exchange(kind, _BYTES * self.config.width)

    def _exchange(self, kind: CollectiveKind, token_bytes: float) -> Op:
        return _op(
            kind, "collective", collective=Collective(kind, Polynomial(bs=token_bytes)), calls=1
        )

    def _moves(self, name: str, token_bytes: float, *, calls: int = 1) -> Op:
        return _op(name, "memory", read=token_bytes, calls=calls)


def stack_graph(
    config: TransformerConfig,
    stack: Stack,
    degrees: Iterable[int] = (),
    *,
    predicted_share: float | None = None,
) -> Graph:
    """The graph of a transformer on another stack, whole and as one of t tensor-parallel shards.

    Args:
        config: the model.
        stack: the software that computes it.
        degrees: tensor-parallel degrees t; the graph also says which of them the model does not
            allow.
        predicted_share: share of the positions for which the head computes logits; None means all,
            or those that a masked model predicts.
    """
    several = {degree for degree in degrees if degree > 1}
    share = predicted_share or (1.0 if config.causal else _MASKED_SHARE)
    kinds = {degree: _kinds(config, stack, degree, share) for degree in {1, *several}}
    return Graph(
        name=config.name,
        vocabulary=config.vocabulary,
        max_sequence=config.sequence,
        layer_runs=(
            LayerRun(kind="embedding", count=1),
            LayerRun(kind="block", count=config.layers),
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


def _kinds(
    config: TransformerConfig, stack: Stack, tensor: int, predicted_share: float
) -> dict[str, LayerKind]:
    kinds = (
        _embedding(config, stack, tensor),
        _block(config, stack, tensor),
        _head(config, stack, tensor, predicted_share),
    )
    return {kind.name: kind for kind in kinds}


def _block(config: TransformerConfig, stack: Stack, tensor: int) -> LayerKind:
    plain = _Kernels(config, stack, tensor, float8=False)
    weights = tuple(
        ParameterInfo(name=f"{name}.weight", shape=(round(wide), round(deep)))
        for name, wide, deep in plain.linears()
    )
    norms = tuple(ParameterInfo(name=name, shape=(config.width,)) for name in ("norm", "ffn_norm"))
    biases: tuple[ParameterInfo, ...] = ()
    if config.ffn_bias:
        biases = tuple(
            ParameterInfo(name=f"{name}.bias", shape=(round(wide),))
            for name, wide, _ in plain.linears()
        )
    precisions: tuple[Precision, ...] = ("bfloat16", "float8")
    return LayerKind(
        name="block",
        parameters=(*weights, *biases, *norms),
        costs=tuple(_block_cost(config, stack, tensor, each, False) for each in precisions),
        selective_costs=tuple(
            _block_cost(config, stack, tensor, each, True) for each in precisions
        ),
    )


def _block_cost(
    config: TransformerConfig, stack: Stack, tensor: int, precision: Precision, selective: bool
) -> LayerCost:
    kernels = _Kernels(config, stack, tensor, float8=precision == "float8")
    again = kernels.again() if selective else ()
    boundary = Polynomial(bs=_BYTES * config.width * kernels.whole)
    cost = _cost(
        precision, kernels.forward(), chain(again, kernels.backward()),
        kernels.saved(selective=selective), boundary, kernels.working(), sent=kernels.sent(),
    )  # fmt: skip
    if not stack.recompute_stops_early:
        return cost
    return cost.model_copy(update={"recompute": tuple(kernels.until_narrow())})


def _embedding(config: TransformerConfig, stack: Stack, tensor: int) -> LayerKind:
    kernels = _Kernels(config, stack, tensor, float8=False)
    share = kernels.whole
    numbers = _BYTES * config.width * (2 + (1 if stack.dropout else 0) * share)
    ops = [_op("embedding", "memory", read=numbers, calls=3)]
    if tensor > 1:
        kind: CollectiveKind = "reduce_scatter" if stack.sequence_parallel else "all_reduce"
        ops.append(
            _op(
                kind,
                "collective",
                collective=Collective(kind, Polynomial(bs=_BYTES * config.width)),
            )
        )
    rows = -(-config.vocabulary // tensor)
    tables = [ParameterInfo(name="tokens.weight", shape=(rows, config.width))]
    if config.positions == "learned":
        tables.append(ParameterInfo(name="positions.weight", shape=(config.sequence, config.width)))
    output = Polynomial(bs=_BYTES * config.width * share)
    back = (_op("embedding_back", "memory", read=numbers, calls=2),)
    return LayerKind(
        name="embedding",
        parameters=tuple(tables),
        costs=tuple(
            _cost(each, ops, back, Polynomial(), output, 0.0, first=True, sent=kernels.sent())
            for each in _PRECISIONS
        ),
        is_embedding=True,
    )


_PRECISIONS: tuple[Precision, ...] = ("bfloat16", "float8")


def _head(config: TransformerConfig, stack: Stack, tensor: int, share: float) -> LayerKind:
    """Final norm, projection to the vocabulary and loss."""
    kernels = _Kernels(config, stack, tensor, float8=False)
    rows = -(-config.vocabulary // tensor)
    tokens, depth = Polynomial(bs=share), Polynomial(constant=config.width)
    columns, one = Polynomial(constant=rows), Polynomial(constant=1)
    flop = Polynomial(bs=2 * share * config.width * rows)
    norm = 4 * config.width * kernels.whole
    there, back = (share * rows * each for each in _LOGIT_BYTES[stack.fusion])
    exchange = Polynomial(bs=_BYTES * config.width * share)
    gathers: tuple[Op, ...] = ()
    sums: tuple[Op, ...] = ()
    if tensor > 1:
        kind: CollectiveKind = "reduce_scatter" if stack.sequence_parallel else "all_reduce"
        sums = (_op(kind, "collective", collective=Collective(kind, exchange)),)
        if stack.sequence_parallel:
            gathers = (
                _op("all_gather", "collective", collective=Collective("all_gather", exchange)),
            )
    product = MatmulShape(one, tokens, columns, depth)
    forward = (
        _op("norm", "memory", read=norm),
        *gathers,
        _op("logits", "matmul", flop, shape=product),
        _op(
            "loss",
            "memory",
            read=there,
            calls={"eager": 4, "fused": 9, "compiled": 2}[stack.fusion],
        ),
    )
    backward = (
        _op("loss", "memory", read=back, calls=3),
        _op("logits", "matmul", flop, shape=MatmulShape(one, tokens, depth, columns)),
        _op("logits_weight", "matmul", flop, shape=MatmulShape(one, depth, columns, tokens)),
        *sums,
        _op("norm", "memory", read=1.5 * norm),
    )
    tied = "0.tokens.weight" if config.tied_embeddings else None
    logits = Polynomial(bs=share * rows * (8 if stack.fusion != "compiled" else 6))
    return LayerKind(
        name="head",
        parameters=(
            ParameterInfo(name="norm", shape=(config.width,)),
            ParameterInfo(name="projection.weight", shape=(rows, config.width), tied_to=tied),
        ),
        costs=tuple(
            _cost(
                each, forward, backward, logits,
                Polynomial(constant=4),
                4.0 * share * rows,
                entrance=Polynomial(bs=_BYTES * config.width * kernels.whole),
            )
            for each in _PRECISIONS
        ),
    )  # fmt: skip


def _cost(
    precision: Precision, forward: Iterable[Op], backward: Iterable[Op], saved: Polynomial,
    output: Polynomial, working: float, *, first: bool = False, entrance: Polynomial | None = None,
    sent: Polynomial | None = None,
) -> LayerCost:  # fmt: skip
    """A layer's cost; every operation of a pass holds what the fullest does."""
    there = Polynomial(*map(sum, zip(saved, output, strict=True)))
    back = Polynomial(*map(sum, zip(saved, Polynomial(bs=working), strict=True)))
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


def _op(
    name: str, kind: OpKind, flop: Polynomial | None = None, *, read: Polynomial | float = 0.0,
    written: float = 0.0, shape: MatmulShape | None = None, collective: Collective | None = None,
    precision: Precision | None = None, calls: int = 1, is_causal: bool | None = None,
) -> Op:  # fmt: skip
    """An operation; a number of bytes is for each token."""
    return Op(
        name=name,
        kind=kind,
        flop=flop or Polynomial(),
        read_bytes=read if isinstance(read, Polynomial) else Polynomial(bs=read),
        written_bytes=Polynomial(bs=written),
        live_bytes=Polynomial(),
        shape=shape,
        collective=collective,
        calls=calls,
        precision=precision,
        is_causal=is_causal,
    )
