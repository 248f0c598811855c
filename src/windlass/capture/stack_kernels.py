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

from windlass.capture.feed_forward_kernels import FeedForwardKernels
from windlass.capture.kernel import ACTIVATION_BYTES, Linear, kernel
from windlass.models import TransformerConfig
from windlass.schema import (
    Collective,
    CollectiveKind,
    Fusion,
    MatmulShape,
    Op,
    Polynomial,
    Precision,
    Stack,
)

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
    precision: Precision | None = None
    """What the factors of linear layers are narrowed to; None for activations' own numbers."""
    adapter: int | None = None
    """Rank of the adapters beside frozen linear layers; None trains these."""

    @property
    def whole(self) -> float:
        """Share of a token's numbers that a rank handles outside its products."""
        return 1.0 / self.tensor if self.stack.sequence_parallel else 1.0

    @property
    def attended(self) -> float:
        """Numbers of a token's queries, keys and values, `(h + 2g) k / t`."""
        config, latent = self.config, self.config.latent
        if latent is not None:
            return config.heads * (2 * latent.head_width + latent.value_width) / self.tensor
        return (config.heads + 2 * config.kv_heads) * config.head_width / self.tensor

    @property
    def mixed(self) -> float:
        """Numbers of a token that attention gives, `h k / t`."""
        latent = self.config.latent
        width = latent.value_width if latent is not None else self.config.head_width
        return self.config.heads * width / self.tensor

    @property
    def feed_forward(self) -> FeedForwardKernels:
        """Those of its second part."""
        return FeedForwardKernels(self.config, self.stack, self.tensor, self.adapter)

    def linears(self) -> tuple[Linear, ...]:
        """A block's linear layers in order."""
        return (*self._into_attention(), self._projection(), *self.feed_forward.linears())

    def _into_attention(self) -> tuple[Linear, ...]:
        """Linear layers that give queries, keys and values."""
        width, latent = float(self.config.width), self.config.latent
        if latent is None:
            return (Linear(name="qkv", wide=self.attended, deep=width, adapter=self.adapter),)
        heads = self.config.heads / self.tensor
        keys = latent.key_rank
        layers = [
            Linear(name="keys_down", wide=float(keys + latent.rotary_width), deep=width),
            Linear(name="keys", wide=heads * (latent.plain_width + latent.value_width), deep=keys),
        ]
        queries = heads * latent.head_width
        if latent.query_rank is None:
            return (Linear(name="queries", wide=queries, deep=width), *layers)
        rank = float(latent.query_rank)
        down = Linear(name="queries_down", wide=rank, deep=width)
        return (down, Linear(name="queries", wide=queries, deep=rank), *layers)

    def _projection(self) -> Linear:
        width = float(self.config.width)
        return Linear(name="projection", wide=width, deep=self.mixed, adapter=self.adapter)

    def forward(self) -> Iterator[Op]:
        """Operations of a forward pass in order."""
        yield from self._casts(backward=False)
        yield from self._gather()
        for each in self._into_attention():
            yield from each.forward(self.precision)
        yield self._copies()
        yield from self.attention()
        yield from self._projection().forward(self.precision)
        yield from self._scatter()
        yield self._residual()
        yield from self._among_ranks(self.feed_forward.forward(self.precision))
        yield self._residual()

    def backward(self) -> Iterator[Op]:
        """Operations of a backward pass in order."""
        yield self._residual(backward=True)
        yield from self._among_ranks(self.feed_forward.backward(self.precision))
        yield self._residual(backward=True)
        yield from self._gather()
        yield from self._projection().backward(self.precision)
        yield from self.attention(backward=True)
        yield self._copies()
        for each in reversed(self._into_attention()):
            yield from each.backward(self.precision)
        yield from self._scatter()
        yield from self._casts(backward=True)

    def attention(self, *, backward: bool = False) -> Iterator[Op]:
        """Operations of attention between the projections."""
        config, latent = self.config, self.config.latent
        heads = config.heads / self.tensor
        head = config.head_width if latent is None else latent.mean_width
        if self.stack.attention != "unfused":
            flop = (10 if backward else 4) * heads * head
            keys = (self.attended - self.mixed) * ACTIVATION_BYTES
            results = heads * head * ACTIVATION_BYTES
            yield kernel(
                "attention", "attention", self._scored(flop), calls=2 if backward else 1,
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
        kept = ("attention",) if self.precision else ("qkv", "widen", "attention")
        for op in self.until_narrow() if self.precision else self.forward():
            if op.name not in kept and not (op.collective and op.collective.kind != "all_gather"):
                yield op

    def until_narrow(self) -> Iterator[Op]:
        """Operations of a forward pass whose results its backward pass needs."""
        last = next(reversed(list(self.feed_forward.forward(None)))).name
        return takewhile(lambda op: op.name != last, self.forward())

    def saved(self, *, selective: bool) -> Polynomial:
        """Bytes that a block keeps for its backward pass, apart from its input and output."""
        config, d, t = self.config, self.config.width, self.tensor
        if selective and self.stack.selective == "products":
            # Outputs of attention and of every second product: queries, values, the first of the
            # feed-forward part. Products of 8-bit numbers are ops of another name, and repeated.
            values = config.kv_heads * config.head_width / t
            products = 0.0 if self.precision else self.mixed + values + config.ffn / t
            return Polynomial(bs=ACTIVATION_BYTES * (self.mixed + products))
        inputs = 3 * ACTIVATION_BYTES * d * self.whole
        masks = 2 * d * self.whole if self.stack.dropout else 0
        inside = ACTIVATION_BYTES * (self.attended + self.mixed + self.feed_forward.saved)
        scores = 0.0
        if self.stack.attention == "unfused" and not selective:
            scores = config.heads / t * (5 if self.stack.dropout else 2)
        return Polynomial(bs=inputs + masks + inside, bss=scores)

    def sent(self) -> Polynomial:
        """Bytes of the output that one rank sends to the next stage: its part."""
        return Polynomial(bs=ACTIVATION_BYTES * self.config.width / self.tensor)

    def working(self) -> float:
        """Bytes for each token that the fullest moment of a backward pass takes beyond that."""
        return ACTIVATION_BYTES * (self.feed_forward.saved + 3 * self.config.width)

    def _scored(self, flop: float) -> Polynomial:
        """FLOP of attention, `flop` for each pair of tokens, of which a causal mask hides half."""
        window = self.config.sliding_window
        if window is None or 2 * window >= self.config.sequence:
            return Polynomial(bss=flop)
        return Polynomial(bs=2 * window * flop)

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

    def _casts(self, *, backward: bool) -> Iterator[Op]:
        """Factors of products that become 8-bit or 4-bit numbers."""
        if self.precision:
            width, second = self.config.width, self.feed_forward
            factors = width + width / self.tensor + second.narrowed
            gradients = 0.0
            if backward:
                gradients = width + self.attended + second.narrowed_gradients
            yield self._moves("cast", self.stack.cast_bytes * (factors + gradients), calls=4)

    def _among_ranks(self, ops: Iterator[Op]) -> Iterator[Op]:
        """Operations of the feed-forward part with the exchanges of tensor-parallel ranks."""
        if not self.feed_forward.exchanges_tokens:
            yield from ops
            return
        yield from self._gather()
        yield from ops
        yield from self._scatter()

    def _gather(self) -> Iterator[Op]:
        if self.tensor > 1 and self.stack.sequence_parallel:
            width = 1 if self.precision == "float8" else ACTIVATION_BYTES
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
