"""Rows: plans of one shape as places in tables in which what they share stands once.

A plan is a run, how layers are computed and in how many micro-batches, and a pair, how replicas
share their state. Settings are the table of many shapes; nothing of a plan is built until it wins.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.batched.config_keys import (
    ComputeConfig,
    LayerConfig,
    RecomputeConfig,
    ShardingOption,
    ShardingOptions,
)
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.sharding_table import ShardingTable
from windlass.cost.batched.state_cost import StateCosts


class LazyTable:
    """Numbers of settings, a row for each, found once they are asked for.

    Args:
        find: the numbers of some of them by their places, a row for each.
        alike: a number for each that those share which are found together.
    """

    def __init__(self, find: Callable[[Ints], Floats], alike: Ints) -> None:
        self._find, self._alike = find, alike
        self._known = np.zeros(len(alike), dtype=bool)
        self._rows = np.zeros((len(alike), 0))
        self._numbers = np.zeros(len(alike), dtype=np.int64)
        self._numbered: dict[bytes, int] = {}

    def at(self, places: Ints) -> Floats:
        """The rows of settings by their places."""
        self._find_missing(places)
        return np.asarray(self._rows[places])

    def numbers(self, places: Ints) -> Ints:
        """A number for each that those share whose rows are equal."""
        self._find_missing(places)
        return np.asarray(self._numbers[places])

    def _find_missing(self, places: Ints) -> None:
        if not self._known[places].all():
            asked = np.unique(self._alike[places[~self._known[places]]])
            missing = np.flatnonzero(np.isin(self._alike, asked))
            found = self._find(missing)
            if not self._rows.size:
                self._rows = np.zeros((len(self._known), found.shape[1]))
            self._rows[missing], self._known[missing] = found, True
            known = self._numbered
            self._numbers[missing] = [known.setdefault(row.tobytes(), len(known)) for row in found]


@dataclass(frozen=True, eq=False)
class LayerConfigTable:
    """A table of settings, each of them once."""

    all: tuple[LayerConfig, ...]

    @cached_property
    def alone(self) -> Ints:
        """A number for each that those share which differ in how many replicas there are only."""
        known: dict[LayerConfig, int] = {}
        return np.array(
            [known.setdefault(each._replace(replicas=1), len(known)) for each in self.all]
        )

    @cached_property
    def devices(self) -> Ints:
        """Of each the devices of a stage."""
        return np.array([each.tensor * each.replicas for each in self.all])

    @cached_property
    def micro(self) -> Ints:
        """Of each the sequences of a micro-batch."""
        return np.array([each.micro for each in self.all], dtype=np.int64)

    @cached_property
    def compiled(self) -> Bools:
        """Of each whether its layers are compiled."""
        return np.array([each.compiled for each in self.all])

    @cached_property
    def mode(self) -> Ints:
        """A number for each that those share whose layers are cut and compute alike."""
        known: dict[tuple[object, ...], int] = {}
        modes = [(e.tensor, e.precision, e.compiled, e.sums, e.parted, e.moves) for e in self.all]
        return np.array([known.setdefault(mode, len(known)) for mode in modes])

    def some(self, places: Ints) -> tuple[LayerConfig, ...]:
        """Settings by their places."""
        return tuple(self.all[at] for at in places.tolist())

    def table(self, chain: LayerCosts, name: str, find: Callable[[Ints], Floats]) -> LazyTable:
        """A table of numbers of a chain, the same one for the same name.

        The first time that one of a mode is asked for, all of that mode are found.
        """
        if (chain, name) not in self._tables:
            self._tables[chain, name] = LazyTable(find, self.mode)
        return self._tables[chain, name]

    @cached_property
    def _tables(self) -> dict[tuple[LayerCosts, str], LazyTable]:
        return {}

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Numbers of slices that there are."""
        return tuple(dict.fromkeys(each.tensor for each in self.all))

    @cached_property
    def tensor(self) -> Ints:
        """Of each the place of its number of slices among `tensors`."""
        places = {tensor: at for at, tensor in enumerate(self.tensors)}
        return np.array([places[each.tensor] for each in self.all])


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Plans of one shape."""

    settings: LayerConfigTable
    agains: tuple[RecomputeConfig, ...]
    """What of the runs is computed again, each once."""
    table: ShardingTable
    """That blocks and pairs are places in."""
    block: Ints
    """Of each run its place in the table."""
    setting: Ints
    """Of each run."""
    again: Ints
    """Of each run."""
    micros: Ints
    """Of each run."""
    shared: Ints
    """Of each block of the runs, in turn, its place in the table."""
    run: Ints
    """Of each plan."""
    pair: Ints
    """Of each plan its place among the pairs of `shared`, in turn."""

    @property
    def count(self) -> int:
        """How many plans there are."""
        return len(self.run)

    @cached_property
    def runs(self) -> tuple[ComputeConfig, ...]:
        """The runs themselves."""
        return tuple(map(self.run_of, range(len(self.setting))))

    def run_of(self, run: int) -> ComputeConfig:
        """One of the runs."""
        return ComputeConfig(
            self.settings.all[self.setting[run]],
            self.agains[self.again[run]],
            int(self.micros[run]),
        )

    def share_of(self, pair: int) -> ShardingOption:
        """One of the pairs."""
        return self.table.shares[int(self.places[pair])]

    @cached_property
    def blocks(self) -> tuple[ShardingOptions, ...]:
        """The blocks themselves."""
        return tuple(self.table.all[at] for at in self.shared.tolist())

    @cached_property
    def places(self) -> Ints:
        """Of each pair its place in the table."""
        return self.table.places(self.shared)

    @cached_property
    def pairs(self) -> Ints:
        """The rts and rts' (columns) of each pair."""
        return np.asarray(self.table.degrees[self.places])

    @cached_property
    def home(self) -> Ints:
        """Of each pair the place of its optimizer state's tier among those of the table."""
        return np.asarray(self.table.home[self.places])

    def states(self, chain: LayerCosts) -> StateCosts:
        """What pairs hold and exchange, a row for each place of the table; see `places`."""
        return self.table.states(chain, self.shared)

    def only(self, chosen: Bools) -> "PlanTable":
        """Some of the plans, with the runs and blocks that they need."""
        needed = np.zeros(len(self.setting), dtype=bool)
        needed[self.run[chosen]] = True
        kept = np.isin(self.shared, self.block[needed])
        of_pair = np.repeat(kept, self.table.counts[self.shared])
        return replace(
            self,
            block=self.block[needed],
            setting=self.setting[needed],
            again=self.again[needed],
            micros=self.micros[needed],
            shared=self.shared[kept],
            run=(np.cumsum(needed) - 1)[self.run[chosen]],
            pair=(np.cumsum(of_pair) - 1)[self.pair[chosen]],
        )

    def one(self, place: int) -> "PlanTable":
        """One of the plans."""
        run, share = int(self.run[place]), self.share_of(self.pair[place])
        block = self.table.all[self.block[run]]
        return PlanTable.of([(block._replace(pairs=(share,)), [self.run_of(run)])])

    @classmethod
    def crossed(
        cls,
        settings: LayerConfigTable,
        agains: tuple[RecomputeConfig, ...],
        table: ShardingTable,
        runs: Ints,
    ) -> "PlanTable":
        """Each run with each pair of its block.

        Args:
            settings: that runs name.
            agains: that runs name.
            table: of blocks that runs name.
            runs: a row for each: its block, setting, again and micro-batches.
        """
        block, setting, again, micros = runs.T
        shared, place = np.unique(block, return_inverse=True)
        counts = table.counts[shared]
        each = counts[place]
        firsts = np.cumsum(counts) - counts
        run = np.repeat(np.arange(len(runs)), each)
        return cls(
            settings=settings,
            agains=agains,
            table=table,
            block=block,
            setting=setting,
            again=again,
            micros=micros,
            shared=shared,
            run=run,
            pair=np.arange(len(run)) + np.repeat(firsts[place] - np.cumsum(each) + each, each),
        )

    @classmethod
    def of(cls, families: Sequence[tuple[ShardingOptions, Sequence[ComputeConfig]]]) -> "PlanTable":
        """Plans that run in each of some ways with each pair of a block, for several blocks."""
        runs = [(at, run) for at, (_, able) in enumerate(families) for run in able]
        settings = {run.setting: None for _, run in runs}
        agains = {run.again: None for _, run in runs}
        places = {each: at for at, each in enumerate((*settings, *agains))}
        found = [
            (at, places[run.setting], places[run.again] - len(settings), run.micros)
            for at, run in runs
        ]
        return cls.crossed(
            LayerConfigTable(tuple(settings)),
            tuple(agains),
            ShardingTable(tuple(block for block, _ in families)),
            np.array(found, dtype=np.int64),
        )
