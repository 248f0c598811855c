"""Plans that compute their loss fused with the projection to the vocabulary."""

from itertools import product

import pytest

from factories import catalog_graph, tiny_graph, tiny_machine, tiny_plan
from windlass.errors import InputErrors
from windlass.planner.choose import choose_plan
from windlass.program.validate_plan import plan_errors
from windlass.schema.request import ResolvedRequest

GRAPH = catalog_graph("gpt-tiny", 2, layers=2, width=64, heads=2, vocabulary=20_000, sequence=64)
"""Logits of one sequence take 4.9 MiB, those of a batch of 32 take 156 MiB."""


def request(*overrides: str) -> ResolvedRequest:
    sizes = ("train.batch=32", "train.sequence=64", "train.steps=10", "phases=1")
    return ResolvedRequest.resolve(overrides=(*sizes, *overrides))


@pytest.mark.parametrize(
    ("memory", "pins"),
    [
        ("1 GiB", ()), ("75 MiB", ("batch.micro=32",)), ("70 MiB", ("precision=float32",)),
        ("30 MiB", ()),
        *(
            pytest.param(memory, pins, marks=pytest.mark.slow)
            for memory, pins in product(
                ("1 GiB", "75 MiB", "70 MiB", "30 MiB"),
                ((), ("batch.micro=32",), ("precision=float32",)),
            )
        ),
    ],
)  # fmt: skip
def test_an_open_loss_is_the_faster_of_both_where_memory_is_short(
    memory: str, pins: tuple[str, ...]
):
    machine = tiny_machine(memory=memory)

    chosen = choose_plan(request(*pins), GRAPH, machine)

    pinned = [
        choose_plan(request(f"loss={loss}", *pins), GRAPH, machine)
        for loss in (("plain",) if memory == "1 GiB" else ("plain", "fused"))
    ]
    fitting = [result.run_seconds for result in pinned if result.run_seconds is not None]
    assert chosen.run_seconds == (min(fitting) if fitting else None)


def test_a_pinned_loss_is_kept_on_several_devices():
    machine = tiny_machine(devices=4)
    for loss in ("plain", "fused"):
        plan = choose_plan(request(f"loss={loss}"), GRAPH, machine).plan
        assert plan is not None
        assert (plan.loss or "plain") == loss
        assert loss == "plain" or plan.parallel.tensor == 1


def test_a_loss_that_cannot_be_fused_is_refused_with_the_reason():
    machine = tiny_machine(devices=2)
    with pytest.raises(InputErrors, match=r"`loss` = fused with `parallel.tensor` = 2"):
        choose_plan(request("loss=fused", "parallel.tensor=2"), GRAPH, machine)
    plain = tiny_graph(vocabulary=90)
    with pytest.raises(InputErrors, match=r"does not return what one `nn.Linear` gives"):
        choose_plan(request("loss=fused"), plain, machine)
    plan = tiny_plan(plain, machine).model_copy(update={"loss": "fused"})
    (error,) = plan_errors(plan, plain, machine)
    assert "leave `loss` out" in error


def test_the_loss_is_no_part_of_what_identifies_a_graph():
    kinds = {
        name: kind.model_copy(update={"fused_costs": ()}) for name, kind in GRAPH.kinds.items()
    }
    assert GRAPH.model_copy(update={"kinds": kinds}).fingerprint() == GRAPH.fingerprint()
    assert GRAPH.shard(1, loss="fused").label == GRAPH.label
