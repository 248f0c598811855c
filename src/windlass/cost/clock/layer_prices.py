"""Layer prices: seconds of each kind of layer, found once for each way that plans compute.

All formulas are those of the event simulator (`op_time`, `communication_time`, `optimizer_time`),
asked for plans that stand for all others of the same configuration.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from typing import Literal

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.clock.plan_columns import LayerConfig
from windlass.cost.clock.price_keys import ExchangeKey, StateKey, StatePrice
from windlass.cost.communication_time import CommunicationCosts
from windlass.cost.device_rates import DeviceRates, OpContext, padded_vocabulary, rates_at
from windlass.cost.op_time import LayerPass, PassSeconds, exposed_seconds, passes_seconds
from windlass.cost.optimizer_time import (
    norm_call_seconds,
    norm_launch_seconds,
    norm_rate,
    update_seconds,
)
from windlass.cost.step_traffic import (
    batch_load_bytes,
    batch_load_host_seconds,
    copy_seconds,
    grad_accumulation_bytes,
)
from windlass.program import (
    Instruction,
    InstructionKind,
    StateSizes,
    divided_kinds,
    gathered_kinds,
    layer_kind_state_sizes,
    message_bytes,
    micro_of_rank,
    op_collectives,
    pass_ops,
    tied_owner_layers,
    update_state_bytes,
    with_attention,
)
from windlass.schema import (
    DEVICE_TIER,
    PRECISION_BYTES,
    Batch,
    Device,
    GradientReach,
    Graph,
    LayerCost,
    LayerKind,
    Machine,
    Offload,
    Parallelism,
    Plan,
    ShardingDegrees,
    Stage,
)

# Plans are made by the thousand, and differ in few of these parts.
_parallelism = lru_cache(maxsize=4096)(Parallelism.model_construct)
_degrees = lru_cache(maxsize=4096)(ShardingDegrees.model_construct)
_offload = lru_cache(maxsize=64)(Offload.model_construct)
_batch = lru_cache(maxsize=4096)(Batch.model_construct)

_COMMON_MICROS = (1, 2, 4, 8, 16)
PASSES: tuple[InstructionKind, ...] = (
    "forward", "recompute", "backward", "backward_input", "backward_weight",
)  # fmt: skip


class LayerPrices:
    """Seconds of a graph's layers on a machine.

    Layers have one column for each kind and each reach of their gradient, the first layer and each
    owner of tied weights one of their own.

    Args:
        base: states sequence length, moments, clipping and stack.
        graph: graph of the layers.
        machine: the machine that they run on.
    """

    def __init__(self, base: Plan, graph: Graph, machine: Machine) -> None:
        self._base, self._graph, self._machine = base, graph, machine
        names = [kind.name for kind in graph.layer_kinds()]
        owners = {owner for owned in tied_owner_layers(graph) for owner in owned}
        columns: dict[tuple[str, int, GradientReach], int] = {}
        self.columns: Ints = np.array(
            [
                columns.setdefault(
                    (name, layer if layer in {0, *owners} else -1, graph.gradient_reach(layer)),
                    len(columns),
                )
                for layer, name in enumerate(names)
            ]
        )
        """Column of each layer, `[layer]`."""
        self.layers: tuple[int, ...] = tuple(
            int(layer) for layer in np.unique(self.columns, return_index=True)[1]
        )
        """The first layer of each column."""
        self._stages = (Stage(phases=((0, len(names)),)),)
        self._names = tuple(names[layer] for layer in self.layers)
        self._passes: dict[tuple[LayerConfig, int, ExchangeKey], Floats] = {}
        self._devices = {
            offloads: machine.device.effective(offloads=offloads) for offloads in (False, True)
        }
        self._passes_of = cache(self._layer_passes)
        self._alone_cache: dict[LayerConfig, dict[int, tuple[Floats, Floats]]] = {}
        self._kinds: Callable[..., tuple[LayerKind, ...]] = cache(self._kinds_of)
        self.state: Callable[[StateKey], StatePrice] = cache(self._state)
        self.sums: Callable[[LayerConfig, bool, int, tuple[int, ...]], Floats] = cache(self._sums)

    def device(self, config: LayerConfig) -> Device:
        """The device as it computes under a configuration."""
        return self._devices[config.optimizer_tier != DEVICE_TIER]

    def plan(
        self,
        config: LayerConfig,
        *,
        micro: int = 1,
        accumulates: bool = False,
        data: int = 1,
        sharding: tuple[int, int] = (1, 1),
        pipeline: int = 1,
    ) -> Plan:
        """A plan that stands for all of a configuration, of one stage unless `pipeline` is given.

        Args:
            config: the configuration.
            micro: sequences of a micro-batch.
            accumulates: whether a step has several micro-batches.
            data: data-parallel degree.
            sharding: sharding degrees of parameters and of optimizer state.
            pipeline: number of stages, for costs of messages.
        """
        return self._base.model_copy(
            update={
                "precision": config.precision,
                "compile": config.compiled,
                "loss": config.loss,
                "attention": config.attention,
                "parallel": _parallelism(
                    pipeline=pipeline,
                    tensor=config.tensor,
                    data=data,
                    context=config.context,
                    expert=config.expert,
                ),
                "sharding": _degrees(
                    parameters=sharding[0], optimizer=sharding[1], reshard=config.reshard
                ),
                "offload": _offload(optimizer=config.optimizer_tier),
                "batch": _batch(
                    sequence=self._base.batch.sequence,
                    micro=micro,
                    accumulation=2 if accumulates else 1,
                ),
                "stages": self._stages,
            }
        )

    def passes(
        self, config: LayerConfig, micros: Sequence[int], exchange: ExchangeKey
    ) -> list[Floats]:
        """Seconds of passes for each of some micro-batch sizes, each `[pass, selective, column]`.

        Args:
            config: how layers compute.
            micros: sequences of a micro-batch.
            exchange: what communication in passes depends on besides.

        Raises:
            KeyError: the machine states no rate or link, or the graph no cost, that is needed.
        """
        missing = [micro for micro in micros if (config, micro, exchange) not in self._passes]
        if missing:
            found = self._pass_seconds(config, missing, exchange)
            for micro, seconds in zip(missing, found, strict=True):
                self._passes[config, micro, exchange] = seconds
        return [self._passes[config, micro, exchange] for micro in micros]

    def kinds(
        self, config: LayerConfig, loss: Literal["fused"] | None = None
    ) -> tuple[LayerKind, ...]:
        """The layer kind of each column as a rank has it: its shard, experts and tokens.

        Args:
            config: how layers compute.
            loss: the plan's `loss`, for what passes cost.
        """
        return self._kinds(config.tensor, config.expert, config.context, loss)

    def _kinds_of(
        self,
        tensor: int,
        expert: int | None,
        context: int | None,
        loss: Literal["fused"] | None,
    ) -> tuple[LayerKind, ...]:
        shard = self._graph.shard(tensor, loss=loss)
        kinds = divided_kinds(gathered_kinds(shard.kinds, context or 1), expert or 1)
        return tuple(kinds[name] for name in self._names)

    def _pass_seconds(
        self, config: LayerConfig, micros: Sequence[int], exchange: ExchangeKey
    ) -> Iterable[Floats]:
        rates, (work, host) = self._rates(config), self._alone(config, micros)
        beside = [np.zeros((2, len(work)))] * len(micros)
        if config.tensor > 1 or config.reshard or config.context or config.expert:
            data, parameters, accumulates, pipeline = exchange
            plan = partial(
                self.plan,
                config,
                data=data,
                sharding=(parameters, parameters),
                accumulates=accumulates,
                pipeline=pipeline,
            )
            beside = [self._exchanged(config, plan(micro=micro)) for micro in micros]
        seconds = exposed_seconds(rates, work, host, *np.moveaxis(np.array(beside), 0, 2))
        return list(seconds.T.reshape(len(micros), len(PASSES), 2, len(self.layers)))

    def _rates(self, config: LayerConfig) -> DeviceRates:
        mode = OpContext(
            self._base.batch.sequence, config.precision, config.compiled, config.context or 1,
            bool(self._base.deterministic), bool(self._base.step_graph),
            padded_vocabulary(self._graph, config.tensor, config.loss),
            self._graph.document_tokens,
        )  # fmt: skip
        in_turn = self._machine.execution_model == "bulk-synchronous"
        return DeviceRates(self.device(config), mode, self._machine.stack, in_turn=in_turn)

    def _alone(self, config: LayerConfig, micros: Sequence[int]) -> PassSeconds:
        """Seconds of all passes without communication, `[pass, micro]`."""
        known = self._alone_cache.setdefault(config, {})
        missing = [micro for micro in micros if micro not in known]
        if missing:
            # Other sizes cost next to nothing now, and are often asked for next.
            missing += [
                each for each in _COMMON_MICROS if each not in known and each not in missing
            ]
            parts = [micro_of_rank(self.plan(config, micro=micro)) for micro in missing]
            passes = [each for _, _, each in self._passes_of(config)]
            found = passes_seconds(
                passes, self._rates(config), np.array(parts), tensor=int(config.tensor)
            )
            known.update(zip(missing, zip(found.work.T, found.host.T, strict=True), strict=True))
        return PassSeconds(
            *(
                np.stack(each, axis=1)
                for each in zip(*(known[micro] for micro in micros), strict=True)
            )
        )

    def _layer_passes(self, config: LayerConfig) -> list[tuple[InstructionKind, int, LayerPass]]:
        """The passes of all columns, plain and selectively recomputed."""
        found = []
        for kind, selective in product(PASSES, (False, True)):
            kinds = self.kinds(config, config.loss)
            for layer, each in zip(self.layers, kinds, strict=True):
                cost = self.cost(config, each, selective=selective)
                ops = pass_ops(kind, each, cost, reach=self._graph.gradient_reach(layer))
                found.append((kind, layer, LayerPass(ops, cost, backward="backward" in kind)))
        return found

    def cost(self, config: LayerConfig, kind: LayerKind, *, selective: bool) -> LayerCost:
        """The cost of a layer; the plain one if it has none that is recomputed selectively."""
        mode = kind.captured(config.precision), config.compiled
        can = selective and any(
            mode == (cost.precision, cost.compiled) for cost in kind.selective_costs
        )
        cost = kind.cost(config.precision, compiled=config.compiled, selective=can)
        sequence = self._base.batch.sequence
        return with_attention(cost, kind, config.attention, sequence, selective=can)

    def _exchanged(self, config: LayerConfig, plan: Plan) -> Floats:
        """Seconds of collectives and of gathers of each pass, `[2, pass]`."""
        costs = CommunicationCosts(plan, self._graph, self._machine)
        seconds, gather = cache(costs.pass_collective_seconds), cache(costs.gather_seconds)
        return np.array(
            [
                (
                    sum(map(seconds, op_collectives(run.ops, plan))),
                    gather(instruction),
                )
                for kind, layer, run in self._passes_of(config)
                for instruction in (Instruction(kind, layer),)
            ]
        ).T

    def _sums(
        self, config: LayerConfig, accumulates: bool, micro: int, shared: tuple[int, ...]
    ) -> Floats:
        """Seconds to accumulate gradients of the first and of a later micro-batch, `[2, column]`.

        Args:
            config: how layers compute.
            accumulates: whether a step has several micro-batches.
            micro: sequences of a micro-batch.
            shared: elements of each column that another layer of its stage uses.
        """
        device, stack = self.device(config), self._machine.stack
        kinds = self.kinds(config)
        plan = self.plan(config, micro=micro, accumulates=accumulates)

        def seconds(kind: LayerKind, elements: int, first: bool) -> float:
            rows = sum(kind.pass_gradient_elements(micro_of_rank(plan), plan.batch.sequence))
            moved = grad_accumulation_bytes(
                kind, plan, stack, shared=elements, rows=rows, first=first
            )
            return sum(copy_seconds(nbytes, device) for nbytes in moved)

        pairs = tuple(zip(kinds, shared, strict=True))
        return np.array([[seconds(*each, first) for each in pairs] for first in (True, False)])

    def load_seconds(self, config: LayerConfig, accumulates: bool, micro: int) -> float:
        """Seconds to load a micro-batch."""
        device, plan = self.device(config), self.plan(config, micro=micro, accumulates=accumulates)
        moved = batch_load_bytes(self._graph, plan)
        return copy_seconds(moved, device) + batch_load_host_seconds(device)

    def example_bytes(self, config: LayerConfig) -> int:
        """Bytes of the inputs and targets of one sample of a batch."""
        itemsize = PRECISION_BYTES[config.precision]
        return self._graph.example_bytes(self._base.batch.sequence, itemsize)

    def message_bytes(self, config: LayerConfig, micro: int) -> Floats:
        """Bytes that each column's layer sends to the next stage, `[column]`."""
        plan = self.plan(config, micro=micro)
        kinds = self.kinds(config)
        return np.array([float(message_bytes(kind, plan)) for kind in kinds])

    def norm_seconds(self, key: StateKey, nbytes: Floats, launches: Floats) -> Floats:
        """Seconds of the gradient norm over the gradients of a stage."""
        device = self.device(key.config)
        plan = self.plan(key.config, accumulates=key.accumulates)
        rate = norm_rate(plan, device)
        rates = rate if rate is not None else rates_at(device.traffic, nbytes)
        launches = launches + norm_call_seconds(plan, device, self._machine.stack)
        return np.where(nbytes > 0, nbytes / rates + launches, 0.0)

    def state_plan(self, key: StateKey) -> Plan:
        """A plan whose layers have this state."""
        return self.plan(
            key.config,
            accumulates=key.accumulates,
            data=key.data,
            sharding=(key.parameters, key.optimizer),
            pipeline=key.pipeline,
        )

    def _state(self, key: StateKey) -> StatePrice:
        config, plan = key.config, self.state_plan(key)
        device, kinds = self.device(config), self.kinds(config)
        stack = self._machine.stack
        costs, full = CommunicationCosts(plan, self._graph, self._machine), self._graph.kinds
        sizes = [layer_kind_state_sizes(plan, kind) for kind in kinds]
        moving = [0.0] * len(kinds)
        if config.optimizer_tier != DEVICE_TIER:
            (tier,) = (each for each in device.tiers if each.name == config.optimizer_tier)
            moved = [update_state_bytes(plan, each) for each in sizes]
            moving = [tier.transfer_seconds(nbytes, nbytes) for nbytes in moved]

        def seconds(price: Callable[[StateSizes], float]) -> Floats:
            return np.array([price(each) if each.weights else 0.0 for each in sizes])

        def updating(price: Callable[[StateSizes], float]) -> Floats:
            return np.array([price(each) if each.gradients else 0.0 for each in sizes])

        return StatePrice(
            gather=seconds(partial(costs.state_seconds, "unshard_weights")),
            gather_overlapped=seconds(costs.overlapped_gather_seconds),
            reduce=updating(partial(costs.state_seconds, "reduce_grads")),
            overlapped=updating(costs.overlapped_reduce_seconds),
            alternates=updating(lambda _: float(costs.alternates_reductions)),
            update=np.array(
                [
                    update_seconds(plan, kind, device, stack, full=full[kind.name]).total
                    + costs.whole_weight_seconds(full[kind.name])
                    for kind in kinds
                ]
            ),
            spread=updating(partial(costs.state_seconds, "all_gather_params")),
            moving=np.array(moving),
            norm_bytes=np.array([each.gradient_shard for each in sizes], dtype=np.float64),
            norm_launches=np.array(
                [norm_launch_seconds(plan, kind, device, stack) for kind in kinds]
            ),
        )

    def message_cost(self, config: LayerConfig, data: int, pipeline: int) -> tuple[float, float]:
        """Seconds of a byte to another stage, and of a message apart from its bytes."""
        plan = self.plan(config, data=data, pipeline=pipeline)
        costs = CommunicationCosts(plan, self._graph, self._machine)
        return costs.message_cost.byte_seconds, costs.message_seconds(0.0)
