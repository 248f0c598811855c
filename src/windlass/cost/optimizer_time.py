"""Time of what follows a layer's passes: the gradient norm and the optimizer's step."""

from windlass.cost.op_time import TermSeconds
from windlass.program import updated_elements
from windlass.schema import (
    OWN_STACK,
    Device,
    LayerKind,
    MomentFormat,
    OptimizerLaw,
    Plan,
    Stack,
    optimizer_law,
)

_GRADIENT_SUM_BYTES = 4
"""Bytes of an accumulated gradient: float32."""
_MOMENT_BYTES = 4
_MOMENT_OPS: dict[MomentFormat, int] = {"float32": 0, "bfloat16": 6, "int8": 29}
"""Element-wise operations of `torch_ext.quantized_moments` that decode and encode a part, each with
one float32 read and one written: their cost on a machine where nobody measured it."""
_PART_ELEMENTS = 2**17
"""Elements of such a part."""
_MASTER_BYTES = 4
_AVERAGE_BYTES = 12
"""Bytes that an average of the weights reads and writes: itself twice, and the masters again."""
_NORM_CALLS = 7
"""Eager operations for each weight on a CPU: its gradient is flattened, split and normed, and the
norm is added."""
_SHORT_CALL = 0.4
"""Host time on a CPU of a copy, a split or a norm, as a share of a mean op's of a layer, where the
products and attention take longer; and of a weight's conversion, as a share of a pass's."""
_NORM_LAUNCHES = 24
"""Launches of the norm on an accelerator, which norms all layers of a stage in one call: the fake
accelerator of the tests counts 24 for two blocks of `gpt2-124m` and 28 for its twelve. A further
kernel reads 21 M gradients, for longer than its launch takes."""
_CALL_LAUNCHES = 2
"""Launches of one call of the fused update on an accelerator: step counts, and the update itself.
Weights that decay and those that do not take a call each."""
_CONVERSION_LAUNCHES = 2
"""Further launches of a call in bfloat16: gradients to float32, and master weights to bfloat16."""
_CALL_ELEMENTS = 2**24
"""Elements that one call converts on an accelerator; see `torch_ext.Device.piece_elements`."""


def norm_call_seconds(plan: Plan, device: Device, stack: Stack | None = None) -> float:
    """Launch time of the gradient norm of a stage with any trained layer, beside that of layers."""
    if device.kind == "cpu" or (stack or OWN_STACK).fused_optimizer or plan.step_graph:
        return 0.0
    return _NORM_LAUNCHES * device.launch_seconds


def norm_launch_seconds(
    plan: Plan, kind: LayerKind, device: Device, stack: Stack | None = None
) -> float:
    """Launch time of the gradient norm of one layer's weights; arguments as in `update_seconds`."""
    if device.kind != "cpu" or (stack or OWN_STACK).fused_optimizer or plan.step_graph:
        return 0.0
    trained = sum(not each.frozen for each in kind.parameters)
    return _NORM_CALLS * _SHORT_CALL * device.launch_seconds * trained


def norm_rate(plan: Plan, device: Device) -> float | None:
    """Bytes/s of the gradient norm; None means the rate of plain memory traffic."""
    mixed = device.mixed_norm_rate if plan.gradient_itemsize != _GRADIENT_SUM_BYTES else None
    return mixed or device.norm_rate


def update_seconds(
    plan: Plan,
    kind: LayerKind,
    device: Device,
    stack: Stack | None = None,
    *,
    full: LayerKind | None = None,
) -> TermSeconds:
    """Seconds of the optimizer's update of a layer.

    It reads master weights, moments and the gradient; it writes all but the gradient. In bfloat16
    it also writes the weights that layers compute with. Decoded moments are still in the cache when
    it reads them. With gradient clipping, torch's fused kernels write back the gradient that they
    have divided: the gradient itself, or a copy in the cache if it was converted. An optimizer that
    is no fused kernel takes several operations a piece.

    Args:
        plan: states the moments' format and the sharding of optimizer state.
        device: the device as it computes under the plan.
        stack: the software; None means Windlass's own runtime.
        full: the kind before tensor parallelism, whose matrices each rank updates whole; None
            means `kind`.
    """
    law, decodes = optimizer_law(plan.optimizer), plan.moments != "float32"
    moments = float(law.moments_of(matrix=False))
    matrices = kind.updated_as_matrices(law)
    if matrices and not decodes:
        share = sum(p.count for p in matrices) / kind.trained_count
        moments += share * (law.moments_of(matrix=True) - moments)
    converts = plan.parameter_itemsize != _MASTER_BYTES and plan.master_weights is None
    masters = _MASTER_BYTES if plan.master_weights is None else plan.parameter_itemsize
    state = masters + (0 if decodes else _MOMENT_BYTES * moments)
    working = plan.parameter_itemsize if converts else 0
    divided = (
        _GRADIENT_SUM_BYTES if plan.clip and plan.gradient_itemsize == _GRADIENT_SUM_BYTES else 0
    )
    moved = 2 * state + plan.gradient_itemsize + divided + working
    moved += 0 if plan.ema is None else _AVERAGE_BYTES
    elements = updated_elements(plan, kind)
    rate = (device.mixed_update_rate if working else None) or device.update_rate
    seconds = elements * moved / rate + elements * _piece_seconds(law, device, moved)
    seconds += _matrix_seconds(plan, full or kind, device)
    if device.kind == "cpu" or decodes:
        launches = _call_seconds(plan, kind, device)
    else:
        # The host launches ahead: only what exceeds the work counts.
        launches = max(0.0, _update_launches(plan, kind) * device.launch_seconds - seconds)
    if decodes:
        counts = [p.count for p in kind.trained]
        recoded = counts if plan.sharding.optimizer == 1 else [elements]
        recoding = _recode_seconds(plan.moments, recoded, device)
        seconds, launches = seconds + recoding.update, launches + recoding.launch
    if (stack or OWN_STACK).fused_optimizer or plan.step_graph:
        launches = 0.0
    return TermSeconds(update=seconds, launch=launches)


