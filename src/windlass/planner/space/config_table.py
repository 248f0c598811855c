"""Config table: all layer configurations and sharding options of a plan space, as arrays.

A configuration has a number of replicas and a micro-batch size, which give the number of
micro-batches of a step; so the plans of one pipeline shape are found by comparing arrays.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from windlass.cost import (
    Ints,
    LayerConfig,
    LayerConfigTable,
    ShardingOption,
    ShardingOptions,
    ShardingTable,
)
from windlass.planner.space.options import divisors
from windlass.schema import Precision


class ConfigFamily(NamedTuple):
    """Plans that share parallel degrees, a precision, and compute units reserved for offloading."""

    tensor: int
    replicas: int
    precision: Precision
    offloads: bool
    """Whether compute units are reserved for moving optimizer state between tiers."""
    options: tuple[ShardingOption, ...]


@dataclass(frozen=True, eq=False)
class ConfigTable:
    """The layer configurations of all plans that agree on gradient accumulation and on pipelining.

    Args:
        families: families of the plan space, each with its entry in `sharding_table`.
        sharding_table: sharding options of each family, in the same order.
        layer_configs: configurations, family by family.
        options: index of each configuration's entry in `sharding_table`, `[config]`.
        batch: sequences of a step.
    """

    families: Sequence[ConfigFamily]
    sharding_table: ShardingTable
    layer_configs: LayerConfigTable
    options: Ints
    batch: int

    @classmethod
    def of(
        cls,
        families: Sequence[ConfigFamily],
        sharding_table: ShardingTable,
        *,
        batch: int,
        micro: int | None,
        sums: bool,
        parted: bool,
    ) -> "ConfigTable":
        """The table of some families.

        Args:
            families: families of the plan space.
            sharding_table: sharding options, one entry for each family.
            batch: sequences of a step.
            micro: sequences of a micro-batch; None leaves it open.
            sums: whether a step has several micro-batches.
            parted: whether there are several pipeline stages.
        """
        configs = [
            (
                index,
                LayerConfig(
                    each.tensor, each.precision, compiled, size, sums, parted, each.replicas,
                    each.offloads,
                ),
            )
            for index, each in enumerate(families)
            for compiled in (False, True)
            for size in divisors(batch // each.replicas)
            if micro in (None, size)
        ]  # fmt: skip
        return cls(
            families,
            sharding_table,
            LayerConfigTable(tuple(setting for _, setting in configs)),
            np.array([index for index, _ in configs], dtype=np.int64),
            batch,
        )

    @cached_property
    def micro(self) -> Ints:
        """Sequences of a micro-batch, `[config]`."""
        return np.array([each.micro for each in self.layer_configs.all], dtype=np.int64)

    @cached_property
    def microbatches(self) -> Ints:
        """Micro-batches of a step, `[config]`."""
        replicas = np.array([each.replicas for each in self.layer_configs.all], dtype=np.int64)
        return np.asarray(self.batch // (replicas * self.micro))

    @cached_property
    def devices(self) -> Ints:
        """Devices of a pipeline stage, `[config]`."""
        counts = [int(each.tensor) * each.replicas for each in self.layer_configs.all]
        return np.array(counts, dtype=np.int64)

    @cached_property
    def degrees(self) -> Ints:
        """A number that configurations with equal tensor and data degrees share, `[config]`."""
        numbers: dict[tuple[int, int], int] = {}
        indices = [
            numbers.setdefault((each.tensor, each.replicas), len(numbers))
            for each in self.layer_configs.all
        ]
        return np.array(indices, dtype=np.int64)

    @cached_property
    def modes(self) -> tuple[tuple[int, Precision, bool], ...]:
        """Combinations of tensor degree, precision and compilation that occur, each once."""
        return tuple(self._numbers)

    @cached_property
    def mode(self) -> Ints:
        """Index among `modes`, `[config]`."""
        indices = [self._numbers[_mode(each)] for each in self.layer_configs.all]
        return np.array(indices, dtype=np.int64)

    @cached_property
    def _numbers(self) -> dict[tuple[int, Precision, bool], int]:
        modes = dict.fromkeys(_mode(each) for each in self.layer_configs.all)
        return {mode: index for index, mode in enumerate(modes)}


def _mode(setting: LayerConfig) -> tuple[int, Precision, bool]:
    return setting.tensor, setting.precision, setting.compiled


def sharding_options(family: ConfigFamily, *, sums: bool) -> ShardingOptions:
    """The sharding options of a family's plans; `sums` as in `ShardingOptions.accumulates`."""
    tensor, replicas, precision, moves, shares = family
    return ShardingOptions(tensor, precision, sums, replicas, shares, moves)
