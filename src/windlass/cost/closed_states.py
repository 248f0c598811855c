"""States, by kind of layer: what weights, gradients and optimizer state take as they are shared.

Read off the clock's own prices, once for each kind of layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from windlass.cost.closed_ways import Block, Setting, Share
from windlass.cost.links import Links
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
    """

    def __init__(
        self, plan_of: Callable[[Setting, int, int], Plan], graph: Graph, machine: Machine
    ) -> None:
        self._plan_of, self._graph, self._machine = plan_of, graph, machine
        names = [kind.name for kind in graph.layer_kinds()]
        self._names: Sequence[str] = tuple(dict.fromkeys(names))
        self._first = tuple(names.index(name) for name in self._names)
        self._tiers = {tier.name: tier for tier in machine.device.tiers}
        self._kept: Callable[[Setting, int], _Kept] = cache(self._kept_)

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
        """The numbers of one pair, by layer, in the order of `of`."""
        plan = self._plan_of(block.setting, share.weights, share.optimizer)
        plan = plan.model_copy(update={"home": Home.model_construct(optimizer=share.home)})
        states = self._kept(block.setting._replace(replicas=1), share.optimizer)
        found = [self._of_kind(plan, states.sizes[name]) for name in self._names]
        held, gather, reduce, waited, spread, norm_bytes, moving, far = np.array(found).T
        after, under_way = self._updates(plan, states.update, moving, spread)
        rows = [held, gather, reduce, waited, after, norm_bytes]
        rows += [states.launches, under_way, far]
        return np.stack(rows)

    def _of_kind(self, plan: Plan, sizes: StateSizes) -> tuple[float, ...]:
        """Bytes held, seconds to gather, reduce, wait and spread, bytes of the norm; of state away.

        Those are the seconds that it moves, and its bytes at home.
        """
        sharing, cut = plan.sharding, plan.cut
        held = sizes.weights // sharing.weights
        sizes = sizes._replace(held=held)
        gather = reduce = beside = spread = moving = far = 0.0
        if sizes.weights and self._machine.links:
            links = Links(plan, self._graph, self._machine)
            if sharing.weights > 1:
                gather = links.state_seconds("gather", sizes)
            if parts(plan) > 1:
                spread = links.state_seconds("spread", sizes)
            if cut.replicas > 1 or sizes.common + sizes.common_in_columns + sizes.common_in_rows:
                reduce = links.state_seconds("reduce", sizes)
                beside = links.summing_seconds(sizes)
        if plan.far("optimizer"):
            far = state_at_home(plan, sizes)
            moving = self._tiers[plan.home.optimizer].moving_seconds(far, far)
        else:
            held += sizes.optimizer
        return held, gather, reduce, reduce - beside, spread, sizes.shard, moving, far

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
