"""The modules of a transformer as one tensor-parallel rank runs them.

They mirror `models.modules`, `models.tensor_parallel.parallel_modules` and the shards of
`models.tensor_parallel.shard_params`, expression by expression: a variable that holds a tensor
longer, or an argument that is replaced, changes the memory that is counted.
"""

from collections.abc import Sequence

from windlass.capture.analytic import products
from windlass.capture.analytic.collectives import (
    Rank,
    all_gather,
    all_reduce,
    all_reduce_identity_grad,
    all_reduce_max,
    reduce_scatter,
)
from windlass.capture.analytic.elementwise import (
    add,
    arange,
    bitwise_not,
    bitwise_or,
    cast,
    compare,
    div,
    divide,
    dropout,
    exp,
    gelu,
    log,
    masked_fill,
    mul,
    rsqrt,
    scale,
    shift,
    silu,
    square,
    sub,
    tanh,
    unary,
)
from windlass.capture.analytic.reductions import (
    amax_last,
    mean_last,
    sum_all,
    sum_last,
    var_mean_last,
)
from windlass.capture.analytic.scope import Scope
from windlass.capture.analytic.sparse_weights import BlockWeight, LinearName, Weight, new_weight
from windlass.capture.analytic.tensor import Tensor
from windlass.capture.analytic.views import (
    cat,
    clone,
    flatten,
    narrow,
    reshape,
    select,
    split,
    squeeze,
    stack,
    transpose,
    unbind,
    unsqueeze,
)
from windlass.models import ShardingRule, TransformerConfig


class Norm:
    """The normalisation over d that the configuration asks for.

    Args:
        scope: of the norm.
        full: whether each rank has all features, as in the first layer.
    """

    def __init__(self, scope: Scope, *, full: bool = False) -> None:
        make = scope.parameter if full else scope.feature_parameter
        self.rank = Rank() if full else scope.rank
        if not full:
            scope.feature_paths.append(scope.path)
        width = (scope.config.width,)
        self.weight = make("weight", width)
        self.is_layer_norm = scope.config.norm == "layer"
        has_bias = self.is_layer_norm and scope.config.norm_bias
        self.bias = make("bias", width) if has_bias else None
        self.is_centered = scope.config.norm == "zero_centered_rms"

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of `[b s d]`."""
        if self.rank.columns > 1:
            return self._sharded(x) if self.is_layer_norm else self._sharded_rms(x)
        if not self.is_layer_norm:
            return rms_norm(x, self.weight, is_centered=self.is_centered)
        return products.layer_norm(x, self.weight, self.bias)

    def _sharded(self, x: Tensor) -> Tensor:
        wide = cast(x, "float32")
        var, mean = var_mean_last(wide)
        moments = stack((var, mean, square(mean)), 2)
        var, mean, squared = unbind(divide(all_reduce(moments, self.rank.feature_group)), 2)
        var = sub(add(var, squared), square(mean))
        normed = mul(sub(wide, unsqueeze(mean, 2)), unsqueeze(rsqrt(shift(var)), 2))
        return self._shifted(cast(normed, x.dtype))

    def _shifted(self, x: Tensor) -> Tensor:
        x = mul(x, self.weight)
        return x if self.bias is None else add(x, self.bias)

    def _sharded_rms(self, x: Tensor) -> Tensor:
        if self.is_centered:
            return cast(mul(self._normed(x), shift(cast(self.weight, "float32"))), x.dtype)
        return mul(cast(self._normed(x), x.dtype), self.weight)

    def _normed(self, x: Tensor) -> Tensor:
        wide = cast(x, "float32")
        local = mean_last(square(wide))
        squared = divide(all_reduce(local, self.rank.feature_group))
        return mul(wide, rsqrt(shift(squared)))


def rms_norm(x: Tensor, weight: Tensor, *, is_centered: bool) -> Tensor:
    """The RMS norm over the last dimension, whose weight may be stored less 1."""
    if not is_centered:
        return products.rms_norm(x, weight)
    weight = shift(cast(weight, "float32"))
    normed = products.rms_norm(cast(x, "float32"), weight)
    return cast(normed, x.dtype)


class Column:
    """A column-parallel linear.

    Args:
        scope: of the linear.
        name: which of a block's it is.
        parts: features of all ranks, by part that is shared by itself.
        unit: features that stay together.
        bias: whether it has one.
        divides: whether all ranks of a grid share its outputs, or only the rows do.
    """

    def __init__(
        self, scope: Scope, name: LinearName, parts: Sequence[int], unit: int, *, bias: bool,
        divides: bool,
    ) -> None:  # fmt: skip
        self.rank, self.divides = scope.rank, divides
        rows, degree = scope.rank.rows, scope.rank.degree
        outputs = sum(parts)
        rule = ShardingRule(style="column", parts=tuple(parts), unit=unit)
        scope.share(rule, outputs, degree if divides else rows)
        scope.feature_paths.append(scope.path)
        self.weight = new_weight(scope, name, rule, (outputs, scope.config.width))
        self.bias = None
        if bias:
            self.bias = scope.parameter(
                "bias",
                (outputs // (degree if divides else rows),),
                sharded=0,
                replicated_over=None if divides else "features",
            )

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s d/c]` to `[b s f/t]`, or `[b s f/r]` if each rank has all of its row."""
        if self.rank.columns == 1:
            return self.weight.product(x, self.bias)
        reduce = reduce_scatter if self.divides else all_reduce
        y = reduce(self.weight.product(x, None), self.rank.feature_group)
        return y if self.bias is None else add(y, self.bias)


