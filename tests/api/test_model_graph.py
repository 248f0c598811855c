"""Graphs of requested models are captured once, part by part."""

import pytest

from command_line import TINY
from windlass.api.model_graph import capture, capture_tensor_degrees
from windlass.api.plan import make_request


@pytest.mark.usefixtures("home")
def test_an_interrupted_capture_keeps_the_degrees_that_it_has_done() -> None:
    model = make_request(*TINY).model
    graph = capture(model)

    def interrupt(label: str, done: int, total: int | None) -> None:
        del label, total
        if done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_tensor_degrees(model, graph, (2, 4), progress=interrupt)

    assert set(capture(model).tensor_shards) | set(capture(model).unshardable) == {2}
