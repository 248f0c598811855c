"""Sections of a pass: their traffic with far memory, the memory that they need, the best ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from windlass.cost.dataflow.pass_ops import TILE, PassBuffer, PassOp, PassOps
from windlass.schema import FlowEdge


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionNeeds:
    """A run of kernels, what it moves, and the memory on the chip that it needs for that."""

    first: int
    """Index of its first op."""
    last: int
    """Index after its last op."""
    reads: Mapping[int, float]
    """Bytes read from far memory, by buffer."""
    writes: Mapping[int, float]
    """Bytes written to far memory, by buffer."""
    on_chip_bytes: float

    @property
    def far_bytes(self) -> float:
        """Bytes read from and written to far memory."""
        return sum(self.reads.values()) + sum(self.writes.values())


Ranges = Mapping[tuple[int, int], SectionNeeds]
"""Needs of each run of kernels, by its first kernel and the kernel after its last."""


def kernel_by_kernel(passed: PassOps) -> tuple[SectionNeeds, ...]:
    """Each op by itself, as the layer's eager ops move it: a result is written even if unread."""
    return tuple(
        SectionNeeds(
            first=index,
            last=index + 1,
            reads=op.reads,
            writes=op.writes,
            on_chip_bytes=_needed_bytes(passed, [(index, index + 1)]),
        )
        for index, op in enumerate(passed.ops)
    )


def section_ranges(passed: PassOps) -> Ranges:
    """What each run of kernels would need as one section."""
    count = len(passed.kernels)
    return {
        (first, last): _section(passed, first, last)
        for first in range(count)
        for last in range(first + 1, count + 1)
    }


def best_sections(ranges: Ranges, on_chip_bytes: float) -> tuple[SectionNeeds, ...]:
    """The sections with the least traffic that fit a chip, and of these the fewest.

    A kernel by itself always fits: its tiles stay in registers.

    Args:
        ranges: what each run of kernels would need.
        on_chip_bytes: memory on the chip.
    """
    count = max(last for _, last in ranges)
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)]
    for last in range(1, count + 1):
        options = (
            (best[first][0] + section.far_bytes, best[first][1] + 1, first)
            for first in range(last)
            if (section := ranges[first, last]).on_chip_bytes <= on_chip_bytes or last - first == 1
        )
        best.append(min(options))
    found, last = [], count
    while last:
        first = best[last][2]
        found.append(ranges[first, last])
        last = first
    return tuple(reversed(found))


def section_edges(passed: PassOps, section: SectionNeeds) -> Iterator[FlowEdge]:
    """Every edge that begins or ends in a section.

    Edges from far memory add up to what the section reads, those to far memory to what it writes.
    An operand that several of its ops read comes in once, for the first of them, and goes on from
    there.
    """

    def edge(buffer: int, source: int | None, target: int | None, nbytes: float) -> FlowEdge:
        about = passed.buffers[buffer]
        return FlowEdge(
            tensor=about.name, source=source, target=target, nbytes=nbytes,
            is_weight=about.is_weight,
        )  # fmt: skip

    maker: dict[int, int] = {}
    left = dict(section.reads)
    for index in range(section.first, section.last):
        op = passed.ops[index]
        for buffer, nbytes in op.reads.items():
            far = min(nbytes, left.get(buffer, 0.0))
            if far:
                left[buffer] -= far
                yield edge(buffer, None, index, far)
            if nbytes > far and buffer in maker:
                yield edge(buffer, maker[buffer], index, nbytes - far)
            maker.setdefault(buffer, index)
        maker.update(dict.fromkeys(op.writes, index))
    for buffer, nbytes in section.writes.items():
        yield edge(buffer, maker[buffer], None, nbytes)


def _section(passed: PassOps, first_kernel: int, last_kernel: int) -> SectionNeeds:
    kernels = passed.kernels[first_kernel:last_kernel]
    first, last = kernels[0][0], kernels[-1][1]
    reads, made = _outside_reads(passed.ops[first:last], passed.buffers)
    later = {buffer for op in passed.ops[last:] for buffer in op.reads}
    writes = {
        buffer: nbytes
        for buffer, nbytes in made.items()
        if buffer in later or passed.buffers[buffer].survives
    }
    return SectionNeeds(
        first=first, last=last, reads=reads, writes=writes,
        on_chip_bytes=_needed_bytes(passed, kernels),
    )  # fmt: skip


