"""Sweep: the fastest plans of a field that fit, all weighed or without what is provably worse.

Two bounds hold for every plan of a group, so that a group whose bound is worse than what is found
already is never priced:

- time: products of all layers at the fastest rate that the machine states, on all of its devices
  without any waiting (`_products`);
- memory: weights and optimizer state of an even share of the layers (`_state_bytes`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappush, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed import Totals, closed
from windlass.cost.closed_layers import Chain
from windlass.cost.closed_pipeline import Shape
from windlass.search.field import Cell, Field
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

    def totals(self, cell: Cell) -> Totals:
        """Seconds and bytes of all plans of a cell."""
        return closed(self.chain, cell.shape, cell.ends, cell.rows)

    def all(self, count: int) -> Swept:
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
        found = _Best(count)
        for group in sorted(self._groups(), key=lambda group: group.least_seconds):
            if group.least_seconds > found.last * (1 + within):
                found.skipped += group.plans
                continue
            cell = self.field.cell(
                group.shape,
                tensors=(group.tensor,),
                replicas=(group.replicas,),
                precisions=(group.precision,),
            )
            if cell is None:
                continue
            kept = self._holdable(cell)
            found.skipped += cell.rows.count - int(kept.sum())
            if kept.any():
                cell = Cell(cell.shape, cell.ends, cell.rows.only(kept))
                totals = self.totals(cell)
                found.add(cell, totals, totals.peak_bytes <= self._near)
        return found.told()

    def _groups(self) -> Iterator["_Group"]:
        """The field by shape, slices, replicas and precision, with what each takes at the least."""
        field = self.field
        flop = {
            (tensor, precision): self._products(tensor, precision)
            for tensor in field.tensors
            for precision in field.precisions
        }
        for shape in field.shapes():
            for (tensor, precision), each in flop.items():
                for replicas in field.replicas:
                    micro = field.micro_of(shape, replicas)
                    devices = shape.pipeline * tensor * replicas
                    if micro is None or devices > field.machine.devices:
                        continue
                    least = each * micro * shape.micros / shape.pipeline
                    plans = len(field.sharings(tensor, precision, True, replicas)) * 4
                    yield _Group(least, plans, shape, tensor, replicas, precision)

    def _products(self, tensor: int, precision: Precision) -> float:
        """Seconds of all products of one sequence on one slice, at the fastest rate there is."""
        rate = self.field.machine.device.rate(precision)
        fastest = max(
            point.rate for curve in (rate.curve, rate.biased) if curve for point in curve.points
        )
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

    def _holdable(self, cell: Cell) -> npt.NDArray[np.bool_]:
        """Which plans have room for what they always hold."""
        least = np.array([self._state_bytes(at, cell) for at in range(len(cell.rows.sharings))])
        return np.asarray((least <= self._near)[cell.rows.sharing])

    def _state_bytes(self, at: int, cell: Cell) -> float:
        """Of an even share of the layers: no stage needs less than the mean."""
        states = self.chain.states(cell.rows.sharings[at])
        return float((states.weights + states.optimizer).sum() / cell.shape.pipeline)


class _Group(NamedTuple):
    least_seconds: float
    plans: int
    shape: Shape
    tensor: int
    replicas: int
    precision: Precision


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
