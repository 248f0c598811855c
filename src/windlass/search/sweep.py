"""Sweep: the fastest plans of a field that fit, all weighed or without what is provably worse.

Two bounds hold for every plan of a group, so that a group whose bound is worse than what is found
already is never priced:

- time: products of all layers at the fastest rate that the machine states, on all of its devices
  without any waiting (`_products`);
- memory: weights and optimizer state of an even share of the layers (`_state_bytes`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from heapq import heappush, heapreplace
from math import inf
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from windlass.cost.closed import Totals, closed, least_bytes, least_seconds
from windlass.cost.closed_layers import Chain, Floats, Ints
from windlass.cost.closed_levels import Shape
from windlass.cost.closed_rows import Again, Rows
from windlass.search.field import Cell, Field
from windlass.search.spared import spared, twins
from windlass.spec.graph import Precision
from windlass.spec.plan import Order, Recompute


class Found(NamedTuple):
    """One plan of a field, by its place in a cell, and what the closed form says of it."""

    step_seconds: float
    peak_bytes: float
    cell: Cell
    place: int


_FASTEST = 8
"""Plans that are kept of those that are faster than a given one."""


_MODES: tuple[Recompute, ...] = get_args(Recompute)
_BATCH = 256
"""Plans of which is found at a time how few layers they must compute again."""


class Trait(NamedTuple):
    """What tells a plan from its near twins."""

    pipeline: int
    tensor: int
    order: Order
    recompute: Recompute
    shares: str
    """Of what replicas share one copy: `none`, the optimizer's `state`, or `weights` too."""
    home: str
    """The tier of the optimizer's state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What a sweep found."""

    best: tuple[Found, ...]
    """Plans that fit, fastest first."""
    traits: tuple[Found, ...]
    """The fastest that fit of each trait, fastest first; of those that were weighed."""
    misses: tuple[Found, ...]
    """The smallest of each trait of which none fits, smallest first; of those that were weighed."""
    weighed: int
    """Plans whose time and memory were found."""
    skipped: int
    """Plans that a bound told to be slower, or not to fit."""
    faster: int = 0
    """Plans that fit and are faster than was asked for."""


