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
        modes = [
            (e.tensor, e.precision, e.compiled, e.accumulates, e.pipelined, e.offloads)
            for e in self.all
        ]
        return np.array([known.setdefault(mode, len(known)) for mode in modes])

    def at(self, places: Ints) -> tuple[LayerConfig, ...]:
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

    layer_configs: LayerConfigTable
    recomputes: tuple[RecomputeConfig, ...]
    """What of the runs is computed again, each once."""
    sharding_table: ShardingTable
    """That blocks and pairs are places in."""
    block: Ints
    """Of each run its place in the table."""
    layer_config: Ints
    """Of each run."""
    recompute: Ints
    """Of each run."""
    microbatches: Ints
    """Of each run."""
    shared: Ints
    """Of each block of the runs, in turn, its place in the table."""
    config: Ints
    """Of each plan."""
    sharding: Ints
    """Of each plan its place among the pairs of `shared`, in turn."""

    @property
    def count(self) -> int:
        """How many plans there are."""
        return len(self.config)

    @cached_property
    def configs(self) -> tuple[ComputeConfig, ...]:
        """The runs themselves."""
        return tuple(map(self.config_of, range(len(self.layer_config))))

    def config_of(self, run: int) -> ComputeConfig:
        """One of the runs."""
        return ComputeConfig(
            self.layer_configs.all[self.layer_config[run]],
            self.recomputes[self.recompute[run]],
            int(self.microbatches[run]),
        )

    def sharding_of(self, pair: int) -> ShardingOption:
        """One of the pairs."""
        return self.sharding_table.options[int(self.places[pair])]

    @cached_property
    def blocks(self) -> tuple[ShardingOptions, ...]:
        """The blocks themselves."""
        return tuple(self.sharding_table.all[at] for at in self.shared.tolist())

    @cached_property
    def places(self) -> Ints:
        """Of each pair its place in the table."""
        return self.sharding_table.places(self.shared)

    @cached_property
    def pairs(self) -> Ints:
        """The rts and rts' (columns) of each pair."""
        return np.asarray(self.sharding_table.degrees[self.places])

    @cached_property
    def optimizer_tier(self) -> Ints:
        """Of each pair the place of its optimizer state's tier among those of the table."""
        return np.asarray(self.sharding_table.optimizer_tier[self.places])

    def states(self, chain: LayerCosts) -> StateCosts:
        """What pairs hold and exchange, a row for each place of the table; see `places`."""
        return self.sharding_table.states(chain, self.shared)

    def select(self, chosen: Bools) -> "PlanTable":
        """Some of the plans, with the runs and blocks that they need."""
        needed = np.zeros(len(self.layer_config), dtype=bool)
        needed[self.config[chosen]] = True
        kept = np.isin(self.shared, self.block[needed])
        of_pair = np.repeat(kept, self.sharding_table.counts[self.shared])
        return replace(
            self,
            block=self.block[needed],
            layer_config=self.layer_config[needed],
            recompute=self.recompute[needed],
            microbatches=self.microbatches[needed],
            shared=self.shared[kept],
            config=(np.cumsum(needed) - 1)[self.config[chosen]],
            sharding=(np.cumsum(of_pair) - 1)[self.sharding[chosen]],
        )

    def one(self, place: int) -> "PlanTable":
        """One of the plans."""
        run, share = int(self.config[place]), self.sharding_of(self.sharding[place])
        block = self.sharding_table.all[self.block[run]]
        return PlanTable.of([(block._replace(options=(share,)), [self.config_of(run)])])

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
            layer_configs=settings,
            recomputes=agains,
            sharding_table=table,
            block=block,
            layer_config=setting,
            recompute=again,
            microbatches=micros,
            shared=shared,
            config=run,
            sharding=np.arange(len(run)) + np.repeat(firsts[place] - np.cumsum(each) + each, each),
        )

    @classmethod
    def of(cls, families: Sequence[tuple[ShardingOptions, Sequence[ComputeConfig]]]) -> "PlanTable":
        """Plans that run in each of some ways with each pair of a block, for several blocks."""
        runs = [(at, run) for at, (_, able) in enumerate(families) for run in able]
        settings = {run.layer: None for _, run in runs}
        agains = {run.recompute: None for _, run in runs}
        places = {each: at for at, each in enumerate((*settings, *agains))}
        found = [
            (at, places[run.layer], places[run.recompute] - len(settings), run.microbatches)
            for at, run in runs
        ]
        return cls.crossed(
            LayerConfigTable(tuple(settings)),
            tuple(agains),
            ShardingTable(tuple(block for block, _ in families)),
            np.array(found, dtype=np.int64),
        )
