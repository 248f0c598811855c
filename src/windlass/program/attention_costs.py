"""Cost of a layer whose attention is not computed by torch's own choice of fused kernel.

Graphs are captured with fused attention. Plain attention does the same in two matrix products with
a softmax between them, so its cost follows from that of the fused kernel: it keeps the
probabilities, `[b h s s]` less what tiles skip, and no sums of the softmax. How long it takes is
measured as one operation, whose FLOP stay those of the fused kernel.
"""

from collections.abc import Iterator
from typing import NamedTuple

from windlass.schema import (
    PRECISION_BYTES,
    LayerCost,
    LayerKind,
    Op,
    OtherAttention,
    Polynomial,
    attention_tiles,
)

_NOTHING = Polynomial()
_SUM_BYTES = 4
"""Fused kernels keep one float32 sum for each query and head."""


class AttentionSizes(NamedTuple):
    """Numbers of one attention for one sequence, each a polynomial of micro-batch and sequence."""

    heads: float
    width: float
    """Queries of all heads for one token, `h k`; results are as many."""
    kv_width: float
    """Keys of all heads for one token, `g k`; values are as many."""

    @classmethod
    def of(cls, op: Op, element_bytes: int) -> "AttentionSizes":
        """The sizes of fused attention, forward.

        It has `4 b h s^2 k` FLOP, reads queries, keys and values, and writes results and sums.
        Source: Dao 2023, arXiv:2307.08691, algorithm 1.
        """
        width = op.flop.bss / 4
        heads = (op.written_bytes.bs - width * element_bytes) / _SUM_BYTES
        return cls(heads, width, (op.read_bytes.bs / element_bytes - width) / 2)


def with_attention(
    cost: LayerCost,
    kind: LayerKind,
    attention: OtherAttention | None,
    sequence: int,
    *,
    selective: bool,
) -> LayerCost:
    """The cost of a layer with its attention computed in another way than it was captured.

    Args:
        attention: how attention is computed; None as it was captured.
        sequence: tokens of a sequence; sizes hold for this length only.
        selective: whether the layer is recomputed selectively, so that plain attention is repeated
            as backward begins.
    """
    if attention is None or not kind.chooses_attention:
        return cost
    if attention != "math":
        return cost.model_copy(
            update={
                name: tuple(_renamed(op, attention, _NOTHING) for op in ops)
                for name, ops in (("forward", cost.forward), ("backward", cost.backward))
            }
        )
    forward_ops = [op for op in cost.forward if op.kind == "attention"]
    if not forward_ops:
        return cost
    window = kind.sliding_window
    memory = _PlainMemory.of(forward_ops, cost, sequence, window)
    kept = _negative(memory.fused) if selective else memory.more
    backward = tuple(_backward_ops(cost.backward, memory))
    if selective:
        repeated = [_renamed(op, "math", memory.more) for op in forward_ops]
        backward = (*repeated, *backward)
    forward = tuple(_forward_ops(cost.forward, memory, kept))
    saved = cost.saved_bytes.plus(kept)
    if window is not None:
        share, _ = tile_shares(sequence, *window)
        forward, backward = (
            tuple(_windowed(op, share) for op in ops) for ops in (forward, backward)
        )
        saved = saved._replace(ss=0.0)
    return cost.model_copy(update={"forward": forward, "backward": backward, "saved_bytes": saved})