def _outside_reads(
    ops: Sequence[PassOp], buffers: Mapping[int, PassBuffer]
) -> tuple[dict[int, float], dict[int, float]]:
    """Bytes that some ops read of what they do not make, and bytes of what they make, by buffer."""
    reads: dict[int, float] = {}
    made: dict[int, float] = {}
    for op in ops:
        for buffer, nbytes in op.reads.items():
            if buffer not in made:
                reads[buffer] = min(reads.get(buffer, 0.0) + nbytes, buffers[buffer].nbytes)
        for buffer, nbytes in op.writes.items():
            made[buffer] = max(made.get(buffer, 0.0), nbytes)
    return reads, made


def _needed_bytes(passed: PassOps, kernels: Sequence[tuple[int, int]]) -> float:
    """Memory on the chip with which a section moves each tensor once: the lesser of two orders.

    Either all weights stay, and tokens flow through in tiles with two buffers between kernels
    (Prabhakar et al. 2024, arXiv:2405.07518; attention takes a whole sequence at a time). Or all
    tokens stay, and weights flow through in tiles. What only one kernel touches stays in registers.
    """
    uses = _kernel_uses(passed, kernels)
    weights = {b for b in uses if passed.buffers[b].is_weight}
    resident = sum(passed.buffers[b].nbytes for b in weights)
    ops = passed.ops[kernels[0][0] : kernels[-1][1]]
    tokens = passed.sequence if any(op.kind == "attention" for op in ops) else TILE
    share = min(1.0, tokens / passed.tokens)
    moving = sum(passed.buffers[b].nbytes for b in uses if b not in weights)
    weights_stay = resident + 2 * share * moving
    return min(weights_stay, _token_bytes(passed, uses) + _weight_tiles(passed, ops))


def _kernel_uses(
    passed: PassOps, kernels: Sequence[tuple[int, int]]
) -> dict[int, tuple[int, int, bool]]:
    """First and last kernel that touches each buffer, and whether it is made here.

    Buffers that one kernel makes, and that nothing else reads, are left out.
    """
    spans: dict[int, tuple[int, int, bool]] = {}
    for place, (first, last) in enumerate(kernels):
        for op in passed.ops[first:last]:
            for buffer in op.reads:
                start, _, made = spans.get(buffer, (place, place, False))
                spans[buffer] = (start, place, made)
            for buffer in op.writes:
                start, _, _ = spans.get(buffer, (place, place, True))
                spans[buffer] = (start, place, True)
    later = {buffer for op in passed.ops[kernels[-1][1] :] for buffer in op.reads}
    return {
        buffer: span
        for buffer, span in spans.items()
        if not span[2] or span[0] < span[1] or buffer in later or passed.buffers[buffer].survives
    }


def _token_bytes(passed: PassOps, uses: Mapping[int, tuple[int, int, bool]]) -> float:
    """The most bytes of activations that are there at once if all tokens stay.

    A result that no later kernel of the section reads leaves in tiles, as it is made.
    """
    steps = 1 + max((last for _, last, _ in uses.values()), default=0)
    change = [0.0] * (steps + 1)
    for buffer, (first, last, made) in uses.items():
        if passed.buffers[buffer].is_weight or (made and first == last):
            continue
        change[first] += passed.buffers[buffer].nbytes
        change[last + 1] -= passed.buffers[buffer].nbytes
    return max(accumulate(change))


def _weight_tiles(passed: PassOps, ops: Sequence[PassOp]) -> float:
    """Two buffers for the largest tile of a weight: `TILE` of its output features."""
    tiles = (
        passed.buffers[buffer].nbytes * min(1.0, TILE / op.columns)
        for op in ops
        if op.columns
        for buffer in (*op.reads, *op.writes)
        if passed.buffers[buffer].is_weight
    )
    return 2 * max(tiles, default=0.0)
