"""States, layer by layer: what weights, gradients and optimizer state take, as replicas share them.

Read off the clock's own prices, once for each kind of layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_ways import Block, Setting, Share
from windlass.cost.links import Links, Ways
from windlass.cost.step import StepCost
from windlass.program.far import state_at_home
from windlass.program.instruction import Instruction
from windlass.program.shards import parts
from windlass.program.sizes import StateSizes, state_sizes
from windlass.program.values import STAGING_BYTES
from windlass.spec.graph import Graph
from windlass.spec.machine import Machine
from windlass.spec.plan import NEAR, Home, Plan

_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class StateNumbers:
    """Bytes of state and seconds that it costs: for each pair of a block and kind of layer."""

    held: _Floats
    """Weights and optimizer state that are always there."""
    gather: _Floats
    reduce: _Floats
    """On the links."""
    waited: _Floats
    """Of `reduce`, in which the device does nothing else."""
    after: _Floats
    """What comes behind the passes: updates and what follows them."""
    norm_bytes: _Floats
    norm_launches: _Floats
    under_way: _Floats
    """Of an update that goes on beside what follows, until the layer can be used again."""
    far: _Floats
    """Bytes of state at home beyond the near tier."""
    staging: _Floats
    """Of each pair: bytes that such state passes through, once for all layers."""
    far_capacity: _Floats
    """Of each pair: bytes of the tier that it lives in; infinite where it stays near."""


class _Kept(NamedTuple):
    """Of each kind, in order of the first layers: what depends on rts' alone."""

    sizes: Mapping[str, StateSizes]
    update: _Floats
    launches: _Floats


class StatePrices:
    """Prices of the states of a chain of layers.

    Args:
        plan_of: a plan of a setting, with rts and rts'.
        graph: of the chain.
        machine: that it runs on.
        ways: of rings on it, as `Links` takes them.
    """

    def __init__(
        self,
        plan_of: Callable[[Setting, int, int], Plan],
        graph: Graph,
        machine: Machine,
        ways: Ways,
    ) -> None:
        self._ways = ways
        self._plan_of, self._graph, self._machine = plan_of, graph, machine
        names = [kind.name for kind in graph.layer_kinds()]
        self._names: Sequence[str] = tuple(dict.fromkeys(names))
        self._first = tuple(names.index(name) for name in self._names)
        self._tiers = {tier.name: tier for tier in machine.device.tiers}
        self._homes = {name: Home(optimizer=name) for name in (NEAR, *self._tiers)}
        self._kept: Callable[[Setting, int], _Kept] = cache(self._kept_)
        self._shared_plan: Callable[[Setting, int, int], Plan] = cache(plan_of)
        self._exchanged: Callable[[Setting, int, int], _Floats] = cache(self._exchanged_)

    def of(self, block: Block) -> StateNumbers:
        """The numbers of all pairs of a block."""
        rows = [self._shared(block, share) for share in block.pairs]
        held, gather, reduce, waited, after, norm_bytes, launches, under_way, far = np.stack(
            rows, axis=1
        )
        homes = [share.home for share in block.pairs]
        return StateNumbers(
            held=held,
            gather=gather,
            reduce=reduce,
            waited=waited,
            after=after,
            norm_bytes=norm_bytes,
            norm_launches=launches,
            under_way=under_way,
            far=far,
            staging=np.array([0.0 if home == NEAR else STAGING_BYTES for home in homes]),
            far_capacity=np.array(
                [np.inf if home == NEAR else self._tiers[home].capacity_bytes for home in homes]
            ),
        )

    def _shared(self, block: Block, share: Share) -> _Floats:
        """The numbers of one pair, by kind of layer, in the order of `of`."""
        setting, (weights, optimizer, home) = block.setting, share
        plan = self._shared_plan(setting, weights, optimizer)
        plan = plan.model_copy(update={"home": self._homes[home]})
        states = self._kept(setting._replace(replicas=1), optimizer)
        gather, reduce, waited, spread = self._exchanged(setting, weights, optimizer)
        found = [self._of_kind(plan, states.sizes[name]) for name in self._names]
        held, norm_bytes, moving, far = np.array(found).T
        after, under_way = self._updates(plan, states.update, moving, spread)
        rows = [held, gather, reduce, waited, after, norm_bytes]
        rows += [states.launches, under_way, far]
        return np.stack(rows)

    def _exchanged_(self, setting: Setting, weights: int, optimizer: int) -> _Floats:
        """Seconds to gather, to reduce, to wait for that and to spread (rows), of each kind."""
        plan = self._shared_plan(setting, weights, optimizer)
        states = self._kept(setting._replace(replicas=1), optimizer)
        links = Links(plan, self._graph, self._machine, ways=self._ways)

        def of_kind(sizes: StateSizes) -> tuple[float, ...]:
            if not sizes.weights or not self._machine.links:
                return 0.0, 0.0, 0.0, 0.0
            sizes = sizes._replace(held=sizes.weights // weights)
            gather = links.state_seconds("gather", sizes) if weights > 1 else 0.0
            spread = links.state_seconds("spread", sizes) if parts(plan) > 1 else 0.0
            reduce = beside = 0.0
            common = sizes.common + sizes.common_in_columns + sizes.common_in_rows
            if setting.replicas > 1 or common:
                reduce = links.state_seconds("reduce", sizes)
                beside = links.summing_seconds(sizes)
            return gather, reduce, reduce - beside, spread

        return np.array([of_kind(states.sizes[name]) for name in self._names]).T

    def _of_kind(self, plan: Plan, sizes: StateSizes) -> tuple[float, ...]:
        """Bytes held and of the norm; of state away seconds that it moves, and bytes at home."""
        held = sizes.weights // plan.sharding.weights
        if not plan.far("optimizer"):
            return held + sizes.optimizer, sizes.shard, 0.0, 0.0
        far = state_at_home(plan, sizes._replace(held=held))
        moving = self._tiers[plan.home.optimizer].moving_seconds(far, far)
        return held, sizes.shard, moving, far

    def _updates(
        self, plan: Plan, work: _Floats, moving: _Floats, spread: _Floats
    ) -> tuple[_Floats, _Floats]:
        """Seconds that updates hold the device up, and that they go on beside what follows.

        State that comes from home is fetched, updated and written back beside each other. What puts
        parts of a layer together waits for all of that, and the next update for it. On a CPU the
        device itself works meanwhile. As `streamed.FarLane` has it.

        Args:
            plan: that says where state lives.
            work: seconds of the updates themselves, of each kind.
            moving: seconds that state moves.
            spread: seconds of putting its parts together.
        """
        if not plan.far("optimizer"):
            return work + spread, np.zeros_like(work)
        lane = np.maximum(work, moving)
        if parts(plan) > 1 or not self._machine.moves_beside:
            return lane + spread, np.zeros_like(lane)
        shares_cores = self._machine.device.kind == "cpu"
        return work if shares_cores else np.zeros_like(work), lane

    def _kept_(self, setting: Setting, optimizer: int) -> _Kept:
        plan = self._plan_of(setting, 1, optimizer)
        kinds = self._graph.cut(setting.tensor).kinds
        costs = StepCost(plan, self._graph, self._machine)
        return _Kept(
            sizes={name: state_sizes(plan, kinds[name]) for name in self._names},
            update=np.array([costs.of(Instruction("update", at)).total for at in self._first]),
            launches=np.array([costs.norm_launches(kinds[name]) for name in self._names]),
        )
