"""Sections of a pass: the best of all, and their traffic in a simulated cache."""

from collections import OrderedDict
from itertools import combinations, pairwise

import pytest

from cost.dataflow.subjects import chip, subject
from windlass.cost.dataflow.dataflow_report import dataflow_report
from windlass.cost.dataflow.sections import best_sections, section_ranges

LINE = 256
"""Bytes of a line of the simulated cache."""


@pytest.mark.parametrize("megabytes", [1, 30, 70, 120, 500])
def test_no_other_way_to_cut_a_pass_into_sections_that_fit_moves_less(megabytes: int):
    passed = subject(role=None).pass_ops("training forward", 0.75)
    ranges, capacity = section_ranges(passed), megabytes * 1e6
    count = len(passed.kernels)
    ways = (
        (0, *cuts, count)
        for number in range(count)
        for cuts in combinations(range(1, count), number)
    )
    least = min(
        sum(ranges[pair].far_bytes for pair in pairwise(way))
        for way in ways
        if all(
            last - first == 1 or ranges[first, last].on_chip_bytes <= capacity
            for first, last in pairwise(way)
        )
    )
    assert sum(each.far_bytes for each in best_sections(ranges, capacity)) == least


# A second way to count: the loops of GEMM, GELU and GEMM, address by address.


class _Cache:
    """A fully associative cache that evicts the line whose use is longest ago."""

    def __init__(self, nbytes: int) -> None:
        self.lines: OrderedDict[tuple[str, int], None] = OrderedDict()
        self.capacity, self.misses = nbytes // LINE, 0

    def touch(self, tensor: str, start: int, nbytes: int) -> None:
        for line in range(start // LINE, (start + nbytes - 1) // LINE + 1):
            if (tensor, line) in self.lines:
                self.lines.move_to_end((tensor, line))
                continue
            self.misses += 1
            self.lines[tensor, line] = None
            if len(self.lines) > self.capacity:
                self.lines.popitem(last=False)


TOKENS, WIDTH, FFN, TILE = 2048, 128, 512, 64


def _run(kernels: list[list[str]], cache: _Cache, *, fused: bool) -> int:
    """Bytes that miss the cache if each kernel, or each tile of all kernels, runs in turn."""
    rows = {"x": WIDTH, "y": FFN, "g": FFN, "z": WIDTH}
    weights = {"w1": WIDTH * FFN, "b1": FFN, "w2": WIDTH * FFN, "b2": WIDTH}
    steps = [(kernel, tile) for kernel in kernels for tile in range(0, TOKENS, TILE)]
    if fused:
        steps = [(kernel, tile) for tile in range(0, TOKENS, TILE) for kernel in kernels]
    for kernel, tile in steps:
        for tensor in kernel:
            if tensor in weights:
                cache.touch(tensor, 0, 4 * weights[tensor])
            elif fused and tensor in ("y", "g"):
                # A tile that nothing reads later is made in the same place again.
                cache.touch(tensor, 0, 4 * TILE * rows[tensor])
            else:
                cache.touch(tensor, 4 * tile * rows[tensor], 4 * TILE * rows[tensor])
    return cache.misses * LINE


def test_a_simulated_cache_misses_what_the_report_predicts_that_far_memory_moves():
    dials = {"width": WIDTH, "ffn": FFN, "heads": 4}
    small = subject("gpt-tiny", size=(1, TOKENS), precision="float32", **dials)
    first, gelu, second = ["x", "w1", "b1", "y"], ["y", "g"], ["g", "w2", "b2", "z"]
    cache_bytes = 2**20  # less than the 4 MiB of y, more than all weights with a few tiles
    flow = dataflow_report(small, chip(cache_bytes), ()).passes[0]
    assert flow.whole.on_chip_bytes <= cache_bytes
    apart = _run([first, gelu, second], _Cache(cache_bytes), fused=False)
    assert apart == flow.level("kernel by kernel").far_bytes
    # The tile of y is made in the cache once, where the section has it in registers.
    together = _run([first, gelu, second], _Cache(cache_bytes), fused=True)
    tiles = 4 * TILE * (FFN + FFN)
    assert together == flow.level("dataflow").far_bytes + tiles
