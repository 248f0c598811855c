"""Places: the layers that the near tier can be fullest at, in place of all layers of a chain.

From one of equal layers in a row to the next the bytes of a moment grow by as much each time, so
that they are largest at an end of the row. Its first layer may have another input, so three stand
for all: the first, the second, which carries the sums of those between, and the last.

Of stages of equal layers those that hold no more than another at any moment are not fuller either,
and are left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import get_args

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_held import Held, Moment
from windlass.cost.closed_layers import Floats, Ints
from windlass.cost.closed_levels import Shape
from windlass.cost.closed_rows import Again
from windlass.spec.plan import Recompute

_ENDS = 3
"""Equal layers in a row from which on not all are places of their own."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a chain is parted, and which of its layers are alike.

    Args:
        ends: first layer of each chunk, and the chain's length.
        sorts: a number for each layer; layers of the same number are alike.
        again: of each layer how it is computed again.
    """

    ends: tuple[int, ...]
    sorts: tuple[int, ...]
    again: tuple[Recompute, ...]

    def chunk(self, chunk: int) -> tuple[int | None, ...]:
        """What the layers of a chunk are, and the one that gives it its input."""
        first, last = self.ends[chunk : chunk + 2]
        return (self.sorts[first - 1] if first else None, *self.sorts[first:last])


class Places:
    """The places of some stages.

    Args:
        shape: of the plans.
        layout: of their chain.
        moments: what is held at the fullest moment of each sort.
        every: whether stages are kept that cannot be the fullest.
    """

    def __init__(
        self, shape: Shape, layout: Layout, moments: Mapping[Moment, Held], *, every: bool = False
    ) -> None:
        self.shape = shape
        self.stages = (
            tuple(range(shape.pipeline)) if every else _fullest_stages(shape, layout, moments)
        )
        """Of each kept stage its place among all."""
        kept = np.array(self.stages)
        chunks = (np.arange(shape.interleave)[:, None] * shape.pipeline + kept).ravel()
        found = [
            (at, *place) for at, chunk in enumerate(chunks) for place in _row(layout, int(chunk))
        ]
        self.chunk, self.layer, self.times = np.array(found, dtype=np.int64).T
        self.stage = self.chunk % len(kept)
        self.again = (np.array(layout.again) == "layer")[self.layer]
        self.moments = _kept_moments({name: _only(held, chunks) for name, held in moments.items()})
        self.starts = np.flatnonzero(np.diff(self.chunk, prepend=-1))
        self.is_first = self.layer == np.array(layout.ends)[chunks][self.chunk]
        self.is_last = self.layer == np.array(layout.ends)[chunks + 1][self.chunk] - 1
        self.in_end_chunk = np.isin(chunks, (0, shape.chunks - 1))[self.chunk]
        """Whether tokens are loaded into its chunk."""
        self._turns = (shape.interleave, len(kept))
        self._first = self.starts[self.chunk]
        self._in_chunk = (self.chunk[:, None] == np.arange(len(chunks))) * self.times[:, None] * 1.0
        self._in_stage = (self.stage[:, None] == np.arange(len(kept))) * self.times[:, None] * 1.0

    def of_layers(self, *layers: int) -> tuple[int, ...]:
        """The places of layers that stand alone."""
        return tuple(int(np.flatnonzero(self.layer == layer)[0]) for layer in layers)

    def before(self, values: Floats) -> Floats:
        """For each place the sum over the layers before it in its chunk."""
        whole = values * self.times
        total = np.cumsum(whole, axis=-1) - whole
        return np.asarray(total - total[..., self._first])

    def after(self, values: Floats) -> Floats:
        """For each place the sum over the layers behind it in its chunk."""
        within = self.by_chunk(values)[..., self.chunk]
        return np.asarray(within - self.before(values) - values)

    def by_chunk(self, values: Floats) -> Floats:
        """The sum over the layers of each chunk."""
        return np.asarray(values @ self._in_chunk)

    def by_stage(self, values: Floats) -> Floats:
        """The sum over the layers of each stage."""
        return np.asarray(values @ self._in_stage)

    def behind(self, values: Floats) -> Floats:
        """For each place the sum over later chunks of its stage, whose backward comes before."""
        if self.shape.interleave == 1:
            return np.zeros_like(values)
        chunks = self.by_chunk(values)
        turns = chunks.reshape(*chunks.shape[:-1], *self._turns)
        later = np.cumsum(turns[..., ::-1, :], axis=-2)[..., ::-1, :] - turns
        return np.asarray(later.reshape(chunks.shape)[..., self.chunk])

    def held(self, each: Floats, counts: Floats) -> Floats:
        """For each chunk at work what its stage's chunks hold, of so many micro-batches each."""
        if self.shape.interleave == 1:
            return np.asarray(each * counts[:, 0])
        own = each.reshape(-1, *self._turns)
        taken = np.einsum("csj,njs->ncs", counts.reshape(*self._turns, -1), own)
        return np.asarray(taken.reshape(each.shape))

    def most(self, values: Floats) -> Floats:
        """The largest of each stage."""
        chunks = np.maximum.reduceat(values, self.starts, axis=-1)
        turns = chunks.reshape(*chunks.shape[:-1], *self._turns)
        return np.asarray(turns.max(axis=-2))


