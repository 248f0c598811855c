"""Sweep: the fastest plans of a field that fit, all weighed or without what is provably worse.

Two bounds hold for every plan of a group, so that a group whose bound is worse than what is found
already is never priced:

- time: products of all layers at the fastest rate that the machine states, on all of its devices
  without any waiting (`_products`);
- memory: weights and optimizer state of an even share of the layers (`_state_bytes`).
"""

from dataclasses import dataclass
from functools import cache
from heapq import heappush, heapreplace
from math import inf
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed import Totals, closed, least_bytes, least_seconds
from windlass.cost.closed_layers import Chain
from windlass.cost.closed_pipeline import Shape
from windlass.search.field import Cell, Family, Field
from windlass.spec.graph import Precision


class Found(NamedTuple):
    """One plan of a field, by its place in a cell, and what the closed form says of it."""

    step_seconds: float
    peak_bytes: float
    cell: Cell
    place: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep found."""

    best: tuple[Found, ...]
    """Plans that fit, fastest first."""
    nearest: Found | None
    """Where none fits, the one that comes nearest to it."""
    weighed: int
    """Plans whose time and memory were found."""
    skipped: int
    """Plans that a bound told to be slower, or not to fit."""


class Sweep:
    """Weighs the plans of a field.

    Args:
        field: the plans.
        near_bytes: that the near tier has.
    """

    def __init__(self, field: Field, near_bytes: float) -> None:
        self.field, self._near = field, near_bytes
        self.chain = Chain(field.base, field.graph, field.machine)
        self._products = cache(self._products_of)

    def totals(self, cell: Cell) -> Totals:
        """Seconds and bytes of all plans of a cell."""
        return closed(self.chain, cell.shape, cell.ends, cell.rows)

    def every(self, count: int) -> Swept:
        """The fastest plans, all of the field weighed.

        Args:
            count: plans that are wanted at most.
        """
        found = _Best(count)
        for cell in self.field.cells():
            totals = self.totals(cell)
            found.add(cell, totals, totals.peak_bytes <= self._near)
        return found.told()

    def best(self, count: int, *, within: float = 0.0) -> Swept:
        """The same plans, without weighing what is provably slower or does not fit.

        Args:
            count: plans that are wanted at most.
            within: keeps plans whose bound is slower by up to this share than the last of them.
        """
        found, field = _Best(count), self.field
        shapes = [(self._families(shape), shape) for shape in field.shapes()]
        for families, shape in sorted(
            shapes, key=lambda each: min((least for least, _ in each[0]), default=inf)
        ):
            limit = found.last * (1 + within)
            able = [family for least, family in families if least <= limit]
            found.skipped += sum(
                field.count(shape, family) for least, family in families if least > limit
            )
            if able:
                self._add(field.cell(shape, able), found, limit)
        return found.told()

    def _add(self, cell: Cell, found: "_Best", limit: float) -> None:
        """Takes in what of a cell may be among the best."""
        shape, rows = cell.shape, cell.rows
        quick = least_seconds(self.chain, shape, cell.ends, rows.runs) <= limit
        small = least_bytes(self.chain, shape, rows.blocks) <= self._near
        kept = quick[rows.run] & small[rows.pair]
        found.skipped += rows.count - int(kept.sum())
        if kept.any():
            cell = Cell(shape, cell.ends, rows.only(kept))
            totals = self.totals(cell)
            found.add(cell, totals, totals.peak_bytes <= self._near)

    def _families(self, shape: Shape) -> list[tuple[float, Family]]:
        """A shape's families, each with what none of its plans can be faster than."""
        batch = self.field.request.train.batch
        return [
            (
                self._products(each.tensor, each.precision)
                * batch / (each.replicas * shape.pipeline),
                each,
            )
            for each in self.field.families(shape)
        ]  # fmt: skip

    def _products_of(self, tensor: int, precision: Precision) -> float:
        """Seconds of all products of one sequence on one slice, at the fastest rate there is."""
        rate = self.field.machine.device.rate(precision)
        curves = (rate.curve, rate.biased or rate.curve)
        fastest = max(point.rate for curve in curves for point in curve.points)
        kinds, total = self.chain.kinds(tensor), 0.0
        for span in self.field.graph.chain:
            costs = [cost for cost in kinds[span.kind].costs if cost.precision == precision]
            total += span.count * min(
                sum(
                    op.flop.at(1, self.field.sequence)
                    for op in (*cost.forward, *cost.backward)
                    if op.kind == "matmul"
                )
                for cost in costs
            )
        return total / fastest


def _least(shape: tuple[list[tuple[float, Family]], Shape]) -> float:
    return min((least for least, _ in shape[0]), default=inf)


class _Best:
    """The fastest plans so far."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._heap: list[tuple[float, int, Found]] = []
        self._nearest: Found | None = None
        self._turn = 0
        self.weighed = self.skipped = 0

    @property
    def last(self) -> float:
        """Seconds of the slowest that is kept; infinite while there is room for more."""
        return -self._heap[0][0] if len(self._heap) == self._count else np.inf

    def add(self, cell: Cell, totals: Totals, fits: npt.NDArray[np.bool_]) -> None:
        """Takes the fastest of a cell in."""
        self.weighed += len(totals.step_seconds)
        if not fits.any():
            self._miss(cell, totals)
            return
        able = np.flatnonzero(fits & (totals.step_seconds < self.last))
        if able.size > self._count:
            able = able[np.argpartition(totals.step_seconds[able], self._count)[: self._count]]
        for index in able:
            seconds = float(totals.step_seconds[index])
            self._turn += 1
            found = Found(seconds, float(totals.peak_bytes[index]), cell, int(index))
            item = (-seconds, self._turn, found)
            if len(self._heap) < self._count:
                heappush(self._heap, item)
            elif seconds < self.last:
                heapreplace(self._heap, item)

    def _miss(self, cell: Cell, totals: Totals) -> None:
        index = int(totals.peak_bytes.argmin())
        peak = float(totals.peak_bytes[index])
        if self._nearest is None or peak < self._nearest.peak_bytes:
            self._nearest = Found(float(totals.step_seconds[index]), peak, cell, index)

    def told(self) -> Swept:
        """What was found."""
        best = tuple(sorted((found for _, _, found in self._heap), key=lambda f: f.step_seconds))
        return Swept(
            best=best,
            nearest=None if best else self._nearest,
            weighed=self.weighed,
            skipped=self.skipped,
        )