def _matrix_seconds(plan: Plan, kind: LayerKind, device: Device) -> float:
    """Seconds of the products that update whole matrices, in 16 bits where a device has them."""
    law = optimizer_law(plan.optimizer)
    if law.scope != "matrix":
        return 0.0
    rate = device.rate(device.half_precision)
    seconds = 0.0
    for matrix in kind.matrices:
        rows, columns = matrix.shape
        product = 2 * min(rows, columns) * rows * columns
        seconds += law.matrix_flop(rows, columns) / rate.curve.at(product)
    return seconds


def _piece_seconds(law: OptimizerLaw, device: Device, moved: float) -> float:
    """Seconds per element of what an update that is no fused kernel reads and writes again.

    It does so at the rate of AdamW's update, also on a CPU: a piece of some tensors, each of 8 MiB,
    is in no core's cache.

    Args:
        law: the optimizer.
        moved: bytes that a fused kernel would read and write for each element.
    """
    again = max(0.0, 4 * law.accesses - moved)
    if law.fused or not again:
        return 0.0
    return again / device.update_rate


def _update_launches(plan: Plan, kind: LayerKind) -> int:
    """Launches of the update of a layer on an accelerator: a few for all of its weights together.

    Args:
        plan: states precision and sharding.
    """
    decays = {len(p.shape) >= 2 for p in kind.trained}
    converts = plan.parameter_itemsize != _MASTER_BYTES
    in_pieces = converts or not optimizer_law(plan.optimizer).fused
    pieces = -(-updated_elements(plan, kind) // _CALL_ELEMENTS) if in_pieces else 1
    law = optimizer_law(plan.optimizer)
    own = len(kind.trained)
    # Weights are updated together only where none reads a norm of its own.
    calls = (own if law.scope == "tensor" else len(decays)) + max(0, pieces - 1)
    launches = calls * (_CALL_LAUNCHES + (_CONVERSION_LAUNCHES if converts else 0))
    several = len(kind.matrices) if law.scope == "matrix" else calls
    return launches + several * (law.calls - 1)


def _call_seconds(plan: Plan, kind: LayerKind, device: Device) -> float:
    """Host time of the calls that update a layer where each weight has its own.

    Args:
        plan: states precision and the moments' format.
    """
    counts = [p.count for p in kind.trained]
    law, decodes = optimizer_law(plan.optimizer), plan.moments != "float32"
    calls = sum(-(-count // _PART_ELEMENTS) if decodes else 1 for count in counts)
    calls += plan.ema is not None
    # Beside matrices that are updated whole there are weights with a fused kernel.
    several = len(kind.matrices) if law.scope == "matrix" else calls
    calls += several * (law.calls - 1)
    seconds = calls * (device.update_call_seconds or device.launch_seconds)
    if plan.parameter_itemsize != _MASTER_BYTES:
        # A CPU runs what the host interprets too.
        seconds += len(counts) * _SHORT_CALL * device.pass_seconds
    return seconds


def _recode_seconds(moments: MomentFormat, counts: list[int], device: Device) -> TermSeconds:
    """Seconds to decode and encode moments part by part: `parts x a + elements x e`.

    With a measured rate r and cost a of a part, `e = 1/r - a/131072`: the rate is that of whole
    parts. A layer's many small weights, each a part, can take as long as its few large ones.

    Args:
        moments: format of the moments.
        counts: elements of each weight that the device updates.
        device: the device that updates them.
    """
    elements = sum(counts)
    parts = sum(-(-count // _PART_ELEMENTS) for count in counts)
    for rate in device.moment_rates:
        if rate.moments == moments:
            element_seconds = max(0.0, 1 / rate.elements - rate.part_seconds / _PART_ELEMENTS)
            return TermSeconds(update=elements * element_seconds, launch=parts * rate.part_seconds)
    ops, moved = _MOMENT_OPS[moments], 2 * 4 * _PART_ELEMENTS
    element_seconds = 2 * 4 * ops / device.traffic.at(moved)
    return TermSeconds(
        update=elements * element_seconds, launch=parts * ops * device.launch_seconds
    )
