"""Ops of a compiled layer: what `torch.compile` makes of the recorded calls.

Three things change (read off the graphs of AOTAutograd and the code of Inductor, torch 2.13):

1. Adjacent memory-bound calls fuse into one op, and buffers that only they use are never written.
   Collectives do not fuse, and are never recomputed to save memory.
2. A buffer that a matrix product or fused attention of the backward pass reads is saved. One that
   only element-wise ops read is recomputed from saved ones (the partitioner's min-cut).
3. A fused op writes its result over an operand of the same size that is not needed any more; the
   backward pass may overwrite what forward saved.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from windlass.capture.eager_ops import (
    collective_of,
    kept_blocks,
    layout_copy_bytes,
    matmul_shape,
)
from windlass.capture.trace import FittedTrace, LayerTrace, TracedCall, sum_polynomials
from windlass.schema import PRECISION_BYTES, LayerCost, Op, Polynomial, Precision

_TYPICAL = (4, 512)
"""Micro-batch and sequence at which the sizes of buffers are compared."""

_SUMS_IN_FLOAT32 = "embedding_dense_backward"
"""When compiled, it accumulates a table in float32 and then rounds to the table's precision."""

_ALWAYS_SAVED = frozenset({"exp"})
"""Saved although it could be recomputed from something smaller: the partitioner prefers buffers
near the backward pass, such as the exponentials of a tensor-parallel loss."""

