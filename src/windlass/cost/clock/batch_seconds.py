"""Batch seconds: what each layer, message and collective of a batch of plans takes, as arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from windlass.cost.arrays import Bools, Floats, Ints
from windlass.cost.clock.layer_prices import (
    PASSES,
    LayerPrices,
    StateKey,
    StatePrice,
    copy_seconds,
)
from windlass.cost.clock.plan_columns import LayerConfig, PlanColumns
from windlass.cost.op_time import tied_grad_add_bytes
from windlass.program import (
    InstructionKind,
    phase_needs,
    stages_by_layer,
    tied_across_stages,
    tied_elements_within_stage,
    tied_owner_layers,
)
from windlass.schema import DEVICE_TIER, Graph, Machine, Plan, Stage


class PassArrays(NamedTuple):
    """Seconds of passes of each layer, `[layer, plan]`."""

    forward: Floats
    backward: Floats
    """With the recompute before it; the input-gradient part if the backward is split."""
    weight: Floats
    """The weight-gradient part of a split backward; else zero."""
    first: Floats
    """Accumulating the gradient of the first micro-batch, in the pass that makes it."""
    later: Floats
    """The same of any other micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedSeconds:
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


class BatchSeconds:
    """Seconds of what the plans of a batch do, with the structure of their stages.

    Args:
        columns: the plans.
        prices: prices of layers.
        graph: graph of the layers.
        machine: the machine that they run on.
    """

    def __init__(
        self, columns: PlanColumns, prices: LayerPrices, graph: Graph, machine: Machine
    ) -> None:
        self.columns, self.shape = columns, columns.shape
        self.prices, self._graph, self.machine = prices, graph, machine
        bounds = columns.chunk_bounds
        self.chunks = tuple(range(bounds[at], bounds[at + 1]) for at in range(len(bounds) - 1))
        """Layers of each model chunk."""
        self.splits = self.shape.schedule == "zero-bubble"
        """Whether a backward pass is split in two."""
        self.bulk_synchronous = machine.execution_model == "bulk-synchronous"
        self._plan = self._shape_plan(1)

    def _shape_plan(self, tensor: int) -> Plan:
        """A plan of the batch's shape and tensor-parallel degree."""
        config = self.columns.configs[0]._replace(tensor=tensor)
        plan = self.prices.plan(config, pipeline=self.shape.pipeline)
        stages = (Stage.model_construct(phases=((c.start, c.stop),)) for c in self.chunks)
        parallel = plan.parallel.model_copy(
            update={
                "virtual_stages": self.shape.virtual_stages,
                "schedule": self.shape.schedule,
            }
        )
        return plan.model_copy(update={"stages": tuple(stages), "parallel": parallel})

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage."""
        count = self.shape.pipeline
        return tuple(
            tuple(layer for chunk in self.chunks[stage::count] for layer in chunk)
            for stage in range(count)
        )

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """The layers whose weights each chunk is the first of its stage to use, `[chunk]`."""
        count = self.shape.pipeline
        needs: list[tuple[int, ...]] = [()] * self.shape.chunks
        for stage in range(count):
            seen: set[int] = set()
            for turn, layers in enumerate(phase_needs(self._plan, self._graph, stage)):
                needs[turn * count + stage] = tuple(each for each in layers if each not in seen)
                seen.update(layers)
        return tuple(needs)

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """The layers of its stage whose weights each layer computes with, `[layer]`."""
        stages = stages_by_layer(self._plan)
        return tuple(
            (layer, *(owner for owner in owners if stages[owner] == stages[layer] != layer))
            for layer, owners in enumerate(tied_owner_layers(self._graph))
        )

    @cached_property
    def passes(self) -> PassArrays:
        """Seconds of passes; the same for all micro-batches."""
        columns, prices = self.columns, self.prices
        gathers = [bool(each.reshard) for each in columns.configs]
        sharing = np.where(np.array(gathers)[columns.config], columns.parameters, 1)
        keys, place = distinct(columns.config, columns.data, sharing, columns.micro)
        micros: dict[tuple[int, int, int], list[int]] = {}
        for config, data, parameters, micro in keys:
            micros.setdefault((config, data, parameters), []).append(micro)
        rows = np.concatenate(
            [
                prices.passes(columns.configs[config], tuple(some), data, parameters)
                for (config, data, parameters), some in micros.items()
            ]
        )
        full, selective = columns.recompute_modes()
        some, layer = selective.astype(np.int64), prices.columns[:, None]

        def of(name: InstructionKind) -> Floats:
            return np.asarray(rows[place, PASSES.index(name), some, layer])

        again = np.where(full, of("recompute"), 0.0)
        first, later = np.moveaxis(self._by_config(self._sums, columns.micro), 0, 2)
        return PassArrays(
            forward=of("forward"),
            backward=again + of("backward_input" if self.splits else "backward"),
            weight=of("backward_weight") if self.splits else np.zeros_like(again),
            first=first[prices.columns],
            later=later[prices.columns],
        )

    def _sums(self, config: LayerConfig, accumulates: bool, micro: int) -> Floats:
        """Seconds to accumulate gradients, `[2, column]`."""
        shard = self._graph.shard(config.tensor)
        elements = tied_elements_within_stage(stages_by_layer(self._plan), shard)
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
        last = np.array([chunk.stop - 1 for chunk in self.chunks])
        nbytes = self._by_config(
            lambda config, _, micro: self.prices.output_bytes(config, micro), self.columns.micro
        )
        return self._message_seconds(nbytes[:, self.prices.columns[last]].T)

    @cached_property
    def tied(self) -> tuple[TiedSeconds, ...]:
        """Weights that two stages compute with."""
        found = tied_across_stages(self._plan, self._graph)
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
        found = tied_across_stages(self._shape_plan(config.tensor), self._graph)
        return np.array(
            [
                (
                    tied.elements * plan.parameter_itemsize,
                    tied.elements * nbytes,
                    copy_seconds(tied_grad_add_bytes(tied.elements, nbytes), device),
                )
                for tied in found
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
        prices, place = self._states
        layer = self.prices.columns[:, None]
        return StatePrice(*(np.array(each)[place, layer] for each in zip(*prices, strict=True)))

    @cached_property
    def norm(self) -> Floats:
        """Seconds of the gradient norm, `[stage, plan]`."""
        member = np.zeros((self.shape.pipeline, len(self.prices.layers)))
        for stage, layers in enumerate(self.stages):
            np.add.at(member[stage], self.prices.columns[list(layers)], 1.0)
        prices, place = self._states
        rows = [
            self.prices.norm_seconds(key, member @ price.norm_bytes, member @ price.norm_launches)
            for key, price in zip(self.state_keys, prices, strict=True)
        ]
        return np.array(rows).T[:, place]

    @cached_property
    def durations(self) -> Floats:
        """Seconds of passes, `[row, plan]`, in the rows of `schedule_levels`."""
        passes = self.passes
        forward, backward, weight = map(self.by_chunk, passes[:3])
        first, later = self.by_chunk(passes.first), self.by_chunk(passes.later)
        none = np.zeros_like(forward)
        if self.splits:
            rows = (forward, backward, weight + later, none, backward, weight + first)
        else:
            rows = (forward, backward + later, none, none, backward + first, none)
        return np.concatenate(rows)

    @cached_property
    def sending(self) -> Floats:
        """Seconds of the message that each pass sends, `[row, plan]`; as `durations`."""
        ahead, behind, none = self._ways
        return np.concatenate((ahead, behind, none, none, behind, none))

    @cached_property
    def received(self) -> Floats:
        """Seconds of the message that each pass waits for, `[row, plan]`; as `durations`."""
        ahead, behind, none = self._ways
        return np.concatenate((behind, ahead, none, none, ahead, none))

    @cached_property
    def _ways(self) -> tuple[Floats, Floats, Floats]:
        """Seconds of messages to the next chunk, and to the one before; none, `[chunk, plan]`."""
        ahead, none = self.messages.copy(), np.zeros_like(self.messages)
        ahead[-1] = 0.0
        return ahead, np.concatenate((none[:1], ahead[:-1])), none

    def by_chunk(self, layers: Floats) -> Floats:
        """Sums over the layers of each model chunk, `[chunk, plan]`."""
        return np.asarray(np.add.reduceat(layers, self.columns.chunk_bounds[:-1], axis=0))

    def by_stage(self, layers: Floats) -> Floats:
        """Sums over the layers of each stage, `[stage, plan]`."""
        sides = self.shape.virtual_stages, self.shape.pipeline, -1
        return np.asarray(self.by_chunk(layers).reshape(sides).sum(axis=0))

    @cached_property
    def stage_of(self) -> tuple[int, ...]:
        """The stage of each layer."""
        return stages_by_layer(self._plan)

    @cached_property
    def owned(self) -> tuple[bool, ...]:
        """Whether each layer owns parameters."""
        return tuple(kind.parameter_count > 0 for kind in self._graph.layer_kinds())

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
        stack = self.machine.stack
        between = self.shape.pipeline if stack is not None and stack.stages_adjacent else 1
        return [
            StateKey(self.columns.configs[config], bool(accumulates), data, parts, degree, between)
            for config, accumulates, data, parts, degree in self._distinct_states[0]
        ]

    @cached_property
    def _distinct_states(self) -> tuple[list[list[int]], Ints]:
        each = self.columns
        return distinct(
            each.config, each.accumulation > 1, each.data, each.parameters, each.optimizer
        )

    @cached_property
    def _states(self) -> tuple[list[StatePrice], Ints]:
        return [self.prices.state(key) for key in self.state_keys], self.state_place

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
    def chunk_of(self) -> Ints:
        """The model chunk of each layer."""
        return np.repeat(np.arange(len(self.chunks)), [len(chunk) for chunk in self.chunks])

    @cached_property
    def is_embedding(self) -> Bools:
        """Whether each layer only looks up rows of its weights."""
        return np.array([kind.is_embedding for kind in self._graph.layer_kinds()])

    @cached_property
    def offloads(self) -> Bools:
        """Whether optimizer state is offloaded, `[plan]`."""
        tiers = [each.optimizer_tier != DEVICE_TIER for each in self.columns.configs]
        return np.asarray(np.array(tiers)[self.columns.config])

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


def distinct(*numbers: Ints | Bools) -> tuple[list[list[int]], Ints]:
    """The distinct combinations of numbers, sorted, and the index of each plan's among them."""
    keys, place = np.unique(np.stack(numbers, axis=1), axis=0, return_inverse=True)
    return keys.tolist(), place.reshape(-1)
