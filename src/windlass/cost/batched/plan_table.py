"""Plan table: plans of one pipeline shape as indices of tables that hold what they share once.

A plan is a config (how layers compute, in how many micro-batches) and a sharding index. Layer
configurations are a table of many shapes; no plan is built until it wins.
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
    """Numbers of layer configurations, `[config, number]`, computed when they are asked for.

    Args:
        find: computes the rows of some configurations, given their indices.
        alike: a number that configurations share which are computed together.
    """

    def __init__(self, find: Callable[[Ints], Floats], alike: Ints) -> None:
        self._find, self._alike = find, alike
        self._known = np.zeros(len(alike), dtype=bool)
        self._rows = np.zeros((len(alike), 0))
        self._numbers = np.zeros(len(alike), dtype=np.int64)
        self._numbered: dict[bytes, int] = {}

    def at(self, places: Ints) -> Floats:
        """Rows of the given configurations."""
        self._find_missing(places)
        return np.asarray(self._rows[places])

    def numbers(self, places: Ints) -> Ints:
        """A number that configurations with equal rows share."""
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
    """A table of layer configurations, each once."""

    all: tuple[LayerConfig, ...]

    @cached_property
    def alone(self) -> Ints:
        """A number that configurations share which differ only in replicas, `[config]`."""
        known: dict[LayerConfig, int] = {}
        return np.array(
            [known.setdefault(each._replace(replicas=1), len(known)) for each in self.all]
        )

    @cached_property
    def devices(self) -> Ints:
        """Devices of a stage, `[config]`."""
        return np.array([each.tensor * each.replicas for each in self.all])

    @cached_property
    def micro(self) -> Ints:
        """Sequences of a micro-batch, `[config]`."""
        return np.array([each.micro for each in self.all], dtype=np.int64)

    @cached_property
    def compiled(self) -> Bools:
        """Whether layers are compiled, `[config]`."""
        return np.array([each.compiled for each in self.all])

    @cached_property
    def mode(self) -> Ints:
        """A number that configurations share which are sharded and compute alike, `[config]`."""
        known: dict[tuple[object, ...], int] = {}
        modes = [
            (e.tensor, e.precision, e.compiled, e.accumulates, e.pipelined, e.offloads)
            for e in self.all
        ]
        return np.array([known.setdefault(mode, len(known)) for mode in modes])

    def at(self, places: Ints) -> tuple[LayerConfig, ...]:
        """The configurations at some indices."""
        return tuple(self.all[at] for at in places.tolist())

    def table(self, chain: LayerCosts, name: str, find: Callable[[Ints], Floats]) -> LazyTable:
        """A table of numbers of some layers, the same one for the same name.

        When one configuration of a mode is first asked for, all of that mode are computed.
        """
        if (chain, name) not in self._tables:
            self._tables[chain, name] = LazyTable(find, self.mode)
        return self._tables[chain, name]

    @cached_property
    def _tables(self) -> dict[tuple[LayerCosts, str], LazyTable]:
        return {}

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Tensor degrees that occur."""
        return tuple(dict.fromkeys(each.tensor for each in self.all))

    @cached_property
    def tensor(self) -> Ints:
        """Index among `tensors`, `[config]`."""
        places = {tensor: at for at, tensor in enumerate(self.tensors)}
        return np.array([places[each.tensor] for each in self.all])


@dataclass(frozen=True, eq=False)
class PlanTable:
    """Plans of one pipeline shape."""

    layer_configs: LayerConfigTable
    recomputes: tuple[RecomputeConfig, ...]
    """Recompute configurations, each once."""
    sharding_table: ShardingTable
    """The table that `block` and `shared` are indices of."""
    block: Ints
    """Index of the sharding options, `[config]`."""
    layer_config: Ints
    """Index of the layer configuration, `[config]`."""
    recompute: Ints
    """Index among `recomputes`, `[config]`."""
    microbatches: Ints
    """Micro-batches of a step, `[config]`."""
    shared: Ints
    """Indices of the sharding options that occur, in order."""
    config: Ints
    """Index of the config, `[plan]`."""
    sharding: Ints
    """Sharding index, among the options of `shared` in order, `[plan]`."""

    @property
    def count(self) -> int:
        """How many plans there are."""
        return len(self.config)

    @cached_property
    def configs(self) -> tuple[ComputeConfig, ...]:
        """The configs themselves."""
        return tuple(map(self.config_of, range(len(self.layer_config))))

    def config_of(self, run: int) -> ComputeConfig:
        """One of the configs."""
        return ComputeConfig(
            self.layer_configs.all[self.layer_config[run]],
            self.recomputes[self.recompute[run]],
            int(self.microbatches[run]),
        )

    def sharding_of(self, pair: int) -> ShardingOption:
        """One of the sharding options."""
        return self.sharding_table.options[int(self.places[pair])]

    @cached_property
    def blocks(self) -> tuple[ShardingOptions, ...]:
        """The sharding options that occur, block by block."""
        return tuple(self.sharding_table.all[at] for at in self.shared.tolist())

    @cached_property
    def places(self) -> Ints:
        """Row of the sharding table, `[sharding]`."""
        return self.sharding_table.places(self.shared)

    @cached_property
    def pairs(self) -> Ints:
        """Sharding degrees of parameters and optimizer state, `[sharding, 2]`."""
        return np.asarray(self.sharding_table.degrees[self.places])

    @cached_property
    def optimizer_tier(self) -> Ints:
        """Index of the optimizer state's tier among the table's tiers, `[sharding]`."""
        return np.asarray(self.sharding_table.optimizer_tier[self.places])

    def states(self, chain: LayerCosts) -> StateCosts:
        """Costs of state, a row for each row of the sharding table; see `places`."""
        return self.sharding_table.states(chain, self.shared)

    def select(self, chosen: Bools) -> "PlanTable":
        """Some of the plans, with the configs and sharding options that they need."""
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
        """Each config with each of its sharding options.

        Args:
            settings: layer configurations that configs name.
            agains: recompute configurations that configs name.
            table: sharding options that configs name.
            runs: `[config, 4]`: indices of options, layer configuration and recompute, and
                micro-batches.
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
        """Plans that combine some configs with each of some sharding options."""
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
