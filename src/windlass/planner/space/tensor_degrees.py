"""Tensor-parallel degrees and grids that a request leaves open on a machine."""

from collections.abc import Collection, Sequence

from windlass.cost import ring_cost
from windlass.schema import (
    OWN_STACK,
    Link,
    Machine,
    ResolvedRequest,
    TensorGrid,
    grid_columns,
    grid_rows,
    tensor_degree,
)

MAX_TENSOR_DEGREE = 64
"""Largest tensor-parallel degree of an open request: the largest of any published plan."""

_MAX_GRID_RANKS = 256
"""Largest degree that is tried where nothing fits: a POD256 holds `megatron-530b` in 16x16 only."""

_MAX_GRID_ROWS = 16
"""Attention heads are divided by rows, and few models have heads for more."""


def open_tensor_degrees(
    request: ResolvedRequest,
    machine: Machine,
    unshardable: Collection[int] = (),
    *,
    every: bool = False,
) -> tuple[int, ...]:
    """Tensor-parallel degrees above 1 that a request asks for or leaves open on a machine.

    All powers of two up to `MAX_TENSOR_DEGREE`, whatever link joins them: the search finds out when
    tensor parallelism over slow links does not pay. Each is tried in one dimension and as the grid
    that is quickest on these links: which of both is quicker depends on the micro-batch, and few
    models have heads for many ranks in one dimension.

    Args:
        unshardable: degrees that the model cannot be sharded by; for such a grid the next quickest
            is tried.
        every: adds the grids that need least memory: those that no other one divides further.
    """
    pin = request.parallel.tensor
    if pin is not None:
        return (pin,) if 1 < pin <= machine.devices else ()
    most = _max_tensor_degree(request, machine)
    powers = tuple(2**power for power in range(1, most.bit_length()) if 2**power <= most)
    if not (machine.stack or OWN_STACK).can.tensor_grids:
        return powers
    grids = (
        (each for each in tensor_grids(degree, machine.links) if each not in unshardable)
        for degree in powers
    )
    quickest = (next(each, None) for each in grids)
    degrees = (*powers, *(each for each in quickest if each is not None))
    if not every:
        return degrees
    able = [each for each in every_tensor_degree(request, machine) if each not in unshardable]
    ranks = machine.devices // _pinned_degrees(request)
    smallest = (
        each for each in able if not any(_divides_further(other, each, ranks) for other in able)
    )
    return tuple(dict.fromkeys((*degrees, *smallest)))


def every_tensor_degree(request: ResolvedRequest, machine: Machine) -> tuple[int, ...]:
    """All tensor-parallel degrees above 1, in all grids that divide the sequence equally.

    Args:
        machine: has at least as many devices as the largest of them takes.
    """
    return tuple(
        tensor_degree(degree // columns, columns)
        for degree in range(2, _max_tensor_degree(request, machine, every=True) + 1)
        for columns in range(1, degree + 1)
        if degree % columns == 0 and request.train.sequence % (degree // columns) == 0
    )


def _max_tensor_degree(request: ResolvedRequest, machine: Machine, *, every: bool = False) -> int:
    ranks = machine.devices // _pinned_degrees(request) if machine.links else 1
    return min(_MAX_GRID_RANKS if every else MAX_TENSOR_DEGREE, ranks)


def _pinned_degrees(request: ResolvedRequest) -> int:
    return (request.parallel.pipeline or 1) * (request.parallel.data or 1)


def _divides_further(other: int, degree: int, ranks: int) -> bool:
    """Whether a grid is another one whose rows or columns are divided again, on no fewer ranks."""
    return (
        other != degree
        and grid_rows(other) % grid_rows(degree) == 0
        and grid_columns(other) % grid_columns(degree) == 0
        and ranks // int(other) * int(other) >= ranks // int(degree) * int(degree)
    )


def tensor_grids(degree: int, links: Sequence[Link]) -> tuple[TensorGrid, ...]:
    """Grids of several rows and columns, those with the quickest collectives of a block first.

    Args:
        degree: tensor-parallel degree, a power of two.
        links: the machine's links, innermost first, at least one.
    """
    candidates = (
        2**power
        for power in range(1, degree.bit_length() - 1)
        if degree <= 2**power * _MAX_GRID_ROWS
    )
    quickest = sorted(
        candidates, key=lambda columns: _communication_seconds(degree, columns, links)
    )
    return tuple(TensorGrid(degree // columns, columns) for columns in quickest)


def _communication_seconds(degree: int, columns: int, links: Sequence[Link]) -> float:
    """Seconds of communication in a block's forward pass for each byte of its whole input.

    On r x c ranks, a block whose feed-forward is four times as wide sends `4/c (r-1)/r` over its
    column, whose ranks lie c devices apart, and `12/r (c-1)/c` over its row of neighbours. Latency
    is left out.
    """
    rows, seconds = degree // columns, 0.0
    if rows > 1:
        cost = ring_cost(links, rows, stride=columns, active_devices=degree)
        seconds += 4 / columns * (rows - 1) / rows * cost.byte_seconds
    if columns > 1:
        cost = ring_cost(links, columns, stride=1, active_devices=degree)
        seconds += 12 / rows * (columns - 1) / columns * cost.byte_seconds
    return seconds