class Row:
    """A row-parallel linear back to d; its arguments are those of `Column`, with its inputs."""

    def __init__(
        self, scope: Scope, name: LinearName, inputs: int, unit: int, *, bias: bool, divides: bool
    ) -> None:
        self.rank, self.divides = scope.rank, divides
        rule = ShardingRule(style="row", unit=unit)
        scope.share(rule, inputs, scope.rank.degree if divides else scope.rank.rows)
        scope.feature_paths.append(scope.path)
        width = scope.config.width
        self.weight = new_weight(scope, name, rule, (width, inputs))
        self.bias = scope.feature_parameter("bias", (width,)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s f/t]` to a partial sum of `[b s d/c]`."""
        if self.rank.degree == 1 or not isinstance(self.weight, Weight):
            return self.weight.product(x, self.bias)
        bias = None if self.bias is None else scale(self.bias)
        gathers = self.rank.columns > 1 and self.divides
        full = all_gather(x, self.rank.feature_group) if gathers else x
        return self.weight.product(full, bias)


class FeatureLinear:
    """A linear from d to d outside of regions, as in BERT's head."""

    def __init__(self, scope: Scope, *, bias: bool) -> None:
        self.rank, width = scope.rank, scope.config.width
        scope.feature_paths.append(scope.path)
        self.weight = scope.feature_parameter("weight", (width, width))
        self.bias = scope.feature_parameter("bias", (width,)) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to `[b s/r d/c]`."""
        if self.rank.columns == 1:
            return products.linear(x, self.weight, self.bias)
        y = reduce_scatter(products.linear(x, self.weight, None), self.rank.feature_group)
        return y if self.bias is None else add(y, self.bias)


class Attention:
    """Multi-head self-attention."""

    def __init__(self, scope: Scope) -> None:
        config, rank = scope.config, scope.rank
        divides = config.heads % rank.degree == 0 and config.kv_heads % rank.degree == 0
        self.rank = rank
        self.head_width = config.head_width
        self.rotated, self.scaling = config.rotated_width, config.rope_scaling
        self.causal, self.window = config.causal, config.sliding_window
        self.softcap = config.attention_softcap
        self.is_centered = config.norm == "zero_centered_rms"
        self.head_counts = [
            heads // (rank.degree if divides else rank.rows)
            for heads in (config.heads, config.kv_heads, config.kv_heads)
        ]
        unit, bias = config.head_width, config.attention_bias
        widths = [heads * unit for heads in (config.heads, config.kv_heads, config.kv_heads)]
        inner = scope.inner("input")
        self.input = Column(inner, "attention", widths, unit, bias=bias, divides=divides)
        self.norms = [
            scope.inner(name).parameter("weight", (config.head_width,))
            for name in (("query_norm", "key_norm") if config.qk_norm else ())
        ]
        inner, bias = scope.inner("output"), config.has_projection_bias
        self.output = Row(inner, "projection", widths[0], unit, bias=bias, divides=divides)

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to the same; the tokens are gathered, and scattered again."""
        full = all_gather(x, self.rank.token_group)
        y = self._forward(full)
        return reduce_scatter(y, self.rank.token_group)

    def _forward(self, x: Tensor) -> Tensor:
        parts = split(self.input(x), [heads * self.head_width for heads in self.head_counts], 2)
        query, key, value = (
            reshape(part, (*part.shape[:2], heads, self.head_width))
            for part, heads in zip(parts, self.head_counts, strict=True)
        )
        if self.norms:
            query, key = (
                rms_norm(part, weight, is_centered=self.is_centered)
                for part, weight in zip((query, key), self.norms, strict=True)
            )
        query, key, value = (transpose(part, 1, 2) for part in (query, key, value))
        if self.rotated:
            query, key = self._rotated(query, key)
        mixed = self._attend(query, key, value)
        return self.output(flatten(transpose(mixed, 1, 2), 2, 3))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        is_masked = self.window is not None or self.softcap is not None
        mask = self._mask(query) if is_masked else None
        if self.softcap is not None:
            return capped_attention(query, key, value, mask)
        return products.attention(query, key, value, mask, causal=self.causal)

    def _mask(self, query: Tensor) -> Tensor | None:
        if self.window is None and not self.causal:
            return None
        hidden = Tensor(query.tape, (query.shape[2], query.shape[2]), query.dtype)
        query.tape.call("full", [], [hidden])
        later = unary("triu", hidden)
        return later if self.window is None else add(later, unary("tril", hidden))

    def _rotated(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        steps = arange(query.tape, self.rotated // 2)
        positions = arange(query.tape, query.shape[2])
        column = unsqueeze(positions, 1)
        angles = mul(column, self._frequencies(steps))
        cos = cast(self._magnified(unary("cos", angles)), query.dtype)
        sin = cast(self._magnified(unary("sin", angles)), query.dtype)
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _frequencies(self, steps: Tensor) -> Tensor:
        plain = unary("pow", unary("div", unary("neg", steps)))
        if self.scaling is None:
            return plain
        if self.scaling.type == "linear":
            return unary("div", plain)
        source = plain if self.scaling.type == "llama3" else steps
        kept = unary("clamp", unary("add", unary("mul", source)))
        return mul(plain, unary("add", unary("mul", kept)))

    def _magnified(self, x: Tensor) -> Tensor:
        is_plain = self.scaling is None or self.scaling.magnitude == 1
        return x if is_plain else unary("mul", x)

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half, rest = self.rotated // 2, self.head_width - self.rotated
        first, second, *unrotated = split(x, [half, half, rest] if rest else [half, half], 3)
        rotated = (
            sub(mul(first, cos), mul(second, sin)), add(mul(second, cos), mul(first, sin)),
        )  # fmt: skip
        return cat((*rotated, *unrotated), 3)


def capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in plain products, whose scores stay below a cap."""
    shape, groups = query.shape, key.shape[0] * key.shape[1]
    repeats = query.shape[1] // key.shape[1]
    rows = groups, repeats * shape[2], shape[3]
    query = reshape(query, rows)
    key, value = (reshape(part, (groups, *part.shape[2:])) for part in (key, value))
    scores = scale(tanh(products.bmm(scale(query), transpose(key, 1, 2))))
    scores = reshape(scores, (groups, repeats, shape[2], shape[2]))
    if mask is not None:
        scores = add(scores, mask)
    mixed = products.bmm(flatten(products.softmax(scores), 1, 2), value)
    return reshape(mixed, shape)


class FeedForward:
    """The feed-forward branch, gated or not."""

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        self.rank, self.ffn = scope.rank, config.ffn
        self.activate = silu if config.activation == "swiglu" else gelu
        divides = config.ffn % scope.rank.degree == 0
        linears: dict[str, LinearName] = {"input": "up"}
        if config.is_gated:
            linears = {"gate": "gate", **linears}
        ffn, bias = config.ffn, config.ffn_bias
        self.inputs = [
            Column(scope.inner(path), name, (ffn,), 1, bias=bias, divides=divides)
            for path, name in linears.items()
        ]
        self.output = Row(scope.inner("output"), "down", ffn, 1, bias=bias, divides=divides)

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to the same; the tokens are gathered, and scattered again."""
        full = all_gather(x, self.rank.token_group)
        y = self.partial_sum(full)
        return reduce_scatter(y, self.rank.token_group)

    def partial_sum(self, x: Tensor) -> Tensor:
        """Of all tokens `[b s d/c]`, before the sum over the ranks."""
        if len(self.inputs) == 1:
            (up,), down = self.inputs, self.output
            one, two, is_whole = up.weight, down.weight, self.rank.degree == 1
            if is_whole and isinstance(one, BlockWeight) and isinstance(two, BlockWeight):
                first = products.KeptBlocks(one.values, one.blocks, up.bias)
                second = products.KeptBlocks(two.values, two.blocks, down.bias)
                return products.block_feed_forward(x, first, second, self.ffn)
            return down(gelu(up(x)))
        gate, up = self.inputs
        return self.output(mul(self.activate(gate(x)), up(x)))


class Vocabulary:
    """A rank's rows of the token table: takes all tokens, gives all vectors."""

    def __init__(self, scope: Scope) -> None:
        self.rank = scope.rank
        self.weight = vocabulary_weight(scope, None)

    def __call__(self, tokens: Tensor) -> Tensor:
        """`Int[b s]` to `[b s d]`."""
        if self.rank.degree == 1:
            return products.embedding(self.weight, tokens)
        rows = unary("sub", tokens)
        elsewhere = bitwise_or(compare("lt", rows), compare("ge", rows))
        vectors = products.embedding(self.weight, masked_fill(rows, elsewhere))
        return all_reduce(masked_fill(vectors, unsqueeze(elsewhere, 2)), self.rank.all_group)


def vocabulary_weight(scope: Scope, tied_to: str | None) -> Tensor:
    """The first rank's rows of a table of the vocabulary."""
    vocabulary, degree = scope.config.vocabulary, scope.rank.degree
    scope.share(ShardingRule(style="vocabulary"), vocabulary, degree)
    rows = -(-vocabulary // degree)
    return scope.parameter(
        "weight", (rows, scope.config.width), sharded=0, replicated_over=None, tied_to=tied_to
    )


class Logits:
    """A rank's columns of the logits: takes the rank's tokens, gives logits of all tokens."""

    def __init__(self, scope: Scope) -> None:
        config = scope.config
        self.rank = scope.rank
        owner = "embedding.tokens.weight" if config.tied_embeddings else None
        self.weight = vocabulary_weight(scope, owner)
        rows = (self.weight.shape[0],)
        self.bias = None
        if config.head_bias:
            self.bias = scope.parameter("bias", rows, sharded=0, replicated_over=None)

    def __call__(self, x: Tensor) -> Tensor:
        """`[b s/r d/c]` to `[b s v/t]`."""
        return products.linear(all_gather(x, self.rank.all_group), self.weight, self.bias)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """The loss of `x[b s d]`, fused with the projection; for a single rank."""
        rows, flat = flatten(x, 0, 1), flatten(targets, 0, 1)
        return products.fused_cross_entropy(rows, self.weight, self.bias, flat)


def mean_cross_entropy(logits: Tensor, targets: Tensor, rank: Rank) -> Tensor:
    """Mean cross-entropy of logits, sharded or not, in float32."""
    if rank.degree == 1:
        wide = flatten(cast(logits, "float32"), 0, 1)
        return products.cross_entropy(wide, flatten(targets, 0, 1))
    counts = compare("ne", targets)
    losses = _token_losses(cast(logits, "float32"), targets, rank)
    return div(sum_all(masked_fill(losses, bitwise_not(counts))), sum_all(counts))


def _token_losses(logits: Tensor, targets: Tensor, rank: Rank) -> Tensor:
    group = rank.all_group
    largest = all_reduce_max(amax_last(logits.detach()), group)
    shifted = sub(logits, unsqueeze(largest, 2))
    column = unary("sub", targets)
    elsewhere = bitwise_or(compare("lt", column), compare("ge", column))
    index = unsqueeze(masked_fill(column, elsewhere), 2)
    target_logits = masked_fill(squeeze(products.gather_last(shifted, index), 2), elsewhere)
    sums = all_reduce_identity_grad(stack((sum_last(exp(shifted)), target_logits), 0), group)
    return sub(log(select(sums, 0, 0)), select(sums, 0, 1))


def local_part(x: Tensor, rank: Rank) -> Tensor:
    """The rank's tokens and features of what all ranks have, contiguous."""
    return x if rank.degree == 1 else clone(_narrowed(x, rank))


def _narrowed(x: Tensor, rank: Rank) -> Tensor:
    tokens = narrow(x, 1, 0, x.shape[1] // rank.rows)
    return tokens if rank.columns == 1 else narrow(tokens, 2, 0, x.shape[2] // rank.columns)


def dropped(x: Tensor, config: TransformerConfig) -> Tensor:
    """`x` after the configuration's dropout."""
    return dropout(x, config.dropout)
