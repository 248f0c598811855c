"""Plan batch: what each message, collective and update of some plans takes, as arrays over plans.

Nothing here depends on recompute, so that one batch serves all ways to recompute.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.clock.layer_prices import LayerPrices
from windlass.cost.clock.plan_columns import LayerConfig, PlanColumns
from windlass.cost.clock.price_keys import ExchangeKey, PassWay, StateKey, StatePrice
from windlass.cost.clock.stage_layout import StageLayout
from windlass.cost.step_traffic import copy_seconds, tied_grad_add_bytes
from windlass.schema import DEVICE_TIER, Machine


class TiedSeconds(NamedTuple):
    """Seconds of exchanging tied weights of two stages, `[plan]`."""

    owner: int
    """Layer that owns the weights."""
    user: int
    """First layer of the other stage that uses them."""
    weights: Floats
    """Message with the weights."""
    gradients: Floats
    """Message with their gradient."""
    adding: Floats
    """Adding it to the owner's."""
    weight_bytes: Floats
    gradient_bytes: Floats


class PlanBatch:
    """Plans of one shape and layout, however they recompute."""

    def __init__(
        self, columns: PlanColumns, layout: StageLayout, prices: LayerPrices, machine: Machine
    ) -> None:
        self.columns, self.shape, self.layout = columns, columns.shape, layout
        self.prices, self.machine = prices, machine
        self.splits = self.shape.schedule == "zero-bubble"
        """Whether a backward pass is split in two."""
        self._passes: dict[PassWay, Floats] = {}
        self.bulk_synchronous = machine.execution_model == "bulk-synchronous"

    def serves(self, columns: PlanColumns) -> bool:
        """Whether other columns are the same plans, apart from recompute."""
        mine = self.columns
        return (
            columns.shape == mine.shape
            and columns.chunk_bounds == mine.chunk_bounds
            and columns.configs is mine.configs
            and all(
                getattr(columns, name) is getattr(mine, name)
                for name in ("config", "micro", "accumulation", "data", "parameters", "optimizer")
            )
        )

    def passes(self, way: PassWay) -> Floats:
        """Seconds of a pass, `[layer, plan]`."""
        if way not in self._passes:
            keys, place = self._exchanges
            rows = [
                row
                for (config, exchange), micros in keys
                for row in self.prices.passes(config, micros, exchange, way)
            ]
            self._passes[way] = np.array(rows)[place, self.prices.columns[:, None]]
        return self._passes[way]

    @cached_property
    def _exchanges(
        self,
    ) -> tuple[list[tuple[tuple[LayerConfig, ExchangeKey], list[int]]], Ints]:
        """What passes depend on, with micro-batch sizes, and each plan's index among these."""
        columns, configs = self.columns, self.columns.configs
        sharing = np.where(self.reshards, columns.parameters, 1)
        sums = self.reshards & (columns.accumulation > 1)
        keys, place = distinct(columns.config, columns.data, sharing, sums, columns.micro)
        micros: dict[tuple[LayerConfig, ExchangeKey], list[int]] = {}
        between = self.prices.between(self.shape.pipeline)
        for config, data, parameters, accumulates, micro in keys:
            exchange = ExchangeKey(data, parameters, bool(accumulates), between)
            micros.setdefault((configs[config], exchange), []).append(micro)
        return list(micros.items()), place

    @cached_property
    def sums(self) -> tuple[Floats, Floats]:
        """Seconds to add gradients of the first and of a later micro-batch, `[layer, plan]`."""
        rows = self._by_config(self._sums, self.columns.micro)
        first, later = np.moveaxis(rows, 0, 2)
        return first[self.prices.columns], later[self.prices.columns]

    def _sums(self, config: LayerConfig, accumulates: bool, micro: int) -> Floats:
        """Seconds to add gradients, `[2, column]`."""
        elements = self.layout.shared(config.tensor)
        shared = tuple(elements.get(layer, 0) for layer in self.prices.layers)
        return self.prices.sums(config, accumulates, micro, shared)

    @cached_property
    def load(self) -> Floats:
        """Seconds to load a micro-batch, `[plan]`."""
        return self._by_config(self.prices.load_seconds, self.columns.micro)

    @cached_property
    def messages(self) -> Floats:
        """Seconds of a message between each chunk and the next, `[chunk, plan]`."""
        if self.shape.pipeline == 1:
            return np.zeros((self.shape.chunks, self.columns.count))
        last = self.layout.bounds[1:] - 1
        nbytes = self._by_config(
            lambda config, _, micro: self.prices.message_bytes(config, micro), self.columns.micro
        )
        return self._message_seconds(nbytes[:, self.prices.columns[last]].T)

    @cached_property
    def tied(self) -> tuple[TiedSeconds, ...]:
        """Weights that two stages compute with."""
        found = self.layout.tied(1)
        sizes = np.moveaxis(self._by_config(self._tied_sizes), 0, 2) if found else ()
        return tuple(
            TiedSeconds(
                owner=tied.owner_layer,
                user=tied.user_layer,
                weights=self._message_seconds(weights),
                gradients=self._message_seconds(gradients),
                adding=adding,
                weight_bytes=weights,
                gradient_bytes=gradients,
            )
            for tied, (weights, gradients, adding) in zip(found, sizes, strict=True)
        )

    def _tied_sizes(self, config: LayerConfig, accumulates: bool) -> Floats:
        """Bytes of tied weights and of their gradient, and seconds to add it, `[tied, 3]`."""
        plan = self.prices.plan(config, accumulates=accumulates)
        device, nbytes = self.prices.device(config), plan.gradient_itemsize
        return np.array(
            [
                (
                    tied.elements * plan.parameter_itemsize,
                    tied.gradient_elements * nbytes,
                    copy_seconds(tied_grad_add_bytes(tied.gradient_elements, nbytes), device),
                )
                for tied in self.layout.tied(config.tensor)
            ]
        )

    def _message_seconds(self, nbytes: Floats) -> Floats:
        """Seconds of a message of so many bytes, `[..., plan]`."""
        each_byte, each_message = self._message_costs
        return np.asarray(nbytes * each_byte + each_message)

    @cached_property
    def _message_costs(self) -> Floats:
        """Seconds of a byte to another stage, and of a message apart from its bytes."""
        pipeline = self.shape.pipeline
        return self._by_config(
            lambda config, _, data: self.prices.message_cost(config, data, pipeline),
            self.columns.data,
        ).T

    @cached_property
    def state(self) -> StatePrice:
        """Seconds of state, `[layer, plan]`."""
        place, layer = self.state_place, self.prices.columns[:, None]
        each_price = zip(*self._states, strict=True)
        return StatePrice(*(np.array(each)[place, layer] for each in each_price))

    @cached_property
    def norm(self) -> Floats:
        """Seconds of the gradient norm, `[stage, plan]`."""
        member = np.zeros((self.shape.pipeline, len(self.prices.layers)))
        for stage, layers in enumerate(self.layout.stages):
            np.add.at(member[stage], self.prices.columns[list(layers)], 1.0)
        rows = [
            self.prices.norm_seconds(key, member @ price.norm_bytes, member @ price.norm_launches)
            for key, price in zip(self.state_keys, self._states, strict=True)
        ]
        return np.array(rows).T[:, self.state_place]

    @cached_property
    def reshards(self) -> Bools:
        """Whether each pass gathers the parameters that replicas share, `[plan]`."""
        gathers = [each.reshard is not None for each in self.columns.configs]
        return self.columns.of_configs(gathers) > 0

    @cached_property
    def is_sharded(self) -> Bools:
        """Whether replicas share parameters, `[plan]`."""
        return self.columns.parameters > 1

    @cached_property
    def scatters(self) -> Bools:
        """Whether replicas update parts of the parameters that each holds, `[plan]`."""
        return self.columns.optimizer > self.columns.parameters

    @cached_property
    def gathers(self) -> bool:
        """Whether any plan gathers parameters before its passes."""
        return bool(self.is_sharded.any())

    @cached_property
    def reduces(self) -> bool:
        """Whether any plan reduces gradients."""
        return bool(self.state.reduce.any())

    @cached_property
    def state_keys(self) -> list[StateKey]:
        """The distinct ways in which plans hold and exchange state."""
        between = self.prices.between(self.shape.pipeline)
        return [
            StateKey(self.columns.configs[config], bool(accumulates), data, parts, degree, between)
            for config, accumulates, data, parts, degree in self._distinct_states[0]
        ]

    @cached_property
    def _distinct_states(self) -> tuple[list[tuple[int, ...]], Ints]:
        each = self.columns
        return distinct(
            each.config, each.accumulation > 1, each.data, each.parameters, each.optimizer
        )

    @cached_property
    def _states(self) -> list[StatePrice]:
        return [self.prices.state(key) for key in self.state_keys]

    @property
    def state_place(self) -> Ints:
        """Index of each plan's among `state_keys`, `[plan]`."""
        return self._distinct_states[1]

    @cached_property
    def process_bytes(self) -> Floats:
        """Memory of the process before it allocates any tensor, `[plan]`."""
        device = self.machine.device
        held = [device.process_bytes(compiled=each.compiled) for each in self.columns.configs]
        return np.array(held, dtype=np.float64)[self.columns.config]

    @cached_property
    def offloads(self) -> Bools:
        """Whether optimizer state is offloaded, `[plan]`."""
        tiers = [each.optimizer_tier != DEVICE_TIER for each in self.columns.configs]
        return self.columns.of_configs(tiers) > 0

    @cached_property
    def pace(self) -> Floats:
        """Factor by which the slowest of its hosts lengthens a step, `[plan]`."""
        keys, place = distinct(self.columns.devices)
        return np.array([self.machine.straggler_factor(key[0]) for key in keys])[place]

    def _by_config(self, price: Callable[..., Any], *numbers: Ints) -> Floats:
        """What a function gives for each plan's configuration and numbers, `[plan, ...]`.

        Args:
            price: a function of a configuration, whether the step has several micro-batches, and
                the numbers.
            numbers: numbers of each plan.
        """
        columns = self.columns
        keys, place = distinct(columns.config, columns.accumulation > 1, *numbers)
        values = [price(columns.configs[key[0]], bool(key[1]), *key[2:]) for key in keys]
        return np.array(values)[place]


