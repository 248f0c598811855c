"""Stage times: seconds of the passes of many configs, combined to stages."""

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.batched.layer_cost import LayerCosts
from windlass.cost.batched.layer_ops import HELD
from windlass.cost.batched.pipeline.deferred_update_delay import FirstPassCosts, SentTiedWeights
from windlass.cost.batched.pipeline.gradient_reduce_end import (
    LastPasses,
    TiedWeightTimes,
    equal_neighbours,
)
from windlass.cost.batched.pipeline.level_simulator import PassDurations, TiedGradReturn
from windlass.cost.batched.pipeline.steady_state import simulate_levels
from windlass.cost.batched.plan_table import LayerConfigTable, PlanTable
from windlass.cost.batched.schedule_index import PipelineShape
from windlass.cost.batched.stage_sums import (
    LayerSums,
    RecomputeSums,
    StagePartition,
    recompute_by_layer,
)
from windlass.schema import Recompute

PassName = Literal[
    "forward", "backward", "backward_input", "backward_weight", "sum_first", "sum_later"
]
_NAMES: tuple[PassName, ...] = (
    "forward", "backward", "backward_input", "backward_weight", "sum_first", "sum_later",
)  # fmt: skip
_SINGLE = 5
"""Numbers of a configuration that do not depend on layer kinds."""
_MESSAGES = 3
"""Those of them that are messages."""


class ConfigTimes:
    """Seconds of passes by layer kind, `[config, ...]`.

    Args:
        parts: partition of the layers.
        agains: recompute mode of each layer, for each recompute configuration.
        variants: as in `LayerCosts.variants`.
        numbers: a column for each of `_NAMES` and variant of a kind, and for each of `_SINGLE`.
        again: recompute configuration of each config.
        alike_runs: a number that configs share only if their numbers are equal.
    """

    def __init__(
        self,
        parts: StagePartition,
        agains: Sequence[Sequence[Recompute]],
        variants: Ints,
        numbers: Floats,
        again: Ints,
        alike_runs: Ints,
    ) -> None:
        self._parts, self._agains, self._numbers, self._again = parts, agains, numbers, again
        self._variants, self._alike_runs = variants, alike_runs
        kinds = np.split(numbers[:, :-_SINGLE], len(_NAMES), axis=1)
        self._by_kind = dict(zip(_NAMES, kinds, strict=True))
        self.load, self.taking, self.message, self.lending, self.handing = numbers[:, -_SINGLE:].T
        """Loading a micro-batch; adding the gradient of lent weights to the owner's; messages with
        an output, with weights that are lent, and with their gradient."""
        self.alike = equal_neighbours(parts.kinds, agains)
        """Whether each layer but the last equals the next one in all configs, `[layer]`."""

    @classmethod
    def of(cls, chain: LayerCosts, parts: StagePartition, rows: PlanTable) -> "ConfigTimes":
        """Times of all configs of plans of one shape."""
        agains = [recompute_by_layer(parts.shape, parts.ends, each) for each in rows.recomputes]
        settings, pipeline = rows.layer_configs, parts.shape.pipeline
        times = settings.table(chain, "times", _numbers(chain, settings))
        ways = settings.table(chain, f"ways of {pipeline}", _ways(chain, settings, pipeline))
        numbers = times.at(rows.layer_config)
        each_byte, each_message = np.split(ways.at(rows.layer_config), 2, axis=1)
        messages = numbers[:, -_MESSAGES:] * each_byte + each_message
        numbers = np.concatenate([numbers[:, :-_MESSAGES], messages], axis=1)
        alike_runs = times.numbers(rows.layer_config)
        for other, count in (
            (ways.numbers(rows.layer_config), len(settings.all)),
            (rows.recompute, len(agains)),
        ):
            alike_runs = alike_runs * count + other
        return cls(parts, agains, chain.variants, numbers, rows.recompute, alike_runs)

    def once(self) -> tuple["ConfigTimes", Ints]:
        """Each distinct row once, and the index of each row's."""
        alike_runs, first, place = np.unique(
            self._alike_runs, return_index=True, return_inverse=True
        )
        return (
            ConfigTimes(
                self._parts,
                self._agains,
                self._variants,
                self._numbers[first],
                self._again[first],
                alike_runs,
            ),
            place,
        )

    def sums(self, *names: PassName, again: bool = False) -> LayerSums:
        """Sums of passes, one after the other, with recompute if `again`."""
        each = np.add.reduce([self._by_kind[name] for name in names])
        kinds = np.arange(len(self._variants))
        if not again:
            return LayerSums(self._parts, each[:, kinds])
        whole, some = self._by_kind["forward"][:, kinds], each[:, self._variants] - each[:, kinds]
        repeats = RecomputeSums(np.concatenate([whole, some], axis=1), self._agains, self._again)
        return LayerSums(self._parts, each[:, kinds], repeats)

    def repeated(self, kinds: Ints) -> tuple[Floats, Floats]:
        """Shortest recompute of some layer kinds.

        Args:
            kinds: indices of kinds, without variants.

        Returns:
            Seconds of full and of selective recompute of a layer, `[config]`.
        """
        back = self._by_kind["backward"]
        some = back[:, self._variants[kinds]] - back[:, kinds]
        return self._by_kind["forward"][:, kinds].min(axis=1), some.min(axis=1)