_MATERIALIZED = frozenset({"scatter_add"})
"""Its result is modified in place, so it is written to memory even inside a fused op."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FusedOp:
    """Calls that run as one op."""

    calls: tuple[TracedCall, ...]
    reads: dict[int, Polynomial]
    """Bytes that it reads of each buffer it does not make itself."""
    writes: dict[int, Polynomial]
    """Bytes that it writes of each buffer that others need."""


def compiled_cost(fitted: FittedTrace, precision: Precision) -> LayerCost:
    """Cost of a compiled layer."""
    saved = _saved_buffers(fitted)
    fused_ops, first_backward = _fuse(fitted, saved)
    live_bytes = _live_bytes(fitted, fused_ops, first_backward, saved)
    ops = tuple(
        _op(fitted, fused, live, precision)
        for fused, live in zip(fused_ops, live_bytes, strict=True)
    )
    return LayerCost(
        precision=precision,
        compiled=True,
        forward=ops[:first_backward],
        backward=ops[first_backward:],
        saved_bytes=sum_polynomials(_bytes(fitted, buffer) for buffer in sorted(saved)),
        input_bytes=fitted.numbers[fitted.trace.input_bytes],
        output_bytes=fitted.numbers[fitted.trace.output_bytes],
    )


# Buffers that are saved for backward.


def _saved_buffers(fitted: FittedTrace) -> frozenset[int]:
    """Buffers of the forward pass that are saved."""
    trace = fitted.trace
    writers = _forward_writers(trace)
    needed: dict[int, bool] = {}
    for call in trace.calls[trace.forward_calls :]:
        for access in call.reads:
            buffer = access.buffer
            if buffer in writers and trace.buffers[buffer].role == "internal":
                must_save = call.kind != "memory" or _never_recomputed(fitted, buffer, writers)
                needed[buffer] = needed.get(buffer, False) or must_save
    saved = {buffer for buffer, must_save in needed.items() if must_save}
    written = _read_by_later_ops(trace)
    for buffer in sorted(buffer for buffer, must_save in needed.items() if not must_save):
        sources = _sources_to_save(fitted, buffer, writers, saved) - saved
        # If both cost the same, save the buffer that is written to memory anyway.
        bonus = 0.5 * _size(fitted, buffer) if buffer in written else 0
        if sum(_size(fitted, source) for source in sources) + bonus <= _size(fitted, buffer):
            saved |= sources
        else:
            saved.add(buffer)
    return frozenset(saved)


def _read_by_later_ops(trace: LayerTrace) -> set[int]:
    """Buffers that the forward pass reads in another fused op than the one that makes them."""
    buffers: set[int] = set()
    for run in _fusible_runs(trace.calls[: trace.forward_calls]):
        made = {access.buffer for call in run for access in call.writes}
        buffers |= {access.buffer for call in run for access in call.reads} - made
    return buffers


def _forward_writers(trace: LayerTrace) -> dict[int, TracedCall]:
    """The forward call that wrote each buffer."""
    forward = trace.calls[: trace.forward_calls]
    return {access.buffer: call for call in forward for access in call.writes}


def _never_recomputed(fitted: FittedTrace, buffer: int, writers: dict[int, TracedCall]) -> bool:
    """Whether a buffer is never recomputed.

    This holds for products, random numbers, results much smaller than their operands, and buffers
    that are modified in place.
    """
    call = writers[buffer]
    if call.name in _ALWAYS_SAVED:
        return True
    in_place = any(access.buffer == buffer for access in call.reads)
    if call.kind != "memory" or call.random or in_place:
        return True
    largest = max((_size(fitted, access.buffer) for access in call.reads), default=0)
    return _size(fitted, buffer) * 2 < largest


def _sources_to_save(
    fitted: FittedTrace,
    buffer: int,
    writers: dict[int, TracedCall],
    saved: set[int] | frozenset[int],
) -> set[int]:
    """The buffers to save so that this one can be recomputed."""
    sources: set[int] = set()
    for access in writers[buffer].reads:
        source = access.buffer
        if source not in writers or source == buffer:
            continue
        if fitted.trace.buffers[source].role != "internal":
            continue  # the caller holds it anyway
        if source in saved or _never_recomputed(fitted, source, writers):
            sources.add(source)
        else:
            sources |= _sources_to_save(fitted, source, writers, saved)
    return sources


# Calls that fuse.


def _fuse(fitted: FittedTrace, saved: frozenset[int]) -> tuple[list[_FusedOp], int]:
    """All fused ops, and how many of them are the forward pass."""
    trace = fitted.trace
    forward = list(_fusible_runs(trace.calls[: trace.forward_calls]))
    backward = list(_fusible_runs(trace.calls[trace.forward_calls :]))
    runs = [*forward, *backward]
    reads = [
        _outside_reads(fitted, run, saved, backward=index >= len(forward))
        for index, run in enumerate(runs)
    ]
    fused_ops = []
    for index, run in enumerate(runs):
        needed = saved.union(*reads[index + 1 :])
        writes: dict[int, Polynomial] = {}
        for call in run:
            for access in call.writes:
                buffer = trace.buffers[access.buffer]
                escapes = buffer.role in ("output", "parameter_gradient")
                stays = buffer.freed_at is None or call.name in _MATERIALIZED
                if access.buffer in needed or escapes or stays:
                    writes[access.buffer] = fitted.numbers[access.nbytes]
        fused_ops.append(_FusedOp(calls=run, reads=reads[index], writes=writes))
    return fused_ops, len(forward)


def _fusible_runs(calls: Sequence[TracedCall]) -> Iterator[tuple[TracedCall, ...]]:
    """Maximal runs of memory-bound calls; any other call is a run of its own."""
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
    writers = _forward_writers(fitted.trace)
    reads: dict[int, Polynomial] = {}
    made: set[int] = set()
    for call in run:
        call_reads: dict[int, Polynomial] = {}
        for access in call.reads:
            buffer = access.buffer
            if buffer in made:
                continue
            recomputed = backward and buffer in writers and buffer not in saved
            if recomputed and fitted.trace.buffers[buffer].role == "internal":
                for source in _recompute_sources(fitted, buffer, writers, saved):
                    call_reads[source] = _bytes(fitted, source)
            else:
                accesses = [call_reads.get(buffer, Polynomial()), fitted.numbers[access.nbytes]]
                call_reads[buffer] = _smaller(sum_polynomials(accesses), _bytes(fitted, buffer))
        for buffer, nbytes in call_reads.items():
            reads[buffer] = _larger(reads.get(buffer, Polynomial()), nbytes)
        made |= {access.buffer for access in call.writes}
    return reads


def _recompute_sources(
    fitted: FittedTrace, buffer: int, writers: dict[int, TracedCall], saved: frozenset[int]
) -> set[int]:
    """Buffers that are read to recompute a buffer, the caller's own tensors included."""
    sources: set[int] = set()
    for access in writers[buffer].reads:
        source = access.buffer
        available = source not in writers or source in saved
        if available or fitted.trace.buffers[source].role != "internal":
            sources.add(source)
        elif source != buffer:
            sources |= _recompute_sources(fitted, source, writers, saved)
    return sources


# Bytes that are allocated.


