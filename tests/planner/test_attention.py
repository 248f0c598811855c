"""The planner's choice of how attention is computed."""

import pytest

from factories import catalog_graph, tiny_machine
from windlass.cost.predict import predict_plan
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.schema.machine import Machine
from windlass.schema.machine.rates import AttentionRate, Curve, Point
from windlass.schema.plan import Plan
from windlass.schema.request import ResolvedRequest

GRAPH = catalog_graph("gpt-tiny", layers=2, width=64, heads=2, vocabulary=300, sequence=256)


def machine(memory: str = "1GB", **rates: float) -> Machine:
    """A machine that computes attention so fast, by how."""
    measured = tuple(
        AttentionRate(
            head_width=32,
            attention=None if name == "flash" else name,
            forward=Curve(points=(Point(256, rate),)),
            backward=Curve(points=(Point(256, rate),)),
        )
        for name, rate in rates.items()
    )
    plain = tiny_machine(memory=memory)
    matmul = tuple(
        each.model_copy(update={"attention_rates": measured}) for each in plain.device.matmul
    )
    return plain.model_copy(update={"device": plain.device.model_copy(update={"matmul": matmul})})


def choose(where: Machine, *overrides: str) -> Plan:
    asked = ("train.batch=4", "train.sequence=256", "train.steps=10", *overrides)
    plan = choose_plan(ResolvedRequest.resolve(overrides=asked), GRAPH, where).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({"flash": 1e9, "math": 2e9}, "math"),
        ({"flash": 2e9, "math": 1e9}, None),
        ({"flash": 1e9, "cudnn": 3e9, "efficient": 2e9}, "cudnn"),
        ({"flash": 1e9}, None),
        ({}, None),
    ],
)
def test_the_fastest_attention_that_was_measured_is_chosen(
    rates: dict[str, float], chosen: str | None
):
    assert choose(machine(**rates)).attention == chosen


def test_a_pinned_attention_is_kept():
    fast = machine(flash=1e9, math=2e9)
    assert choose(fast, "attention=flash").attention is None
    assert choose(machine(flash=2e9, math=1e9), "attention=math").attention == "math"


def test_attention_whose_speed_is_not_known_is_refused():
    with pytest.raises(InputErrors, match="states no rate for it; choose flash or math"):
        choose(machine(flash=1e9, math=2e9), "attention=cudnn")


def test_plain_attention_is_predicted_at_its_own_rate_and_with_its_probabilities():
    where = machine(flash=1e9, math=2e9)
    plain, fused = choose(where), choose(where, "attention=flash", "compile=false")
    plain = fused.model_copy(update={"attention": "math"})
    one, other = (predict_plan(plan, GRAPH, where) for plan in (plain, fused))
    assert one.step_seconds < other.step_seconds
    assert one.peaks[0].by_class["activations"] > other.peaks[0].by_class["activations"]