class Sweep:
    """Weighs the plans of a field.

    Args:
        field: the plans.
        near_bytes: that the near tier has.
        chain: with prices that are known already; None finds them.
    """

    def __init__(self, field: Field, near_bytes: float, *, chain: Chain | None = None) -> None:
        self.field, self._near = field, near_bytes
        self.chain = chain or Chain(field.base, field.graph, field.machine)
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
            self._take(cell, found)
        return found.told()

    def scores(self, cell: Cell, totals: Totals) -> Floats:
        """Seconds of a step of a run: compilation, which comes once, is shared by all its steps."""
        device, graph = self.field.machine.device, self.field.graph
        once = len({span.kind for span in graph.chain}) * device.compile_seconds
        compiled = cell.rows.settings.compiled[cell.rows.setting]
        share = once / self.field.request.train.steps
        return np.asarray(totals.step_seconds + share * compiled[cell.rows.run])

    def best(self, count: int, *, within: float = 0.0) -> Swept:
        """The same plans, without weighing what is provably slower or does not fit.

        Args:
            count: plans that are wanted at most.
            within: keeps plans whose bound is slower by up to this share than the last of them.
        """
        return self._sought(_Best(count), within).told()

    def first(self, count: int) -> Swept:
        """Any plans that fit, found fast: of the shape with fewest stages that has such."""
        found = _Best(count)
        for shape in self.field.shapes():
            able = self.field.able(shape)
            if able.size and shape.order == "1f1b":
                table = self.field.table(shape)
                largest = able[table.devices[able] == table.devices[able].max()]
                chosen = largest[table.block[largest] == table.block[largest].max()]
                self._add(self.field.cell(shape, chosen), found, inf)
            if found.traits:
                break
        return found.told()

    def faster(self, seconds: float) -> Swept:
        """The fastest of the plans that are faster than so many seconds, and how many there are."""
        found = _Best(_FASTEST, below=seconds)
        return self._sought(found, 0.0).told()

    def _sought(self, found: "_Best", within: float) -> "_Best":
        field = self.field
        shapes = [(shape, able, self._least(shape, able)) for shape, able in self._open()]
        for shape, able, least in sorted(shapes, key=lambda each: float(each[2].min())):
            limit = found.limit(within)
            kept = least <= limit
            found.skipped += field.count(shape, able[~kept])
            if kept.any():
                self._add(field.cell(shape, able[kept]), found, limit)
        return found

    def _open(self) -> Iterator[tuple[Shape, Ints]]:
        """All shapes of which there are plans, with their settings."""
        for shape in self.field.shapes():
            able = self.field.able(shape)
            if able.size:
                yield shape, able

    def emptier(self, found: Found, near_bytes: float) -> Cell:
        """A plan with as little computed again as fits into so many bytes; all if none does."""
        cell = found.cell
        rows = cell.rows.one(found.place)
        whole = Again(whole=(self.field.graph.layers,) * cell.shape.pipeline)
        cell = replace(cell, rows=replace(rows, agains=(whole,), again=rows.again * 0))
        setting = rows.run_of(0).setting
        selects = self.field.selects(cell.shape.order, setting.tensor, compiled=setting.compiled)
        return spared(self.chain, cell, near_bytes, np.zeros(1), np.array([selects]))[0]

    def smallest(self) -> Swept:
        """Of each trait the plan that needs least memory, fit or not.

        Least takes what shares all it can, in the smallest micro-batches, with layers recomputed,
        in the order that holds fewest of them.
        """
        found = _Best(1)
        for shape, able in self._open():
            if shape.order != "1f1b" and self.field.request.order is None:
                continue
            cell = self.field.cell(shape, self._small(shape, able))
            rows = cell.rows
            modes = np.array([_MODES.index(each.mode) for each in rows.agains])[rows.again]
            kept = _shared(rows)[rows.pair] & (modes == modes.max())[rows.run]
            cell = Cell(shape, cell.ends, rows.only(kept))
            totals = self.totals(cell)
            found.add(cell, self.scores(cell, totals), totals, -inf)
        return found.told()

    def _add(self, cell: Cell, found: "_Best", limit: float) -> None:
        """Takes in what of a cell may be among the best."""
        shape, rows = cell.shape, cell.rows
        # With fewer layers computed again a plan is faster, and all the way down to none.
        plain = rows
        if self.field.spares:
            plain = replace(rows, agains=(Again(),), again=rows.again * 0)
        quick = least_seconds(self.chain, shape, cell.ends, plain) <= limit
        kept = rows.only(quick[rows.run])
        if kept.count:
            small = least_bytes(self.chain, shape, kept) <= self._near
            kept = kept.only(small[kept.pair])
        found.skipped += rows.count - kept.count
        if kept.count:
            self._take(Cell(shape, cell.ends, kept), found)

    def _take(self, cell: Cell, found: "_Best") -> None:
        """Takes a cell in, with as few layers computed again as fit where that is open."""
        totals = self.totals(cell)
        scores = self.scores(cell, totals)
        if not self.field.spares:
            found.add(cell, scores, totals, self._near)
            return
        fits = (totals.peak_bytes <= self._near) & (totals.far_full <= 1)
        twin, some, whole = (twins(cell.rows, mode) for mode in _MODES)
        spares = fits & (twin >= 0) & (totals.peak_bytes[twin] > self._near)
        found.add(cell, np.where(spares, inf, scores), totals, self._near)
        own = np.arange(cell.rows.count)  # of twins that fit one is enough
        able = np.flatnonzero(spares & ((whole == own) | (whole < 0) | ~fits[whole]))
        able = able[np.argsort(scores[twin[able]])]
        for first in range(0, len(able), _BATCH):
            batch = able[first : first + _BATCH]
            batch = batch[scores[twin[batch]] <= found.limit(0.0)]
            if not batch.size:
                return
            chosen = np.isin(np.arange(cell.rows.count), batch)
            part = Cell(cell.shape, cell.ends, cell.rows.only(chosen))
            far_full, selects = totals.far_full[chosen], some[chosen] >= 0
            fewer, told = spared(self.chain, part, self._near, far_full, selects)
            found.add(fewer, self.scores(fewer, told), told, self._near, counted=False)

    def _small(self, shape: Shape, able: Ints) -> Ints:
        """Of some settings those of the smallest micro-batch of their cut."""
        table = self.field.table(shape)
        least = np.full(int(table.cut.max()) + 1, table.batch)
        np.minimum.at(least, table.cut[able], table.micro[able])
        return np.asarray(able[table.micro[able] == least[table.cut[able]]])

    def _least(self, shape: Shape, able: Ints) -> Floats:
        """What no plan of each of some settings can be faster than."""
        table = self.field.table(shape)
        found = [self._products(tensor, precision) for tensor, precision, _ in table.modes]
        replicas = table.batch / (table.micro * table.micros)[able]
        of_batch = np.array(found)[table.mode[able]] * table.batch
        return np.asarray(of_batch / (replicas * shape.pipeline))

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


def _shared(rows: Rows) -> npt.NDArray[np.bool_]:
    """Of each pair whether it is the one of its block that shares most."""
    degrees = rows.pairs.prod(axis=1)
    counts = rows.table.counts[rows.shared]
    most = np.maximum.reduceat(degrees, np.cumsum(counts) - counts)
    return np.asarray(degrees == np.repeat(most, counts))


