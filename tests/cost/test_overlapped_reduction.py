"""Collectives over replicas, overlapping with passes and alternating with them."""

import pytest
from hypothesis import given, strategies as st

from cost.equal_blocks import equal_blocks
from factories import tiny_plan
from windlass.cost.communication_time import CommunicationCosts
from windlass.cost.predict import predict_plan
from windlass.cost.simulator.event_simulator import simulate
from windlass.program.instruction import Instruction
from windlass.program.lowering.lower import lower
from windlass.schema.graph import Graph
from windlass.schema.machine import ExecutionModel, Machine
from windlass.schema.plan import Plan

PRODUCT = 2 * (2 * 16) * 32 * 32 / 1e9
"""Seconds of one product of `equal_blocks`: one forward, two backward."""
NEARLY = 1e-6
"""Largest share of a product that everything but products and reductions takes on that machine."""


def replicas(
    *,
    layers: int = 4,
    sum_products: float = 1.0,
    accumulation: int = 1,
    sharding: tuple[int, int] = (1, 1),
    replicas: int = 2,
    kind: str = "cuda",
    hosts: int = 1,
    rule: ExecutionModel = "overlapping",
    clip: bool = False,
) -> tuple[Plan, Graph, Machine]:
    """Replicas of equal blocks, of which a whole sum takes as long as so many products."""
    graph, machine = equal_blocks(layers)
    device = machine.device.model_copy(update={"kind": kind})
    machine = machine.model_copy(
        update={
            "device": device, "execution_model": rule, "hosts": hosts,
            "devices_per_host": machine.devices_per_host // hosts,
        }
    )  # fmt: skip
    whole = tiny_plan(graph, machine, data=replicas)
    (link,) = machine.links
    seconds = CommunicationCosts(whole, graph, machine).seconds(Instruction("reduce_grads", 0))
    rate = link.rate * seconds / (sum_products * PRODUCT)
    machine = machine.model_copy(update={"links": (link.model_copy(update={"rate": rate}),)})
    plan = tiny_plan(
        graph, machine, data=replicas, sharding=sharding, accumulation=accumulation, clip=clip
    )
    return plan, graph, machine


@given(
    layers=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    sum_products=st.floats(0.01, 10.0),
    clip=st.booleans(),
)
def test_gradient_reductions_overlap_with_the_backward_pass_one_after_the_other(
    layers: int, accumulation: int, sum_products: float, clip: bool
):
    """The last is over once the pass has ended and its own sum has, or all have from the first."""
    plan, graph, machine = replicas(
        layers=layers, accumulation=accumulation, sum_products=sum_products, clip=clip
    )
    passes = 3 * layers * accumulation
    within = max(2 * layers + sum_products, 2 + layers * sum_products)
    products = passes - 2 * layers + within
    step = predict_plan(plan, graph, machine)
    assert step.step_seconds == pytest.approx(products * PRODUCT, rel=NEARLY)
    assert sum(step.by_kind.values()) == pytest.approx(step.step_seconds)
    assert sum(step.by_term.values()) == pytest.approx(step.step_seconds)


@given(
    layers=st.integers(1, 6),
    accumulation=st.integers(1, 3),
    sum_products=st.floats(0.01, 10.0),
    clip=st.booleans(),
)
def test_shards_are_gathered_ahead_of_the_forward_pass_and_scattered_behind_the_backward_pass(
    layers: int, accumulation: int, sum_products: float, clip: bool
):
    """A layer waits for its own gather only, and a scatter for the one before."""
    plan, graph, machine = replicas(
        layers=layers, accumulation=accumulation, sum_products=sum_products, sharding=(2, 2),
        clip=clip,
    )  # fmt: skip
    (program, *_) = lower(plan, graph)
    each = CommunicationCosts(plan, graph, machine)
    gather = each.seconds(Instruction("unshard_weights", 0)) / PRODUCT
    scatter = each.seconds(Instruction("reduce_grads", 0)) / PRODUCT
    assert sum(i.kind == "unshard_weights" for i in program.instructions) == layers
    first_forward = max(gather + layers, layers * gather + 1)
    last_backward = max(2 * layers + scatter, 2 + layers * scatter)
    products = first_forward + 3 * layers * (accumulation - 1) + last_backward
    step = predict_plan(plan, graph, machine)
    assert step.step_seconds == pytest.approx(products * PRODUCT, rel=NEARLY)
    assert sum(step.by_kind.values()) == pytest.approx(step.step_seconds)
    assert sum(step.by_term.values()) == pytest.approx(step.step_seconds)


@pytest.mark.parametrize(
    ("how", "products"),
    [
        # Parts of weights come together behind the updates; a scatter, half as long as a whole sum,
        # is behind the backward pass.
        ({"sharding": (1, 2)}, 12 + 0.5 * 3 + 4 * 0.5 * 3),
        ({"rule": "bulk-synchronous"}, 12 + 4 * 3),
        # Processes of one host need their cores for sums too, those of two hosts do not.
        ({"kind": "cpu"}, 12 + 4 * 3),
        ({"kind": "cpu", "hosts": 8}, 4 + 2 + 4 * 3),
    ],
)
def test_blocking_collectives_overlap_with_nothing(how: dict[str, object], products: float):
    plan, graph, machine = replicas(sum_products=3, **how)  # type: ignore[arg-type]
    step = predict_plan(plan, graph, machine).step_seconds
    assert step == pytest.approx(products * PRODUCT, rel=NEARLY)


def test_a_reduce_scatter_alternates_with_the_all_reduces_that_follow_it():
    """Two of four replicas share the state: a layer's gradient is scattered, then all-reduced.

    gloo's reduce-scatter, between hosts too, computes on the host.
    """
    plan, graph, machine = replicas(
        replicas=4, sharding=(1, 2), sum_products=6, kind="cpu", hosts=8
    )
    links = CommunicationCosts(plan, graph, machine)
    reduce = Instruction("reduce_grads", 0)
    whole, beside = links.seconds(reduce), links.overlapped_seconds(reduce)
    spread = links.seconds(Instruction("all_gather_params", 0))
    assert 0 < beside < whole
    step = predict_plan(plan, graph, machine).step_seconds
    passed = 4 * PRODUCT + 4 * (2 * PRODUCT + whole - beside) + beside
    queued = 4 * PRODUCT + 2 * PRODUCT + 4 * whole
    assert step == pytest.approx(max(passed, queued) + 4 * spread, rel=NEARLY)


def test_the_grad_norm_waits_for_reductions_and_each_reduction_starts_at_once():
    plan, graph, machine = replicas(sum_products=3, clip=True)
    (lane, *_) = simulate(plan, graph, machine, lower(plan, graph)).devices
    took = {
        kind: sum(
            end - start
            for name, start, end in zip(lane.kinds, lane.starts, lane.ends, strict=True)
            if name == kind
        )
        for kind in ("reduce_grads", "grad_norm")
    }
    assert took["reduce_grads"] == pytest.approx(0.0, abs=NEARLY * PRODUCT)
    assert took["grad_norm"] == pytest.approx((2 + 4 * 3 - 8) * PRODUCT, rel=NEARLY)
