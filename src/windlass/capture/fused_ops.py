"""Ops of a layer that runs compiled: what `torch.compile` makes of the recorded calls.

Three things change (read off the graphs of AOTAutograd and the code of Inductor, torch 2.13):

1. Adjacent calls that are bound by memory become one; what only they use is never written. What
   slices exchange stands alone, and is never exchanged again to save memory.
2. What a later matrix product or fused attention of the backward pass reads is kept as it is; what
   only element-wise work reads is made again from what is kept (the partitioner's min-cut).
3. A fused call writes its result over an operand of the same size that nobody needs any more; the
   backward pass may overwrite what forward kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windlass.capture.eager_ops import matmul_shape, layout_copy_bytes, collective_of
from windlass.capture.polynomial_fit import sum_quantities
from windlass.capture.trace import TracedCall, FittedTrace, LayerTrace
from windlass.schema.graph import PRECISION_BYTES, LayerCost, Op, Precision, Polynomial

_TYPICAL = (4, 512)
"""Micro-batch and sequence at which sizes are compared."""

_SUMS_IN_FLOAT32 = "embedding_dense_backward"
"""Compiled, it adds up a table in float32 and then rounds it to the table's precision."""


_KEPT = frozenset({"exp"})
"""Kept as it is, though it could be made again from something smaller: the partitioner prefers what
lies near the backward pass, as the exponentials of a loss that slices compute together do."""

_WRITTEN_OUT = frozenset({"scatter_add"})
"""Its result is changed in place, so that it lies in memory even between calls that run as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Calls that run as one."""

    calls: tuple[TracedCall, ...]
    reads: dict[int, Polynomial]
    """Bytes read of each buffer from outside."""
    writes: dict[int, Polynomial]
    """Bytes written of each buffer that somebody else needs."""


def compiled_cost(fitted: FittedTrace, precision: Precision) -> LayerCost:
    """What the layer costs, compiled."""
    saved = _saved(fitted)
    groups, first_backward = _groups(fitted, saved)
    lives = _lives(fitted, groups, first_backward, saved)
    ops = tuple(
        _op(fitted, group, live, precision) for group, live in zip(groups, lives, strict=True)
    )
    return LayerCost(
        precision=precision,
        compiled=True,
        forward=ops[:first_backward],
        backward=ops[first_backward:],
        saved_bytes=sum_quantities(_bytes(fitted, buffer) for buffer in sorted(saved)),
        input_bytes=fitted.numbers[fitted.trace.input_bytes],
        output_bytes=fitted.numbers[fitted.trace.output_bytes],
    )


# What is kept for backward.


def _saved(fitted: FittedTrace) -> frozenset[int]:
    """Buffers of the forward pass that are kept."""
    trace = fitted.trace
    made = _makers(trace)
    wanted: dict[int, bool] = {}
    for call in trace.calls[trace.forward_calls :]:
        for touch in call.reads:
            if touch.buffer in made and trace.buffers[touch.buffer].role == "inner":
                fixed = call.kind != "memory" or _fixed(fitted, touch.buffer, made)
                wanted[touch.buffer] = wanted.get(touch.buffer, False) or fixed
    saved = {buffer for buffer, fixed in wanted.items() if fixed}
    travelling = _read_by_later_runs(trace)
    for buffer in sorted(buffer for buffer, fixed in wanted.items() if not fixed):
        extra = _roots(fitted, buffer, made, saved) - saved
        # Where both cost the same, keep the buffer that is written out anyway.
        spare = 0.5 * _size(fitted, buffer) if buffer in travelling else 0
        if sum(_size(fitted, root) for root in extra) + spare <= _size(fitted, buffer):
            saved |= extra
        else:
            saved.add(buffer)
    return frozenset(saved)


def _read_by_later_runs(trace: LayerTrace) -> set[int]:
    """Buffers that the forward pass reads in another run than the one that makes them."""
    found: set[int] = set()
    for run in _runs(trace.calls[: trace.forward_calls]):
        own = {touch.buffer for call in run for touch in call.writes}
        found |= {touch.buffer for call in run for touch in call.reads} - own
    return found


