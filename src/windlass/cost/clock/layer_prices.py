"""Layer prices: seconds of each kind of layer, found once for each way that plans compute.

All formulas are those of the event simulator (`op_time`, `communication_time`, `optimizer_time`),
asked for plans that stand for all others of the same configuration.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Literal

import numpy as np

from windlass.cost.arrays import Floats, Ints
from windlass.cost.clock.plan_columns import LayerConfig
from windlass.cost.clock.price_keys import ExchangeKey, PassWay, StateKey, StatePrice
from windlass.cost.communication_time import CommunicationCosts
from windlass.cost.device_rates import DeviceRates, OpContext, padded_vocabulary, rates_at
from windlass.cost.op_time import LayerPass, PassPrices, exposed_seconds
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
    StateSizes,
    divided_kinds,
    gathered_kinds,
    layer_kind_state_sizes,
    message_bytes,
    micro_of_rank,
    pass_collective,
    pass_ops,
    tied_owner_layers,
    update_state_bytes,
    with_attention,
)
from windlass.schema import (
    DEVICE_TIER,
    PRECISION_BYTES,
    Batch,
    Collective,
    Device,
    GradientReach,
    Graph,
    LayerCost,
    LayerKind,
    Machine,
    Offload,
    Parallelism,
    Plan,
    Precision,
    ShardingDegrees,
    Stage,
)

# Plans are made by the thousand, and differ in few of these parts.
_parallelism = lru_cache(maxsize=4096)(Parallelism.model_construct)
_degrees = lru_cache(maxsize=4096)(ShardingDegrees.model_construct)
_offload = lru_cache(maxsize=64)(Offload.model_construct)
_batch = lru_cache(maxsize=4096)(Batch.model_construct)


class LayerPrices:
    """Seconds of a graph's layers on a machine.

    Layers have one column for each kind and each reach of their gradient, the first layer and each
    owner of tied weights one of their own.

    Args:
        base: states sequence length, moments, clipping and stack.
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
        self._passes: dict[tuple[LayerConfig, ExchangeKey | None, PassWay], dict[int, Floats]] = {}
        self._alone: dict[tuple[LayerConfig, PassWay], dict[int, tuple[Floats, Floats]]] = {}
        self._added: dict[tuple[object, ...], tuple[float, float]] = {}
        self._tables: Callable[
            [LayerConfig, PassWay], tuple[list[Counter[Collective]], PassPrices]
        ] = cache(self._table)
        self._devices = {
            offloads: machine.device.effective(offloads=offloads) for offloads in (False, True)
        }
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
        self, config: LayerConfig, micros: Sequence[int], exchange: ExchangeKey, way: PassWay
    ) -> list[Floats]:
        """Seconds of a pass for each of some micro-batch sizes, each `[column]`.

        Args:
            micros: sequences of a micro-batch.
            exchange: what communication in passes depends on besides.
            way: the kind of pass, and whether layers are recomputed selectively.

        Raises:
            KeyError: the machine states no rate or link, or the graph no cost, that is needed.
        """
        sends = config.tensor > 1 or config.reshard or config.context or config.expert
        key = config._replace(reshard=config.reshard if sends else None)
        known = self._passes.setdefault((key, exchange if sends else None, way), {})
        missing = [micro for micro in micros if micro not in known]
        if missing:
            work, host = self._alone_seconds(config, missing, way)
            beside = self._exchanged(config, missing, exchange, way) if sends else (0.0, 0.0)
            seconds = exposed_seconds(self._rates(config), work, host, *beside)
            known.update(zip(missing, seconds.T, strict=True))
        return [known[micro] for micro in micros]

    def between(self, pipeline: int) -> int:
        """Number of stages if they lie between replicas, else 1."""
        stack = self._machine.stack
        return pipeline if stack is not None and stack.stages_adjacent else 1

    def kinds(
        self, config: LayerConfig, loss: Literal["fused"] | None = None
    ) -> tuple[LayerKind, ...]:
        """The layer kind of each column as a rank has it: its shard, experts and tokens.

        Args:
            loss: the plan's `loss`, for what passes cost.
        """
        mode = config.precision, config.compiled
        return self._kinds(config.tensor, config.expert, config.context, loss, mode)

    def _kinds_of(
        self,
        tensor: int,
        expert: int | None,
        context: int | None,
        loss: Literal["fused"] | None,
        mode: tuple[Precision, bool],
    ) -> tuple[LayerKind, ...]:
        kinds = self._graph.shard(tensor, loss=loss).kinds
        if expert or context:
            kinds = {name: kind.of_mode(*mode) for name, kind in kinds.items()}
            kinds = divided_kinds(gathered_kinds(kinds, context or 1), expert or 1)
        return tuple(kinds[name] for name in self._names)

    def _rates(self, config: LayerConfig) -> DeviceRates:
        mode = OpContext(
            self._base.batch.sequence, config.precision, config.compiled, config.context or 1,
            bool(self._base.deterministic), bool(self._base.step_graph),
            padded_vocabulary(self._graph, config.tensor, config.loss),
            self._graph.document_tokens,
        )  # fmt: skip
        in_turn = self._machine.execution_model == "bulk-synchronous"
        return DeviceRates(self.device(config), mode, self._machine.stack, in_turn=in_turn)

    def _alone_seconds(
        self, config: LayerConfig, micros: Sequence[int], way: PassWay
    ) -> tuple[Floats, Floats]:
        """Seconds of work and of the host of a pass without communication, `[column, micro]`."""
        config = config._replace(reshard=None)
        if self.device(config) is self._devices[False]:
            config = config._replace(optimizer_tier=DEVICE_TIER)
        known = self._alone.setdefault((config, way), {})
        missing = [micro for micro in micros if micro not in known]
        if missing:
            parts = np.array([micro / (config.context or 1) for micro in missing])
            work, host = self._tables(config, way)[1].seconds(parts)
            known.update(zip(missing, zip(work.T, host.T, strict=True), strict=True))
        work, host = (
            np.stack(each, axis=1) for each in zip(*(known[micro] for micro in micros), strict=True)
        )
        return work, host

    def _table(
        self, config: LayerConfig, way: PassWay
    ) -> tuple[list[Counter[Collective]], PassPrices]:
        """The collectives of a pass of all columns, and its prices."""
        passes = []
        for layer, each in zip(self.layers, self.kinds(config, config.loss), strict=True):
            cost = self.cost(config, each, selective=way.selective)
            ops = pass_ops(way.kind, each, cost, reach=self._graph.gradient_reach(layer))
            passes.append(LayerPass(ops, cost, backward="backward" in way.kind))
        sent = [Counter(op.collective for op in run.ops if op.collective) for run in passes]
        return sent, PassPrices(passes, self._rates(config), tensor=int(config.tensor))

    def cost(self, config: LayerConfig, kind: LayerKind, *, selective: bool) -> LayerCost:
        """The cost of a layer; the plain one if it has none that is recomputed selectively."""
        mode = kind.captured(config.precision), config.compiled
        can = selective and any(
            mode == (cost.precision, cost.compiled) for cost in kind.selective_costs
        )
        cost = kind.cost(config.precision, compiled=config.compiled, selective=can)
        sequence = self._base.batch.sequence
        return with_attention(cost, kind, config.attention, sequence, selective=can)

    def _exchanged(
        self, config: LayerConfig, micros: Sequence[int], exchange: ExchangeKey, way: PassWay
    ) -> tuple[Floats, Floats]:
        """Seconds of collectives and of gathers of a pass, `[column, micro]`."""
        data, parameters, accumulates, pipeline = exchange

        def plan(micro: int) -> Plan:
            return self.plan(
                config,
                micro=micro,
                data=data,
                sharding=(parameters, parameters),
                accumulates=accumulates,
                pipeline=pipeline,
            )

        first = plan(micros[0])
        costs = CommunicationCosts(first, self._graph, self._machine)
        collectives, _ = self._tables(
            config._replace(reshard=None, optimizer_tier=DEVICE_TIER), way
        )
        sent = np.zeros((len(collectives), len(micros)))
        for column, counts in enumerate(collectives):
            for collective, times in counts.items():
                nbytes = np.array(
                    [pass_collective(collective, first, each).sent_bytes for each in micros]
                )
                if nbytes.any():
                    one, fixed = costs.pass_collective_cost(collective.kind, collective.axis)
                    sent[column] += times * np.where(nbytes > 0, nbytes * one + fixed, 0.0)
        if not config.reshard and (config.context is None or self._machine.stack is None):
            return sent, np.zeros_like(sent)
        gathers = [
            CommunicationCosts(plan(micro), self._graph, self._machine).gather_seconds
            for micro in micros
        ]
        return sent, np.array(
            [
                [seconds(Instruction(way.kind, layer)) for seconds in gathers]
                for layer in self.layers
            ]
        )

    def _sums(
        self, config: LayerConfig, accumulates: bool, micro: int, shared: tuple[int, ...]
    ) -> Floats:
        """Seconds to accumulate gradients of the first and of a later micro-batch, `[2, column]`.

        Args:
            accumulates: whether a step has several micro-batches.
            shared: elements of each column that another layer of its stage uses.
        """
        plan = self.plan(config, micro=micro, accumulates=accumulates)
        part, sequence = micro_of_rank(plan), plan.batch.sequence
        alike = config._replace(context=None, reshard=None, loss=None, attention=None)
        times = []
        for column, (kind, elements) in enumerate(zip(self.kinds(config), shared, strict=True)):
            rows = sum(kind.pass_gradient_elements(part, sequence))
            key = (alike, accumulates, column, elements, rows)
            if key not in self._added:
                self._added[key] = self._sum_seconds(config, plan, kind, elements, rows)
            times.append(self._added[key])
        return np.array(times).T

    def _sum_seconds(
        self, config: LayerConfig, plan: Plan, kind: LayerKind, elements: int, rows: int
    ) -> tuple[float, float]:
        """Seconds to accumulate gradients of a layer of the first and of a later micro-batch."""
        device = self.device(config)

        def seconds(first: bool) -> float:
            moved = grad_accumulation_bytes(
                kind, plan, self._machine.stack, shared=elements, rows=rows, first=first
            )
            return sum(copy_seconds(nbytes, device) for nbytes in moved)

        return seconds(True), seconds(False)

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
