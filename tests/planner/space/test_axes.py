"""Which choices a search had, in words."""

from factories import tiny_graph, tiny_machine
from windlass.planner.choose import choose_plan
from windlass.schema.request import ResolvedRequest


def axes(devices: int, *pins: str) -> str:
    sizes = ("train.batch=4", "train.sequence=32", "train.steps=10")
    asked = ResolvedRequest.resolve(overrides=(*sizes, *pins))
    return choose_plan(asked, tiny_graph(), tiny_machine(devices=devices)).axes


def test_axes_are_named_as_searched_pinned_or_closed():
    searched, pinned, closed, listed = axes(2, "parallel.data=1", "recompute=full").split("; ")
    assert "parallel.context" in searched
    assert "parallel.pipeline" in searched
    assert pinned == "the request pins parallel.data, recompute"
    assert "phases" in closed  # the machine has no tier to hold them
    assert listed.startswith("of virtual stages 2, 3, 4")  # 5 may be pinned


def test_the_numbers_of_phases_that_were_searched_are_named():
    asked = ResolvedRequest.resolve(
        overrides=("train.batch=4", "train.sequence=32", "train.steps=9")
    )
    found = choose_plan(asked, tiny_graph(layers=3), tiny_machine(host="2 GiB"))
    assert "of phases of a stage 2, 3, 4, and one for each layer" in found.axes


def test_one_device_has_no_parallel_choice():
    searched, closed = axes(1).split("; ")
    assert "parallel" not in searched
    assert "parallel.pipeline" in closed
