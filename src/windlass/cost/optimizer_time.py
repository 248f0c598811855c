"""Update: seconds of what comes behind the passes of a layer, the norm and the optimizer's step."""

from windlass.cost.op_time import TermSeconds
from windlass.program.zero_sharding import padded_elements
from windlass.schema.graph import LayerKind
from windlass.schema.machine import Device
from windlass.schema.plan import MomentFormat, Plan

_SUM_BYTES = 4
"""Gradients are summed in float32."""
_MOMENT_BYTES = 8
_MOMENT_OPS: dict[MomentFormat, int] = {"float32": 0, "bfloat16": 6, "int8": 29}
"""Element-wise ops of `machines.moments` that decode and encode a part, each over one float32 read
and one written: what they take where nobody measured."""
_PART = 2**17
"""Elements of such a part."""
_MASTER_BYTES = 4
_NORM_CALLS = 7
"""A weight's gradient is laid flat, split, handed to the norm and its norm to the sum, counted in
ops of eager code."""
_CONVERSIONS = 14
"""In bfloat16 a weight is also split into its parts, and gradient and weight are converted."""


def updated_elements(plan: Plan, kind: LayerKind) -> int:
    """Elements of a layer that one device updates: its share, where replicas share them."""
    return padded_elements(kind.parameter_count, plan) // plan.sharding.optimizer


def norm_launch_seconds(kind: LayerKind, device: Device) -> float:
    """Seconds of starting what the norm takes of one layer's weights."""
    return _NORM_CALLS * device.launch_seconds * len(kind.parameters)


def norm_rate(plan: Plan, device: Device) -> float | None:
    """Bytes/s of the norm over gradients; None: that of plain traffic."""
    mixed = device.mixed_norm_rate if plan.gradient_itemsize != _SUM_BYTES else None
    return mixed or device.norm_rate


def update_seconds(plan: Plan, kind: LayerKind, device: Device) -> TermSeconds:
    """AdamW reads master, two moments and the gradient; it writes all but the gradient.

    In bfloat16 it also writes the weights that layers compute with. Moments that are decoded are in
    the cache when it reads them. Where gradients are clipped, torch's fused AdamW writes back what
    it has divided: that is the gradient itself, or a copy in the cache where it has been converted.

    Args:
        plan: says how moments are kept and replicas share them.
        kind: of the layer.
        device: as it computes under the plan.
    """
    decodes = plan.moments != "float32"
    state = _MASTER_BYTES + (0 if decodes else _MOMENT_BYTES)
    working = 0 if plan.parameter_itemsize == _MASTER_BYTES else plan.parameter_itemsize
    divided = _SUM_BYTES if plan.clip and plan.gradient_itemsize == _SUM_BYTES else 0
    moved = 2 * state + plan.gradient_itemsize + divided + working
    owned = updated_elements(plan, kind)
    counts = [p.count for p in kind.parameters if p.tied_to is None]
    calls = sum(-(-count // _PART) if decodes else 1 for count in counts)
    launches = calls * (device.update_call_seconds or device.launch_seconds)
    if working:
        launches += _CONVERSIONS * len(counts) * device.launch_seconds
    rate = (device.mixed_update_rate if working else None) or device.update_rate
    seconds = owned * moved / rate
    if decodes:
        recoded = counts if plan.sharding.optimizer == 1 else [owned]
        recoding = _recoding(plan.moments, recoded, device)
        seconds, launches = seconds + recoding.update, launches + recoding.launch
    return TermSeconds(update=seconds, launch=launches)


def _recoding(moments: MomentFormat, counts: list[int], device: Device) -> TermSeconds:
    """Moments are decoded and encoded part by part: `parts x a + elements x e`.

    Of a measured rate r and cost a of a part, `e = 1/r - a/131072`: the rate is that of whole
    parts. A layer's many small weights, each a part, can take as long as its few large ones.

    Args:
        moments: how they are kept.
        counts: elements that the device updates of each weight.
        device: that does so.
    """
    elements = sum(counts)
    parts = sum(-(-count // _PART) for count in counts)
    for rate in device.moment_rates:
        if rate.moments == moments:
            each = max(0.0, 1 / rate.elements - rate.part_seconds / _PART)
            return TermSeconds(update=elements * each, launch=parts * rate.part_seconds)
    ops, moved = _MOMENT_OPS[moments], 2 * 4 * _PART
    each = 2 * 4 * ops / device.traffic.at(moved)
    return TermSeconds(update=elements * each, launch=parts * ops * device.launch_seconds)