def _row(layout: Layout, chunk: int) -> list[tuple[int, int]]:
    """The places of a chunk, each with how many layers it stands for."""
    first, last = layout.ends[chunk : chunk + 2]
    found = []
    for _, equal in groupby(range(first, last), key=lambda layer: layout.sorts[layer]):
        row = list(equal)
        if len(row) <= _ENDS:
            found += [(layer, 1) for layer in row]
        else:
            found += [(row[0], 1), (row[1], len(row) - 2), (row[-1], 1)]
    return found


def _fullest_stages(
    shape: Shape, layout: Layout, moments: Mapping[Moment, Held]
) -> tuple[int, ...]:
    """Those of which no other of equal layers holds at least as much at every moment."""
    kept: dict[object, list[int]] = {}
    counts = _counts(shape, moments)
    for stage in range(shape.pipeline):
        parts = range(stage, shape.chunks, shape.pipeline)
        alike = kept.setdefault(tuple(map(layout.chunk, parts)), [])
        if not any((counts[other] >= counts[stage]).all() for other in alike):
            alike[:] = [other for other in alike if (counts[stage] < counts[other]).any()]
            alike.append(stage)
    return tuple(sorted(stage for alike in kept.values() for stage in alike))


def _counts(shape: Shape, moments: Mapping[Moment, Held]) -> npt.NDArray[np.float64]:
    """All that is counted of each stage (rows); with more of any of it a stage is no emptier."""
    whole = np.concatenate(
        [np.column_stack(_numbers(held)) for held in moments.values()],
        axis=1,
    )
    turns = whole.reshape(shape.interleave, shape.pipeline, -1)
    return np.asarray(turns.transpose(1, 0, 2).reshape(shape.pipeline, -1))


def _kept_moments(moments: dict[Moment, Held]) -> dict[Moment, Held]:
    """Without first forward passes where later ones find as much, and gradients besides."""
    first, later = moments["first forward"], moments["forward"]
    if all((high >= low).all() for low, high in zip(_numbers(first), _numbers(later), strict=True)):
        moments["first forward"] = replace(first, there=np.zeros_like(first.there))
    return moments


def _numbers(held: Held) -> tuple[Floats, ...]:
    return held.open, held.parted, held.growth, held.there


def _only(held: Held, chunks: Ints) -> Held:
    return replace(
        held,
        open=held.open[chunks],
        parted=held.parted[chunks],
        growth=held.growth[chunks],
        there=held.there[chunks],
    )


def layers_again(shape: Shape, ends: tuple[int, ...], again: Again) -> tuple[Recompute, ...]:
    """Of each layer how it is computed again; the first and the last one never are."""
    found: list[Recompute] = []
    for chunk, (begin, end) in enumerate(pairwise(ends)):
        stage, able = chunk % shape.pipeline, max(0, min(end, ends[-1] - 1) - max(1, begin))
        whole = min(again.whole[stage], able) if again.whole else 0
        some = min(again.selective[stage], able) if again.selective else 0
        some = able - whole if whole and some else some
        modes: tuple[tuple[Recompute, int], ...] = (
            ("none", max(0, min(1, end) - begin)),
            ("layer", whole),
            ("selective", some),
        )
        found += [mode for mode, count in modes for _ in range(count)]
        found += ["none"] * (end - len(found))
    return tuple(found)


def sorts_of(
    kinds: Sequence[int], again: Sequence[Recompute], alone: Sequence[int]
) -> tuple[int, ...]:
    """A number for each layer that those share of one kind that are computed again alike.

    Args:
        kinds: of the layers.
        again: of each layer how it is computed again.
        alone: layers that share theirs with none.
    """
    modes: tuple[Recompute, ...] = get_args(Recompute)
    places = {mode: at for at, mode in enumerate(modes)}
    own = {layer: -1 - layer for layer in alone}
    return tuple(
        own.get(layer, len(modes) * kind + places[mode])
        for layer, (kind, mode) in enumerate(zip(kinds, again, strict=True))
    )