def _makers(trace: LayerTrace) -> dict[int, TracedCall]:
    """The forward call that wrote each buffer."""
    forward = trace.calls[: trace.forward_calls]
    return {touch.buffer: call for call in forward for touch in call.writes}


def _fixed(fitted: FittedTrace, buffer: int, made: dict[int, TracedCall]) -> bool:
    """Whether a buffer is never made again.

    Products, random numbers and small results are not, nor what is changed in place.
    """
    if made[buffer].name in _KEPT:
        return True
    call = made[buffer]
    in_place = any(touch.buffer == buffer for touch in call.reads)
    if call.kind != "memory" or call.random or in_place:
        return True
    largest = max((_size(fitted, touch.buffer) for touch in call.reads), default=0)
    return _size(fitted, buffer) * 2 < largest


def _roots(
    fitted: FittedTrace, buffer: int, made: dict[int, TracedCall], saved: set[int] | frozenset[int]
) -> set[int]:
    """The buffers, to be kept, from which this one is made again."""
    found: set[int] = set()
    for touch in made[buffer].reads:
        source = touch.buffer
        if source not in made or source == buffer:
            continue
        if fitted.trace.buffers[source].role != "inner":
            continue  # the caller holds it anyway
        if source in saved or _fixed(fitted, source, made):
            found.add(source)
        else:
            found |= _roots(fitted, source, made, saved)
    return found


# What runs as one.


def _groups(fitted: FittedTrace, saved: frozenset[int]) -> tuple[list[_Group], int]:
    """All groups, and how many of them are the forward pass."""
    trace = fitted.trace
    forward = list(_runs(trace.calls[: trace.forward_calls]))
    backward = list(_runs(trace.calls[trace.forward_calls :]))
    runs = [*forward, *backward]
    reads = [
        _outside_reads(fitted, run, saved, backward=place >= len(forward))
        for place, run in enumerate(runs)
    ]
    groups = []
    for place, run in enumerate(runs):
        needed = saved.union(*reads[place + 1 :])
        writes: dict[int, Polynomial] = {}
        for call in run:
            for touch in call.writes:
                role = trace.buffers[touch.buffer].role
                ends = trace.buffers[touch.buffer].freed_at is None or call.name in _WRITTEN_OUT
                if touch.buffer in needed or role in ("output", "gradient") or ends:
                    writes[touch.buffer] = fitted.numbers[touch.nbytes]
        groups.append(_Group(calls=run, reads=reads[place], writes=writes))
    return groups, len(forward)


def _runs(calls: Sequence[TracedCall]) -> Iterator[tuple[TracedCall, ...]]:
    """Maximal runs of memory calls; any other call stands alone."""
    run: list[TracedCall] = []
    for call in calls:
        if call.kind == "memory":
            run.append(call)
            continue
        if run:
            yield tuple(run)
        run = []
        yield (call,)
    if run:
        yield tuple(run)


def _outside_reads(
    fitted: FittedTrace, run: tuple[TracedCall, ...], saved: frozenset[int], *, backward: bool
) -> dict[int, Polynomial]:
    """Bytes read of each buffer that the run does not make itself."""
    made = _makers(fitted.trace)
    reads: dict[int, Polynomial] = {}
    own: set[int] = set()
    for call in run:
        here: dict[int, Polynomial] = {}
        for touch in call.reads:
            if touch.buffer in own:
                continue
            gone = backward and touch.buffer in made and touch.buffer not in saved
            if gone and fitted.trace.buffers[touch.buffer].role == "inner":
                for source in _sources(fitted, touch.buffer, made, saved):
                    here[source] = _bytes(fitted, source)
            else:
                several = [here.get(touch.buffer, Polynomial()), fitted.numbers[touch.nbytes]]
                here[touch.buffer] = _least(sum_quantities(several), _bytes(fitted, touch.buffer))
        for buffer, nbytes in here.items():
            reads[buffer] = _most(reads.get(buffer, Polynomial()), nbytes)
        own |= {touch.buffer for touch in call.writes}
    return reads