class _PlainMemory(NamedTuple):
    """Bytes of plain attention in one layer, beyond those of the fused kernel.

    Numbers of queries (`h k` for a token) and keys (`g k`) are those that captures of both differ
    in. Queries and keys that are rotated are copies, which the fused kernel keeps beside the
    projection that values are views of.
    """

    more: Polynomial
    """What it keeps for the backward pass."""
    fused: Polynomial
    """What selective recompute keeps of the fused kernel: results and sums."""
    forward: Polynomial
    """What is alive in its forward pass."""
    backward: Polynomial
    """The same of the backward pass."""

    @classmethod
    def of(
        cls, ops: list[Op], cost: LayerCost, sequence: int, window: tuple[int, int] | None
    ) -> "_PlainMemory":
        element = PRECISION_BYTES[cost.precision]
        rotates = _rotates(cost)
        more = fused = forward = backward = _NOTHING
        for op in ops:
            heads, width, kv_width = AttentionSizes.of(op, element)
            causal = None, 0 if op.is_causal is not False else None
            share, tile = tile_shares(sequence, *(window or causal))
            square, sums = heads * element, heads * _SUM_BYTES
            copies = -3 * kv_width if rotates else 2 * (width - kv_width)
            gone = 5 * kv_width if rotates else 3 * width
            # Compiled code writes the softmax over the scores, and its gradient over theirs.
            extra = 0 if cost.compiled else 1
            more = more.plus(Polynomial(bss=share * square, bs=copies * element - sums))
            fused = fused.plus(Polynomial(bs=width * element + sums))
            alive = 2 * width * element - sums
            forward = forward.plus(Polynomial(bss=(share + extra * tile) * square, bs=alive))
            alive = -(gone + 2 * extra * width) * element - sums
            grown = share + (1 + extra) * tile
            backward = backward.plus(Polynomial(bss=grown * square, bs=alive))
        return cls(more, fused, forward, backward)


def _rotates(cost: LayerCost) -> bool:
    """Whether queries and keys are rotated: their halves are joined before attention."""
    for op in cost.forward:
        if op.kind == "attention":
            return False
        if "cat" in op.name.split("+"):
            return True
    return False


def tile_shares(sequence: int, earlier: int | None, later: int | None) -> tuple[float, float]:
    """Shares of `s x s` that plain attention computes: of all its tiles, and of the largest.

    Args:
        sequence: tokens s of a sequence.
        earlier: how many tokens before it a token sees; None means all.
        later: the same of those behind it.
    """
    areas = [
        (end - first) * (seen - begin)
        for (first, end), (begin, seen) in attention_tiles(sequence, earlier, later)
    ]
    return sum(areas) / sequence**2, max(areas) / sequence**2


def _windowed(op: Op, share: float) -> Op:
    """An operation of a layer whose tiles skip what a sliding window hides.

    No mask of `s x s` is made or kept: each tile masks its own scores. FLOP are those of the tiles.
    """
    update = {
        name: value._replace(ss=share * value.ss)
        for name, value in (("read_bytes", op.read_bytes), ("written_bytes", op.written_bytes))
    }
    update["live_bytes"] = op.live_bytes._replace(ss=0.0)
    if op.kind == "attention":
        update["flop"] = op.flop._replace(bss=share * op.flop.bss)
    return op.model_copy(update=update)


def _forward_ops(ops: tuple[Op, ...], memory: _PlainMemory, kept: Polynomial) -> Iterator[Op]:
    """The forward pass; what it keeps is there from attention on."""
    is_after = False
    for op in ops:
        if op.kind == "attention":
            is_after = True
            yield _renamed(op, "math", memory.forward)
        else:
            yield _grown(op, kept) if is_after else op


def _backward_ops(ops: tuple[Op, ...], memory: _PlainMemory) -> Iterator[Op]:
    """The backward pass; what was kept is there until that of attention has ended."""
    is_before = True
    for op in ops:
        if op.kind == "attention":
            is_before = False
            yield _renamed(op, "math", memory.backward)
        else:
            yield _grown(op, memory.more) if is_before else op


def _renamed(op: Op, attention: OtherAttention, more: Polynomial) -> Op:
    if op.kind != "attention":
        return op
    update = {"attention": attention, "live_bytes": op.live_bytes.plus(more)}
    return op.model_copy(update=update)


def _grown(op: Op, more: Polynomial) -> Op:
    return op.model_copy(update={"live_bytes": op.live_bytes.plus(more)})


def _negative(term: Polynomial) -> Polynomial:
    return Polynomial(*(-each for each in term))
