"""Chunk liveness: what a model chunk holds at each of its layers, counted in sizes of layer kinds.

All bytes at a moment are a sum of sizes, such as the outputs of some layers of a kind, so that
counts of sizes say for all plans what is held (`SIZES`). In a row of equal layers the counts grow
evenly from one to the next, so they are largest at an end of the row. Its first layer may have
another input, and the last one of a chunk sends its output away.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np

from windlass.cost.batched.memory.pareto import pareto_rows
from windlass.cost.batched.memory.size_classes import KindTraits, SizeCounts, in_steps
from windlass.cost.batched.schedule_index import BACKWARD, FORWARD, WEIGHT

_FEW = 4
"""Longest row of equal layers in which every layer is examined."""


@dataclass(frozen=True, slots=True)
class ModelChunk:
    """A model chunk, as far as its memory depends on it.

    Args:
        layers: the kind of each layer, and whether it is recomputed in full.
        before: the kind of the layer that gives it its input; None for the first chunk.
        ends: whether it is the last chunk.
        parted: whether the backward is split.
        once: whether a step has one micro-batch.
        borrower: index of a layer with tied weights, if it is in the chunk.
        owner: index of the layer that owns them, if it is in the chunk.
        lender: kind of the owner if it is on the same stage; None if it is on another.
    """

    layers: tuple[tuple[int, bool], ...]
    before: int | None
    ends: bool
    parted: bool
    once: bool
    borrower: int | None
    owner: int | None
    lender: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkLiveness:
    """What a chunk holds, in steps of sizes."""

    held: SizeCounts
    """Rows: a micro-batch before its backward; one that waits for its weight-gradient pass;
    gradients created by the first backward; what there is more, that is less, after the last
    pass; and weights from the first pass on."""
    places: dict[tuple[int, int, int], SizeCounts]
    """What a pass holds at each layer (rows), the micro-batch at work included; by pass kind, and
    whether it is the first and the last that adds to gradients. Of what was created before the
    pass, only the changes."""


@lru_cache(maxsize=2048)
def chunk_liveness(chunk: ModelChunk, kinds: KindTraits) -> ChunkLiveness:
    """What a chunk holds."""
    return _Layers(chunk, kinds).liveness()


class _Layers:
    """The layers of a chunk (rows), counted in sizes (columns)."""

    def __init__(self, chunk: ModelChunk, kinds: KindTraits) -> None:
        self._chunk, self._kinds = chunk, kinds
        self._kind = np.array([kind for kind, _ in chunk.layers])
        self._again = np.array([[repeated] for _, repeated in chunk.layers])
        each, kind = kinds.each, self._kind
        self._output, self._kept = each("output", kind), each("kept", kind)
        self._down = each("output", np.array([chunk.before or 0, *kind[:-1]]))
        """The gradient of a layer's input."""
        if chunk.before is None:
            self._down[0] = 0
        self._came = self._output.copy()
        """The gradient of a layer's output."""
        if chunk.ends:
            self._came[-1] = 0
        self._stays = self._output.copy()
        """The part of the output that stays until the backward."""
        if self._again[-1]:
            self._stays[-1] = 0
        self._hold = np.where(self._again, 0, self._kept)
        at_ends = chunk.before is None or chunk.ends
        self._tokens = kinds.one("tokens") * int(at_ends)
        self._enters = self._down[0] + self._tokens
        """What a micro-batch brings: its input and tokens."""
        self._base = self._enters + _before(self._hold + self._output)
        """What a micro-batch holds before it comes to a layer."""
        self._first_output = np.where(self._again, self._stays, 0)
        """The output copy from which a recomputed layer's backward starts."""
        self._waits = 2 * self._kept + self._output + self._first_output + self._came
        """What a layer holds between both parts of a split backward."""
        self._sums = each("sums", kind)
        """Gradients that a layer's first backward creates."""
        self._reduced = each("sums", kind) - each("shard", kind)
        """Bytes of gradients that are freed once they are reduced."""
        self._whole = each("whole", kind)
        """Weights until a layer's last backward pass."""
        self._released = self._whole.copy()
        """Bytes that are freed right after a layer's last backward."""
        self._place_loan()

    def _place_loan(self) -> None:
        """Moves the gradient of tied weights to the layer that uses them first."""
        chunk, kinds = self._chunk, self._kinds
        if chunk.lender is not None:
            if chunk.borrower is not None:
                self._sums[chunk.borrower] += kinds.each("sums", np.array([chunk.lender]))[0]
            if chunk.owner is not None:
                self._sums[chunk.owner] = 0
        elif chunk.borrower is not None:
            gradient, weights = kinds.one("lent gradient"), kinds.one("lent weights")
            self._sums[chunk.borrower] += gradient
            self._whole[chunk.borrower] += weights
            self._released[chunk.borrower] += gradient + weights

    def liveness(self) -> ChunkLiveness:
        held = [
            self._enters + (self._hold + self._stays).sum(axis=0),
            self._enters + self._waits.sum(axis=0),
            self._sums.sum(axis=0),
            -(self._released + self._reduced).sum(axis=0),
            self._whole.sum(axis=0),
        ]
        steps = in_steps(self._kinds)
        return ChunkLiveness(
            held=np.stack(held) @ steps,
            places={key: _standing(rows @ steps) for key, rows in self._places()},
        )

    def _places(self) -> Iterator[tuple[tuple[int, int, int], SizeCounts]]:
        chosen = self._chosen()
        yield (FORWARD, 0, 0), self._forward()[chosen]
        if self._chunk.parted:
            yield (BACKWARD, 0, 0), _stacked(self._backward_input(), chosen)
        adds = WEIGHT if self._chunk.parted else BACKWARD
        for first, last in ((1, 1),) if self._chunk.once else ((1, 0), (0, 0), (0, 1)):
            rows = [row + self._changed(first, last) for row in self._adding(first)]
            if last:
                rows += self._at_ends(first)
            yield (adds, first, last), _stacked(rows, chosen)

    def _chosen(self) -> list[int]:
        """Layers that stand for all."""
        found, count = list[int](), len(self._kind)
        alone = (self._chunk.borrower, self._chunk.owner)
        for _, equal in groupby(
            range(count), key=lambda at: (*self._chunk.layers[at], at in alone)
        ):
            row = list(equal)
            ends = row[:2] + row[-1:]
            found += row if len(row) <= _FEW else ends
            if row[-1] == count - 1 and self._again[-1]:
                found.append(row[-2] if len(row) > 1 else row[-1])
        return sorted(set(found))

    def _forward(self) -> SizeCounts:
        each, kind = self._kinds.each, self._kind
        taken = np.where(self._again, each("again", kind), each("forward", kind))
        return np.asarray(self._base + taken)

    def _repeated(self) -> SizeCounts:
        """Bytes while a layer is recomputed; nothing for other layers."""
        taken = self._base + self._came + self._kinds.each("forward", self._kind)
        if self._chunk.parted:
            taken = taken + self._first_output + _after(self._waits)
        return np.where(self._again, taken, 0)

    def _backward_input(self) -> list[SizeCounts]:
        own = self._base + self._kept + self._output + self._came
        own = own + self._first_output + _after(self._waits)
        backward = self._kinds.each("backward", self._kind)
        return [own + backward, own + self._kept + self._down, self._repeated()]

    def _adding(self, first: int) -> list[SizeCounts]:
        """Bytes of a pass that adds to gradients, or creates them."""
        each, kind, kinds = self._kinds.each, self._kind, self._kinds
        if self._chunk.parted:
            own = self._enters + _before(self._waits) + self._waits - self._first_output
            own = own - self._tokens_gone()
            found, down = list[SizeCounts](), np.zeros_like(own)
        else:
            own = self._base - self._tokens_gone() + self._kept + self._output + self._came
            found, down = [own + each("backward", kind), self._repeated()], self._down
        fresh = each("fresh", kind)
        if not first:
            return [*found, own + fresh + down]
        is_embedding = np.array(kinds.is_embedding)[kind][:, None]
        lent_only = np.array(kinds.bare)[kind][:, None] & (self._chunk.lender is None)
        beside = np.where(lent_only, each("converted", kind), each("largest", kind))
        beside = np.where(self._sums.any(axis=1, keepdims=True), beside, 0)
        made = own + down + self._sums
        return [*found, own + fresh + down + np.where(is_embedding, self._sums, 0), made + beside]

    def _tokens_gone(self) -> SizeCounts:
        """Tokens that the last layer has freed before others run backward."""
        found = np.zeros_like(self._base)
        if self._chunk.ends and self._chunk.before is not None:
            found[:-1] = self._tokens
        return np.asarray(found)

    def _changed(self, first: int, last: int) -> SizeCounts:
        """What later layers have created in a first pass, and freed in a last one."""
        found = _after(self._sums) if first else np.zeros_like(self._sums)
        if last:
            found -= _after(self._released)
        if last and self._at_once:
            found -= _after(self._reduced)
        return found

    @property
    def _at_once(self) -> bool:
        """Whether gradients are reduced before the gradient of a chunk's input is sent."""
        chunk = self._chunk
        return chunk.before is None or chunk.once or chunk.parted

    def _at_ends(self, first: int) -> list[SizeCounts]:
        """Bytes after a layer's last pass, while its gradient is reduced or a tied one is added."""
        each, kind, chunk = self._kinds.each, self._kind, self._chunk
        if self._at_once:
            there = self._left() + self._changed(first, 1) - self._released
            there = there + (self._sums if first else 0)
        else:
            there = -self._released.sum(axis=0) - _after(self._reduced)
        rows_only = np.array(self._kinds.is_embedding)[kind][:, None]
        found = [np.where(rows_only | chunk.once, there + each("flat", kind), 0)]
        if chunk.owner is not None and chunk.lender is None:
            taken = np.zeros_like(there)
            taken[chunk.owner] = there[chunk.owner] + self._kinds.one("lent gradient")
            found.append(taken)
        return found

    def _left(self) -> SizeCounts:
        """What a micro-batch still holds after its backward pass through a layer."""
        if self._chunk.parted:
            freed = np.concatenate([np.zeros_like(self._base[:1]), self._first_output[:-1]])
            left = self._enters + _before(self._waits) - freed
        else:
            left = self._base + self._down
        if self._chunk.before is None:
            left[0] -= self._tokens
        elif self._chunk.ends:
            left -= self._tokens
        return np.asarray(left)


def _stacked(rows: Sequence[SizeCounts], chosen: Sequence[int]) -> SizeCounts:
    return np.concatenate([row[chosen] for row in rows])


def _standing(places: SizeCounts) -> SizeCounts:
    return np.asarray(places[pareto_rows(places, np.zeros(len(places), dtype=np.int64))])


def _before(values: SizeCounts) -> SizeCounts:
    """The sum over the layers before each layer."""
    return np.asarray(np.cumsum(values, axis=0) - values)


def _after(values: SizeCounts) -> SizeCounts:
    """The sum over the layers after each layer."""
    return np.asarray(values.sum(axis=0) - np.cumsum(values, axis=0))