class _Best:
    """The fastest plans so far, of all and of each trait; and the smallest that do not fit."""

    def __init__(self, count: int, *, below: float | None = None) -> None:
        self._count, self._below = count, below
        self.faster = 0
        self._heap: list[tuple[float, int, Found]] = []
        self.traits: dict[Trait, Found] = {}
        self.misses: dict[Trait, Found] = {}
        self._turn = 0
        self.weighed = self.skipped = 0

    @property
    def last(self) -> float:
        """Seconds of the slowest that is kept; infinite while there is room for more."""
        return -self._heap[0][0] if len(self._heap) == self._count else inf

    def limit(self, within: float) -> float:
        """Seconds from which on plans are left out."""
        return self.last * (1 + within) if self._below is None else self._below

    def add(
        self,
        cell: Cell,
        score: Floats,
        totals: Totals,
        near_bytes: float,
        *,
        counted: bool = True,
    ) -> None:
        """Takes the fastest of a cell in.

        Args:
            cell: the plans.
            score: seconds that they are compared by.
            totals: of the plans.
            near_bytes: that a plan may need.
            counted: whether the plans are of those that the field counts.
        """
        self.weighed += counted * len(score)
        near = totals.peak_bytes <= near_bytes
        fits = near & (totals.far_full <= 1)
        traits = _traits(cell)
        if self._below is not None:
            fits = fits & (score < self._below)
            self.faster += int(fits.sum())

        def found(index: np.intp) -> Found:
            return Found(float(score[index]), float(totals.peak_bytes[index]), cell, int(index))

        able = np.flatnonzero(fits & (score < self.last))
        if able.size > self._count:
            able = able[np.argpartition(score[able], self._count - 1)[: self._count]]
        for index in able:
            self._turn += 1
            item = (-float(score[index]), self._turn, found(index))
            if len(self._heap) < self._count:
                heappush(self._heap, item)
            elif score[index] < self.last:
                heapreplace(self._heap, item)
        for index in _firsts(traits, score, fits):
            _keep(self.traits, found(index), _seconds)
        for index in _firsts(traits, totals.peak_bytes, ~near):
            _keep(self.misses, found(index), _bytes)

    def told(self) -> Swept:
        """What was found."""
        fitting = set(self.traits)
        return Swept(
            best=tuple(sorted((found for _, _, found in self._heap), key=_seconds)),
            traits=tuple(sorted(self.traits.values(), key=_seconds)),
            misses=tuple(
                sorted(
                    (found for trait, found in self.misses.items() if trait not in fitting),
                    key=_bytes,
                )
            ),
            weighed=self.weighed,
            skipped=self.skipped,
            faster=self.faster,
        )


def _seconds(found: Found) -> float:
    return found.step_seconds


def _bytes(found: Found) -> float:
    return found.peak_bytes


def _keep(kept: dict[Trait, Found], found: Found, by: Callable[[Found], float]) -> None:
    """Keeps the smallest of each trait."""
    trait = trait_of(found)
    before = kept.get(trait)
    if before is None or by(found) < by(before):
        kept[trait] = found


def trait_of(found: Found) -> Trait:
    """What tells a plan from its near twins."""
    rows, shape = found.cell.rows, found.cell.shape
    run, share = rows.run_of(rows.run[found.place]), rows.share_of(rows.pair[found.place])
    shares = "weights" if share.weights > 1 else "state" if share.optimizer > 1 else "none"
    mode = run.again.mode
    return Trait(shape.pipeline, run.setting.tensor, shape.order, mode, shares, share.home)


def _traits(cell: Cell) -> Ints:
    """For each plan a number that it shares with those of its trait."""
    rows = cell.rows
    modes = np.array([_MODES.index(each.mode) for each in rows.agains])
    runs = rows.settings.tensor[rows.setting] * len(_MODES) + modes[rows.again]
    _, of_run = np.unique(runs, return_inverse=True)
    shares = (rows.pairs > 1).sum(axis=1) + 3 * rows.home
    return np.asarray(of_run[rows.run] * (1 + shares.max()) + shares[rows.pair])


def _firsts(groups: Ints, values: Floats, chosen: npt.NDArray[np.bool_]) -> Ints:
    """Of each group the place of the smallest of the chosen values."""
    at = np.flatnonzero(chosen)
    if not at.size:
        return at
    own, values = groups[at], values[at]
    least = np.full(int(own.max()) + 1, inf)
    np.minimum.at(least, own, values)
    at = at[values == least[own]]
    _, first = np.unique(groups[at], return_index=True)
    return np.asarray(at[first])