def _sources(fitted: FittedTrace, buffer: int, made: dict[int, TracedCall], saved: frozenset[int]) -> set[int]:
    """What is read to make a buffer again, the caller's own tensors included."""
    found: set[int] = set()
    for touch in made[buffer].reads:
        source = touch.buffer
        held = source not in made or source in saved
        if held or fitted.trace.buffers[source].role != "inner":
            found.add(source)
        elif source != buffer:
            found |= _sources(fitted, source, made, saved)
    return found


# What is alive.


def _lives(
    fitted: FittedTrace, groups: Sequence[_Group], first_backward: int, saved: frozenset[int]
) -> list[Polynomial]:
    """Bytes alive while each group runs."""
    buffers = fitted.trace.buffers
    born, last = _spans(fitted, groups, first_backward, saved)
    lives = []
    for place, group in enumerate(groups):
        alive = [
            buffer
            for buffer in born
            if born[buffer] <= place <= last[buffer]
            and buffers[buffer].is_charged(forward=place < first_backward)
        ]
        dying = [b for b in alive if last[b] == place and born[b] < place]
        reused = _reused(fitted, group, dying)
        lives.append(sum_quantities(_bytes(fitted, buffer) for buffer in alive if buffer not in reused))
    return lives


def _spans(
    fitted: FittedTrace, groups: Sequence[_Group], first_backward: int, saved: frozenset[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The group that makes each buffer, and the last one during which it is there."""
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, group in enumerate(groups):
        for buffer in group.writes:
            born.setdefault(buffer, place)
            last[buffer] = place
        for buffer in group.reads:
            if buffer in born:
                last[buffer] = place
    for buffer, start in born.items():
        forward = start < first_backward
        stays = fitted.trace.buffers[buffer].freed_at is None and buffer not in saved
        if forward and (stays or fitted.trace.buffers[buffer].role == "output"):
            last[buffer] = first_backward - 1
        elif stays:
            last[buffer] = len(groups) - 1
        elif buffer in saved:
            last[buffer] = max(last[buffer], first_backward)
    return born, last


def _reused(fitted: FittedTrace, group: _Group, dying: Sequence[int]) -> set[int]:
    """Operands that end here and whose memory a result of the same size takes."""
    if group.calls[0].kind != "memory":
        return set()
    hosts: set[int] = set()
    apart = {t.buffer for call in group.calls if call.name in _WRITTEN_OUT for t in call.writes}
    for result in group.writes:
        if result in apart:
            continue
        size = _size(fitted, result)
        host = next((b for b in dying if b not in hosts and _size(fitted, b) == size), None)
        if (
            host is not None
            and host in group.reads
            and fitted.trace.buffers[result].role != "gradient"
        ):
            hosts.add(host)
    return hosts


def _op(fitted: FittedTrace, group: _Group, live: Polynomial, precision: Precision) -> Op:
    numbers = fitted.numbers
    first = group.calls[0]
    read, written = sum_quantities(group.reads.values()), sum_quantities(group.writes.values())
    live = sum_quantities([live, layout_copy_bytes(first, numbers)])
    wide = 4 // PRECISION_BYTES[precision]
    for call in group.calls:
        if call.name == _SUMS_IN_FLOAT32 and wide > 1:
            table = sum_quantities([numbers[call.writes[0].nbytes]] * wide)
            read, written, live = (
                sum_quantities([read, table]),
                sum_quantities([written, table]),
                sum_quantities([live, table]),
            )
    return Op(
        name="+".join(call.name for call in group.calls),
        kind=first.kind,
        flop=sum_quantities(numbers[call.flop] for call in group.calls),
        read_bytes=read,
        written_bytes=written,
        live_bytes=live,
        shape=matmul_shape(first, numbers) if len(group.calls) == 1 else None,
        collective=collective_of(first, numbers),
    )


def _bytes(fitted: FittedTrace, buffer: int) -> Polynomial:
    return fitted.numbers[fitted.trace.buffers[buffer].nbytes]


def _size(fitted: FittedTrace, buffer: int) -> float:
    return _bytes(fitted, buffer).at(*_TYPICAL)


def _least(one: Polynomial, other: Polynomial) -> Polynomial:
    return min(one, other, key=lambda quantity: quantity.at(*_TYPICAL))


def _most(one: Polynomial, other: Polynomial) -> Polynomial:
    return max(one, other, key=lambda quantity: quantity.at(*_TYPICAL))
