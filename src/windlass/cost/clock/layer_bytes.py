"""Layer bytes: sizes of each kind of layer, found once for each way that plans compute.

The same sizes as `program.memory.layer_sizes`, for many micro-batch sizes at once.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

from windlass.cost.arrays import Floats
from windlass.cost.clock.layer_prices import LayerPrices
from windlass.cost.clock.plan_columns import LayerConfig
from windlass.cost.clock.price_keys import StateKey
from windlass.cost.op_time import quantity_values
from windlass.program import layer_kind_state_sizes, weight_gradient_elements
from windlass.schema import DEVICE_TIER, PRECISION_BYTES, LayerCost, LayerKind


class ActivationBytes(NamedTuple):
    """Bytes of one micro-batch in a layer; names as in `LayerSizes`."""

    output: Floats
    saved: Floats
    backward_peak: Floats
    pass_gradients: Floats


class StateBytes(NamedTuple):
    """Bytes of a layer's model state; names as in `LayerSizes`."""

    weights: Floats
    gathered: Floats
    weight_shard: Floats
    optimizer: Floats
    gradients: Floats
    gradient_shard: Floats


class LayerBytes:
    """Bytes of a graph's layers, by the columns of their prices.

    Args:
        prices: prices of the layers.
    """

    def __init__(self, prices: LayerPrices, sequence: int) -> None:
        self._prices, self._sequence = prices, sequence
        self._activations: dict[LayerConfig, dict[int, Floats]] = {}
        self.state: Callable[[StateKey], Floats] = cache(self._state)
        """`StateBytes` of all columns, `[name, column]`."""

    def activations(self, config: LayerConfig, micros: Sequence[int]) -> list[Floats]:
        """`ActivationBytes` of some micro-batch sizes, each `[name, selective, column]`."""
        config = config._replace(optimizer_tier=DEVICE_TIER, reshard=None)
        known = self._activations.setdefault(config, {})
        missing = [micro for micro in micros if micro not in known]
        if missing:
            parts = np.array(missing) / (config.context or 1)
            kinds = self._prices.kinds(config, config.loss)
            costs = [
                [(kind, self._prices.cost(config, kind, selective=some)) for kind in kinds]
                for some in (False, True)
            ]
            sizes = [[self._sizes(kind, cost, parts) for kind, cost in each] for each in costs]
            known.update(zip(missing, np.transpose(sizes, (3, 2, 0, 1)), strict=True))
        return [known[micro] for micro in micros]

    def _sizes(self, kind: LayerKind, cost: LayerCost, micros: Floats) -> ActivationBytes:
        """Bytes of a layer, `[micro]`; as `program.memory.layer_sizes.layer_kind_sizes`."""
        sequence, element_bytes = self._sequence, PRECISION_BYTES[cost.precision]
        saved, output = np.rint(
            quantity_values([cost.saved_bytes, cost.output_bytes], micros, sequence)
        )
        made = np.array(
            [float(sum(kind.pass_gradient_elements(micro, sequence))) for micro in micros.tolist()]
        )
        elements = np.array([float(weight_gradient_elements(op)) for op in cost.backward])
        so_far = np.maximum(0.0, made - elements.sum()) + np.cumsum(elements)[:, None]
        live = quantity_values([op.live_bytes for op in cost.backward], micros, sequence)
        peak = np.rint((live + so_far * element_bytes).max(axis=0, initial=0.0))
        if any(cost is fused for fused in kind.fused_costs):
            # Its forward pass needs most, and its backward pass follows at once.
            live = quantity_values([op.live_bytes for op in cost.forward], micros, sequence)
            peak = np.maximum(peak, np.rint(live.max(axis=0)))
        return ActivationBytes(
            output=output,
            saved=saved,
            backward_peak=np.maximum(0.0, peak - saved),
            pass_gradients=made * element_bytes,
        )

    def _state(self, key: StateKey) -> Floats:
        plan = self._prices.state_plan(key)
        sizes = [layer_kind_state_sizes(plan, kind) for kind in self._prices.kinds(key.config)]
        return np.array([[getattr(each, name) for each in sizes] for name in StateBytes._fields])

    def rows_bytes(self, config: LayerConfig, micro: int, accumulation: int) -> Floats:
        """`sparse_rows` of `LayerSizes` of all columns, `[column]`."""
        before = micro / (config.context or 1) * (accumulation - 1)
        return np.array(
            [
                4.0 * sum(kind.pass_gradient_elements(before, self._sequence))
                if kind.is_embedding and before
                else 0.0
                for kind in self._prices.kinds(config)
            ]
        )