def _live_bytes(
    fitted: FittedTrace, fused_ops: Sequence[_FusedOp], first_backward: int, saved: frozenset[int]
) -> list[Polynomial]:
    """Bytes of the pass that are allocated while each fused op runs."""
    buffers = fitted.trace.buffers
    first, last = _lifetimes(fitted, fused_ops, first_backward, saved)
    live_bytes = []
    for index, fused in enumerate(fused_ops):
        live = [
            buffer
            for buffer in first
            if first[buffer] <= index <= last[buffer]
            and buffers[buffer].is_charged(forward=index < first_backward)
        ]
        ending = [b for b in live if last[b] == index and first[b] < index]
        reused = _overwritten_operands(fitted, fused, ending)
        live_bytes.append(
            sum_polynomials(_bytes(fitted, buffer) for buffer in live if buffer not in reused)
        )
    return live_bytes


def _lifetimes(
    fitted: FittedTrace, fused_ops: Sequence[_FusedOp], first_backward: int, saved: frozenset[int]
) -> tuple[dict[int, int], dict[int, int]]:
    """The fused op that makes each buffer, and the last one during which it is allocated."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, fused in enumerate(fused_ops):
        for buffer in fused.writes:
            first.setdefault(buffer, index)
            last[buffer] = index
        for buffer in fused.reads:
            if buffer in first:
                last[buffer] = index
    for buffer, start in first.items():
        in_forward = start < first_backward
        stays = fitted.trace.buffers[buffer].freed_at is None and buffer not in saved
        if in_forward and (stays or fitted.trace.buffers[buffer].role == "output"):
            last[buffer] = first_backward - 1
        elif stays:
            last[buffer] = len(fused_ops) - 1
        elif buffer in saved:
            last[buffer] = max(last[buffer], first_backward)
    return first, last


def _overwritten_operands(fitted: FittedTrace, fused: _FusedOp, ending: Sequence[int]) -> set[int]:
    """Operands whose last use this is and whose memory a result of the same size takes."""
    if fused.calls[0].kind != "memory":
        return set()
    overwritten: set[int] = set()
    materialized = {
        access.buffer
        for call in fused.calls
        if call.name in _MATERIALIZED
        for access in call.writes
    }
    for result in fused.writes:
        if result in materialized:
            continue
        size = _size(fitted, result)
        operand = next(
            (b for b in ending if b not in overwritten and _size(fitted, b) == size), None
        )
        if (
            operand is not None
            and operand in fused.reads
            and fitted.trace.buffers[result].role != "parameter_gradient"
        ):
            overwritten.add(operand)
    return overwritten


def _op(fitted: FittedTrace, fused: _FusedOp, live: Polynomial, precision: Precision) -> Op:
    numbers = fitted.numbers
    first = fused.calls[0]
    read, written = sum_polynomials(fused.reads.values()), sum_polynomials(fused.writes.values())
    live = sum_polynomials([live, layout_copy_bytes(first, numbers)])
    widening = 4 // PRECISION_BYTES[precision]
    for call in fused.calls:
        if call.name == _SUMS_IN_FLOAT32 and widening > 1:
            table = sum_polynomials([numbers[call.writes[0].nbytes]] * widening)
            read, written, live = (
                sum_polynomials([read, table]),
                sum_polynomials([written, table]),
                sum_polynomials([live, table]),
            )
    return Op(
        name="+".join(call.name for call in fused.calls),
        kind=first.kind,
        flop=sum_polynomials(numbers[call.flop] for call in fused.calls),
        read_bytes=read,
        written_bytes=written,
        live_bytes=live,
        shape=matmul_shape(first, numbers) if len(fused.calls) == 1 else None,
        kept=kept_blocks(first, numbers),
        collective=collective_of(first, numbers),
        is_causal=first.is_causal,
    )


def _bytes(fitted: FittedTrace, buffer: int) -> Polynomial:
    """Bytes of a buffer."""
    return fitted.numbers[fitted.trace.buffers[buffer].nbytes]


def _size(fitted: FittedTrace, buffer: int) -> float:
    """Bytes of a buffer at the typical micro-batch and sequence."""
    return _bytes(fitted, buffer).at(*_TYPICAL)


def _smaller(one: Polynomial, other: Polynomial) -> Polynomial:
    return min(one, other, key=lambda polynomial: polynomial.at(*_TYPICAL))


def _larger(one: Polynomial, other: Polynomial) -> Polynomial:
    return max(one, other, key=lambda polynomial: polynomial.at(*_TYPICAL))