def _numbers(chain: LayerCosts, settings: LayerConfigTable) -> Callable[[Ints], Floats]:
    """Finds the numbers of configurations for `ConfigTimes`, with bytes of messages."""

    def of(places: Ints) -> Floats:
        passes = chain.passes(settings.at(places))
        _, gradient_bytes, weight_bytes = passes.widths.T
        output = passes.held[:, HELD.index("output"), 0]
        nbytes = (output, passes.lent * weight_bytes, passes.lent * gradient_bytes)
        single = np.stack([passes.load_seconds, passes.taking, *nbytes], axis=1)
        return np.concatenate([*(getattr(passes, name) for name in _NAMES), single], axis=1)

    return of


def _ways(chain: LayerCosts, settings: LayerConfigTable, pipeline: int) -> Callable[[Ints], Floats]:
    """Finds seconds of a byte to another stage, and of a message apart from its bytes."""
    return lambda places: np.stack(chain.message_ways(settings.at(places), pipeline), axis=1)


class StageTimes:
    """Seconds of passes on each stage.

    Args:
        chain: costs of layers.
        parts: partition of the layers.
        rows: the plans.
        stops: whether devices block on some communication after their passes.
    """

    def __init__(
        self, chain: LayerCosts, parts: StagePartition, rows: PlanTable, *, stops: bool
    ) -> None:
        shape = parts.shape
        every = ConfigTimes.of(chain, parts, rows)
        times, self.first = every.once()
        """Index of each config among `firsts`."""
        loans = _loans(chain, parts, times)
        self.firsts = FirstPassCosts(
            forward=times.sums("forward"), load=times.load, message=times.message, alike=times.alike
        )
        self.lent = (
            None
            if loans is None
            else SentTiedWeights(layer=chain.tied[0][0], owner=loans.owner, seconds=loans.lending)
        )
        self.place = np.arange(len(rows.layer_config)) if shape.repeats else self.first
        """Index of each config among `passed`."""
        in_turn = chain.machine.execution_model == "bulk-synchronous"
        durations = _durations(parts, times, loans, in_turn, stops)
        last = every if shape.repeats else times
        self.passed = LastPasses(
            folded=simulate_levels(
                shape, durations, rows.microbatches.astype(np.float64), self.first
            ),
            layers=_adding(parts, last, first=shape.microbatches == 1),
            message=last.message,
            loans=_loans(chain, parts, last),
            in_turn=in_turn,
            equal_neighbours=last.alike,
        )


def _adding(parts: StagePartition, times: ConfigTimes, *, first: bool) -> LayerSums:
    """The pass that adds to gradients, of the first micro-batch or of a later one."""
    parted = parts.shape.schedule == "zero-bubble"
    whole: PassName = "backward_weight" if parted else "backward"
    return times.sums(whole, "sum_first" if first else "sum_later", again=not parted)


def _durations(
    parts: StagePartition,
    times: ConfigTimes,
    loans: TiedWeightTimes | None,
    in_turn: bool,
    stops: bool,
) -> PassDurations:
    parted = parts.shape.schedule == "zero-bubble"
    later, first = (_adding(parts, times, first=each).by_chunk().T for each in (False, True))
    none = np.zeros_like(later)
    inputs = times.sums("backward_input", again=True).by_chunk().T if parted else none
    return PassDurations(
        forward=times.sums("forward").by_chunk().T,
        backward=inputs if parted else later,
        backward_first=inputs if parted else first,
        weight=later if parted else none,
        weight_first=first if parted else none,
        load=times.load,
        message=times.message,
        lending=np.zeros_like(times.message) if loans is None else loans.lending,
        lender=0 if loans is None else int(parts.stage[loans.owner]),
        loan=None if loans is None or parted else _way_back(loans, parts),
        stops=stops,
        in_turn=in_turn,
    )


def _loans(chain: LayerCosts, parts: StagePartition, times: ConfigTimes) -> TiedWeightTimes | None:
    """Times of the first tied weights; None if they are not on two stages."""
    if not chain.tied:
        return None
    layer, owner = chain.tied[0]
    if parts.stage[owner] == parts.stage[layer]:
        return None
    parted = parts.shape.schedule == "zero-bubble"
    after = times.sums(
        "backward_weight" if parted else "backward",
        "sum_first" if parts.shape.microbatches == 1 else "sum_later",
    )
    return TiedWeightTimes(
        owner=owner,
        lending=times.lending,
        message=times.handing,
        after=after.over(layer, layer + 1),
        taking=times.taking,
    )


def _way_back(loans: TiedWeightTimes, parts: StagePartition) -> TiedGradReturn:
    return TiedGradReturn(
        message=loans.message,
        after=loans.after,
        taking=loans.taking,
        owner=int(parts.chunk[loans.owner]),
    )


def host_pace(chain: LayerCosts, shape: PipelineShape, rows: PlanTable) -> Floats:
    """Slowdown of each config by the slowest of its hosts, `[config]`."""
    counts, at = np.unique(rows.layer_configs.devices[rows.layer_config], return_inverse=True)
    return np.array(
        [chain.machine.straggler_factor(shape.pipeline * int(each)) for each in counts]
    )[at]
