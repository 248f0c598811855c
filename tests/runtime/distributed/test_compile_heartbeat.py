"""A rank that compiles makes progress, for a while."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import torch
from torch.fx import GraphModule

from windlass.runtime.distributed.heartbeat import CompileHeartbeat

COMPILING = 0.3
"""Seconds that each compilation here takes."""


@contextmanager
def beating(**more: float) -> Iterator[list[int]]:
    """The slots that compilations count in."""
    slots = [0, -1, 0]
    with closing(CompileHeartbeat(slots, seconds=0.01, **more)):
        yield slots


def compile_slowly() -> None:
    def backend(graph: GraphModule, _: object) -> Callable[..., object]:
        time.sleep(COMPILING)
        return graph.forward

    run = torch.compile(lambda x: x.sin() + 1, backend=backend)
    torch.testing.assert_close(run(torch.zeros(3)), torch.ones(3))


def test_work_is_counted_while_torch_compiles_and_no_longer():
    with beating() as slots:
        compile_slowly()
        counted = slots[2]
        time.sleep(0.05)
        assert slots == [0, -1, counted]
    assert counted >= 5


def test_a_compilation_that_takes_too_long_counts_as_progress_no_more():
    with beating(longest_seconds=0.05) as slots:
        compile_slowly()
    assert slots[2] == 5


def test_nothing_is_counted_once_the_heartbeat_is_closed():
    with beating() as slots:
        pass
    compile_slowly()
    assert slots == [0, -1, 0]
