"""Table: all ways to run a field's layers and to share their state, of which each shape takes some.

A setting says how many replicas there are and how large a micro-batch is, and so how many of those
make up the batch; so that the plans of a shape are found by comparing columns of numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Ints
from windlass.cost.batched.config_keys import LayerConfig, ShardingOption, ShardingOptions
from windlass.cost.batched.plan_table import LayerConfigTable
from windlass.cost.batched.sharding_table import ShardingTable
from windlass.planner.space.options import divisors
from windlass.schema.graph import Precision


class ConfigFamily(NamedTuple):
    """Plans that share a cut, a precision, and what is set apart for state that lives away."""

    tensor: int
    replicas: int
    precision: Precision
    moves: bool
    """Whether compute units are set apart for moves to and from the homes of optimizer state."""
    shares: tuple[ShardingOption, ...]


@dataclass(frozen=True, eq=False)
class ConfigTable:
    """The settings of all plans of several micro-batches or of one, of several stages or of one.

    Args:
        families: each with a block of its own, in the order of `blocks`.
        blocks: of the families.
        settings: family by family.
        block: of each setting.
        batch: sequences of a step.
    """

    families: Sequence[ConfigFamily]
    blocks: ShardingTable
    settings: LayerConfigTable
    block: Ints
    batch: int

    @classmethod
    def of(
        cls,
        families: Sequence[ConfigFamily],
        blocks: ShardingTable,
        *,
        batch: int,
        micro: int | None,
        sums: bool,
        parted: bool,
    ) -> "ConfigTable":
        """The table of some families.

        Args:
            families: of the field.
            blocks: of them, one for each.
            batch: sequences of a step.
            micro: sequences of a micro-batch; None leaves it open.
            sums: whether a step has several micro-batches.
            parted: whether there are several stages.
        """
        found = [
            (
                at,
                LayerConfig(
                    each.tensor, each.precision, compiled, size, sums, parted, each.replicas,
                    each.moves,
                ),
            )
            for at, each in enumerate(families)
            for compiled in (False, True)
            for size in divisors(batch // each.replicas)
            if micro in (None, size)
        ]  # fmt: skip
        return cls(
            families,
            blocks,
            LayerConfigTable(tuple(setting for _, setting in found)),
            np.array([at for at, _ in found], dtype=np.int64),
            batch,
        )

    @cached_property
    def micro(self) -> Ints:
        """Of each setting the sequences of a micro-batch."""
        return np.array([each.micro for each in self.settings.all], dtype=np.int64)

    @cached_property
    def micros(self) -> Ints:
        """Of each setting the micro-batches that make up the batch."""
        replicas = np.array([each.replicas for each in self.settings.all], dtype=np.int64)
        return np.asarray(self.batch // (replicas * self.micro))

    @cached_property
    def devices(self) -> Ints:
        """Of each setting the devices of a stage."""
        found = [int(each.tensor) * each.replicas for each in self.settings.all]
        return np.array(found, dtype=np.int64)

    @cached_property
    def cut(self) -> Ints:
        """Of each setting a number that those share of as many slices and replicas."""
        known: dict[tuple[int, int], int] = {}
        found = [
            known.setdefault((each.tensor, each.replicas), len(known)) for each in self.settings.all
        ]
        return np.array(found, dtype=np.int64)

    @cached_property
    def modes(self) -> tuple[tuple[int, Precision, bool], ...]:
        """Slices, precision, compiled or not, as they go together in any setting."""
        return tuple(self._numbers)

    @cached_property
    def mode(self) -> Ints:
        """Of each setting the place among `modes`."""
        found = [self._numbers[_mode(each)] for each in self.settings.all]
        return np.array(found, dtype=np.int64)

    @cached_property
    def _numbers(self) -> dict[tuple[int, Precision, bool], int]:
        found = dict.fromkeys(_mode(each) for each in self.settings.all)
        return {mode: at for at, mode in enumerate(found)}


def _mode(setting: LayerConfig) -> tuple[int, Precision, bool]:
    return setting.tensor, setting.precision, setting.compiled


def sharding_options(family: ConfigFamily, *, sums: bool) -> ShardingOptions:
    """The block of a family's plans; `sums` as in `Block`."""
    tensor, replicas, precision, moves, shares = family
    return ShardingOptions(tensor, precision, sums, replicas, shares, moves)