class MachinesBatch(PlanBatch):
    """One plan on several machines side by side, as many plans at once.

    Args:
        batches: the plan on each machine; these differ in rates only.
    """

    _BY_PLAN = ("sums", "load", "messages", "tied", "state", "norm", "pace")

    def __init__(self, batches: Sequence[PlanBatch]) -> None:
        first = batches[0]
        columns = first.columns.select(np.zeros(len(batches), dtype=np.int64))
        super().__init__(columns, first.layout, first.prices, first.machine)
        self._batches = batches
        for name in self._BY_PLAN:
            self.__dict__[name] = _side_by_side([getattr(each, name) for each in batches])

    def passes(self, way: PassWay) -> Floats:
        """Seconds of a pass, `[layer, plan]`."""
        return np.concatenate([each.passes(way) for each in self._batches], axis=-1)


def _side_by_side(values: Sequence[object]) -> object:
    """Arrays of several batches along their last axis, or tuples of such arrays."""
    first, arrays = values[0], [each for each in values if isinstance(each, np.ndarray)]
    if arrays:
        return np.concatenate(arrays, axis=-1)
    if not isinstance(first, tuple):
        return first
    parts = map(_side_by_side, zip(*values, strict=True))
    return first._make(parts) if hasattr(first, "_make") else tuple(parts)


def distinct(*numbers: Ints | Bools) -> tuple[list[tuple[int, ...]], Ints]:
    """The distinct combinations of numbers, sorted, and the index of each plan's among them."""
    plans = list(zip(*(each.tolist() for each in numbers), strict=True))
    keys = sorted(set(plans))
    place = {key: index for index, key in enumerate(keys)}
    return keys, np.array([place[plan] for plan in plans])
