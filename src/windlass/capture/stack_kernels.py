"""Kernels of a transformer block on another software stack (this module does not import torch).

Windlass's own graphs list every ATen operation. Other stacks are known by their kernels only:
matrix products with their sides, attention, and element-wise kernels with the bytes that they read
and write, which depend on how much is fused. Letters: b micro-batch, s sequence, d width, h heads,
k key-value heads over heads, f feed-forward width, v vocabulary, t tensor-parallel degree.

Sources: Shoeybi et al. 2019, arXiv:1909.08053 (tensor parallelism); Korthikanti et al. 2022,
arXiv:2205.05198 (sequence parallelism, what a block saves); Dao 2023, arXiv:2307.08691 (attention).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from windlass.models import TransformerConfig
from windlass.schema import (
    Collective,
    CollectiveKind,
    Fusion,
    MatmulShape,
    Op,
    OpKind,
    Polynomial,
    Precision,
    Stack,
)

ACTIVATION_BYTES = 2
"""Bytes of an activation: bfloat16 or float16."""
_RESIDUAL_BYTES: dict[Fusion, float] = {"eager": 10, "fused": 10, "compiled": 8}
"""Bytes for each number of a residual sum and the norm after it, forward: each reads and writes; a
compiler reads and writes both results once."""
_RESIDUAL_GRADIENT_BYTES: dict[Fusion, float] = {"eager": 12, "fused": 12, "compiled": 8}
"""The same backward: a norm's gradient reads two numbers and writes one, and the gradients of both
branches are summed."""
_DROPOUT_BYTES: dict[Fusion, float] = {"eager": 5, "fused": 1, "compiled": 1}
"""Bytes for each number of a dropout: a mask, and the number itself where nothing is fused."""


@dataclass(frozen=True, slots=True)
class BlockKernels:
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
        """Numbers of a token's queries, keys and values, `(h + 2g) k / t`."""
        config = self.config
        return (config.heads + 2 * config.kv_heads) * config.head_width / self.tensor

    @property
    def mixed(self) -> float:
        """Numbers of a token that attention gives, `h k / t`."""
        return self.config.query_width / self.tensor

    @property
    def hidden(self) -> float:
        """Numbers of a token in the feed-forward part, `f / t`."""
        return self.config.ffn / self.tensor

    @property
    def widened(self) -> float:
        """Numbers of a token that the first feed-forward product gives: `f / t`, or twice that."""
        return self.hidden * (2 if self.config.is_gated else 1)

    def linears(self) -> Iterator[tuple[str, float, float]]:
        """Name, columns and depth of a block's products in order."""
        width = float(self.config.width)
        yield "qkv", self.attended, width
        yield "projection", width, self.mixed
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
        head = config.head_width
        if self.stack.attention != "unfused":
            flop = (10 if backward else 4) * heads * head
            keys = (self.attended - self.mixed) * ACTIVATION_BYTES
            results = heads * head * ACTIVATION_BYTES
            yield kernel(
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
            yield kernel("bmm", "matmul", Polynomial(bss=flop), shape=shape)
        each = 6 if backward else 4
        dropped = 5 if self.stack.dropout else 0
        eager = 3 * 4 if self.stack.fusion == "eager" else 0
        moved = Polynomial(bss=heads * (each + dropped + eager))
        yield kernel("softmax", "memory", read=moved, calls=4 if self.stack.dropout else 3)

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
            values = config.kv_heads * config.head_width / t
            products = 0.0 if self.float8 else self.mixed + values + self.hidden
            return Polynomial(bs=ACTIVATION_BYTES * (self.mixed + products))
        inputs = 3 * ACTIVATION_BYTES * d * self.whole
        masks = 2 * d * self.whole if self.stack.dropout else 0
        inside = ACTIVATION_BYTES * (self.attended + self.mixed + self.widened + self.hidden)
        scores = 0.0
        if self.stack.attention == "unfused" and not selective:
            scores = config.heads / t * (5 if self.stack.dropout else 2)
        return Polynomial(bs=inputs + masks + inside, bss=scores)

    def sent(self) -> Polynomial:
        """Bytes of the output that one rank sends to the next stage: its part."""
        return Polynomial(bs=ACTIVATION_BYTES * self.config.width / self.tensor)

    def working(self) -> float:
        """Bytes for each token that the fullest moment of a backward pass takes beyond that."""
        return ACTIVATION_BYTES * (self.widened + self.hidden + 3 * self.config.width)

    def _product(self, name: str, wide: float, deep: float) -> Op:
        tokens = Polynomial(bs=1)
        shape = MatmulShape(
            Polynomial(constant=1), tokens, Polynomial(constant=wide), Polynomial(constant=deep)
        )
        return kernel(
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
        yield kernel(
            f"{name}_weight", "matmul", Polynomial(bs=2 * wide * deep), shape=shape,
            precision="float8" if self.float8 else None,
        )  # fmt: skip

    def _residual(self, *, backward: bool = False) -> Op:
        """Dropout, residual sum and norm after one branch."""
        fusion, dropped = self.stack.fusion, self.stack.dropout
        each = (_RESIDUAL_GRADIENT_BYTES if backward else _RESIDUAL_BYTES)[fusion]
        each += _DROPOUT_BYTES[fusion] if dropped else 0
        if self.config.ffn_bias and backward:
            each += ACTIVATION_BYTES  # the bias's gradient sums over tokens
        calls = {"eager": 4, "fused": 2, "compiled": 1}[fusion]
        return self._moves("residual", each * self.config.width * self.whole, calls=calls)

    def _copies(self) -> Op:
        """Queries, keys and values in the layout of attention, rotated where positions are."""
        unfused = self.stack.attention == "unfused"
        copied = (
            2 * ACTIVATION_BYTES * (self.attended + self.config.width / self.tensor)
            if unfused
            else 0.0
        )
        if self.config.positions == "rotary":
            rounds = 3 if self.stack.fusion == "eager" else 1
            copied += 2 * ACTIVATION_BYTES * rounds * self.attended
        calls = {"eager": 8, "fused": 4, "compiled": 1}[self.stack.fusion]
        return self._moves("copy", copied, calls=calls)

    def _activation(self, *, backward: bool = False) -> Op:
        moved = ACTIVATION_BYTES * (self.widened + self.hidden) * (2 if backward else 1)
        if self.config.is_gated and self.stack.fusion == "eager":
            moved += 2 * ACTIVATION_BYTES * self.hidden * (2 if backward else 1)
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
            width = 1 if self.float8 else ACTIVATION_BYTES
            yield self._exchange("all_gather", width * self.config.width)

    def _scatter(self) -> Iterator[Op]:
        if self.tensor > 1:
            kind: CollectiveKind = (
                "reduce_scatter" if self.stack.sequence_parallel else "all_reduce"
            )
            yield self._exchange(kind, ACTIVATION_BYTES * self.config.width)

    def _exchange(self, kind: CollectiveKind, token_bytes: float) -> Op:
        return kernel(
            kind, "collective", collective=Collective(kind, Polynomial(bs=token_bytes)), calls=1
        )

    def _moves(self, name: str, token_bytes: float, *, calls: int = 1) -> Op:
        return kernel(name, "memory", read=token_bytes, calls=calls)


def kernel(
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
